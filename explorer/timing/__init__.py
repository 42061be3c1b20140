"""Times of compiled kernels: the PTX machine executes them with a clock a warp."""
