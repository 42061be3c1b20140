"""PTX text -> a kernel: statements, declarations, operands, and the Python lines behind them."""
