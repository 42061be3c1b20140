"""The autotuner: a search that knows no devices (`search`), and the ranks that measure for it (`coordinator`)."""
