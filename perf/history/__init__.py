"""The history: measurements of all runs in one SQLite file."""
