"""What this machine has, and what could go wrong on it."""
