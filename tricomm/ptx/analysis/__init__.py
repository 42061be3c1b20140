"""What follows from a kernel's instructions: control flow, live and uniform registers, what a launch may ask."""
