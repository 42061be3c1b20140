"""The mutants of `devtools/notes/mutants.md`, by the part that they change."""
