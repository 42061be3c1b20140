"""PTX, executed without a GPU: text to instructions, instructions to numpy code, numpy code to threads of a grid."""
