"""The shipped kernels, one algorithm a file, and their registry."""
