"""Instructions that do more than arithmetic: memory, atomics, exchanges in a warp, barriers in memory."""
