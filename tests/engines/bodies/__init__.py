"""Rank functions of the engine tests."""
