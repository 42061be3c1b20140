"""What instructions do that are more than arithmetic: memory, atomics, exchanges in a warp, barriers in memory."""
