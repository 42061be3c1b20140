"""Adapters that inference engines load, off until they are asked for (docs/engines.md)."""
