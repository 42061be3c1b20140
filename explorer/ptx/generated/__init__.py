"""Generates Python code from PTX: infers what is known about values before a kernel runs, and generates the code that
computes them."""
