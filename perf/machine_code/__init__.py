"""The machine code of the kernels."""
