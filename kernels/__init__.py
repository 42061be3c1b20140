"""Device code: Triton kernels, their primitives, and how one is launched. Sees tensors and ints, never a group or a store."""
