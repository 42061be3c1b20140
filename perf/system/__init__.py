"""The facts of this machine, and its possible problems."""
