"""Adapters for inference engines; those with the real package are marked `engines`."""
