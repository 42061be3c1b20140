"""An all_reduce in two levels: by the kernels inside each node or island, by something else across."""
