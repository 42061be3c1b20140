"""The accesses of interpreted kernels: when each happens, which stores arrive late, and which accesses race."""
