"""The machine that executes kernels: units, memory, exchanges, divergence, shipped all-reduces."""
