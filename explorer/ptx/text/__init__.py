"""Reads a kernel from PTX text: statements, declarations, operands, and their Python lines."""
