"""Runs the units of a grid: launches, single units from the first instruction to the last, and diverged lanes."""
