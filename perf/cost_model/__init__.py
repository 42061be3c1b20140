"""How long a kernel should take on a kind of machine."""
