"""Memory that every rank of a group reaches: an arena of each kind, and users' tensors that are registered."""
