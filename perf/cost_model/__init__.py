"""Models the time of a kernel on a kind of machine."""
