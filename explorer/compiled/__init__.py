"""Executes compiled kernels: a GPU's launch path over a simulated driver, which runs kernels on the PTX machine."""
