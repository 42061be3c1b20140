"""Findings as text, in files and as pictures."""
