"""Device code: Triton kernels, their primitives, and their launch. It handles tensors and ints, and knows no store."""
