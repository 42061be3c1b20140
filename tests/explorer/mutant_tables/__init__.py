"""The mutants of `devtools/notes/mutants.md`, by what they change."""
