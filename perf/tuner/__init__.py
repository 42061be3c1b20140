"""The autotuner: a search that knows no devices (`search`), and what measures for it (`live`)."""
