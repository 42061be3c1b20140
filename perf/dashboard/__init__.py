"""What was measured and what jobs do now, for people to look at: a page, metrics for Prometheus, a trace."""
