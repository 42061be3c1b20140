"""Models the times of compiled kernels: the PTX machine executes them with a clock per warp."""
