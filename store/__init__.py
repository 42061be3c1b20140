"""Meeting and sharing: rendezvous, handle exchange, control page, shared memory. Knows nothing of kernels."""
