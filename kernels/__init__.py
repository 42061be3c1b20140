"""Device code: Triton kernels, their primitives, how one is launched. Sees tensors and ints, never a store."""
