"""How a kernel is launched: compiled on a GPU, interpreted on a CPU."""
