"""Adapters that inference engines load, off by default (docs/engines.md)."""
