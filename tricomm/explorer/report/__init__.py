"""Findings, in words, in files and as pictures."""
