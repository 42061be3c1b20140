"""Measurements of all runs, in one SQLite file."""
