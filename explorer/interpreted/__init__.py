"""The accesses of interpreted kernels: when each happens, which stores are late, which accesses race."""
