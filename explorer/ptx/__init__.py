"""Executes PTX without a GPU: parses the text, generates numpy code from it, and runs this code for the threads of a
grid."""
