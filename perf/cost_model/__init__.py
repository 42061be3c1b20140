"""The time that a kernel should take on a kind of machine."""
