"""The mutants of `docs/mutants.md`, by what they change."""
