"""Memory that every rank of a group reaches: the kinds of arena, and registered tensors of users."""
