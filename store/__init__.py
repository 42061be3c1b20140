"""Rendezvous, exchange of handles, control page, shared memory. Nothing here depends on kernels."""
