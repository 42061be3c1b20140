"""The calls of a communicator: collectives, messages, rows, users' kernels, and how each one is prepared."""
