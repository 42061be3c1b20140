"""Python code generated from PTX: what is known about values before a kernel runs, and the code that computes them."""
