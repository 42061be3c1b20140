"""What memory is, which accesses are ordered, and what a GPU may do to the order."""
