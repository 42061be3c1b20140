"""Tests of the pass for `torch.compile`."""
