"""Python code made of PTX: what is known about values before a kernel runs, and the code that computes them."""
