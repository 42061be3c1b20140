"""Memory regions, the happens-before order of accesses, and the reordering that a GPU is allowed."""
