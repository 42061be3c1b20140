"""PTX text -> a kernel: statements, declarations, operands, and their Python lines."""
