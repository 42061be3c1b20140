"""The CUDA driver, and an address range that it maps."""
