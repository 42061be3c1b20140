"""Views of the history and of live jobs: a page, metrics for Prometheus, a trace."""
