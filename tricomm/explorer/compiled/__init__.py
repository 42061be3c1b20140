"""Compiled kernels under the explorer: the PTX that a GPU would run, thread by thread."""
