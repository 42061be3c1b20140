"""Instructions other than arithmetic: memory accesses, atomics, exchanges within a warp, barriers and fences."""
