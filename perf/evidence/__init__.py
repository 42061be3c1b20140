"""The GPU evidence kit: `python -m tricomm.perf.evidence` proves and measures tricomm on whatever GPU there is.

    stages (what is proved or measured) -> runner (a process per stage, every case written when it ends)
        -> results (JSON per stage, checked by `schema`) -> summary (one page of Markdown)

A stage is a list of cases; a case that fails, crashes or hangs costs itself, and a run that is cut off goes on where
it was. `--dry-run` runs every stage's code on a CPU, with a launcher that launches nothing where a GPU is needed.
"""
