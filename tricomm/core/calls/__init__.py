"""The calls of a communicator: collectives, messages, fused calls, users' kernels, and their preparation."""
