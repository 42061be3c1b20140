"""Units of a grid that run: launches, one unit from its first instruction to its last, and its diverged lanes."""
