"""A pass for `torch.compile`: all-reduces and the norms after them become fused calls (docs/fused.md)."""
