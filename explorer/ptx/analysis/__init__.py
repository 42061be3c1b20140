"""Static analysis of a kernel: control flow, live and uniform registers, and the limits of a launch."""
