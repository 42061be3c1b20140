"""Counters and timers of calls, and the file that publishes them."""
