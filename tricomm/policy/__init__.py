"""Which kernel or library runs a call: pure functions and the tuning tables that they read."""
