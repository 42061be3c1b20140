"""Findings, and their output as text, files and pictures."""
