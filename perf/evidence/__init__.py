"""The GPU evidence kit: `python -m tricomm.perf.evidence` proves and measures tricomm on the GPUs of this machine.

    stages (checks and measurements) -> runner (a process per stage, every case written when it ends)
        -> results (JSON per stage, checked by `result_schema`) -> archive (with a summary on one page of Markdown)

A stage is a list of cases. A case that fails, crashes or hangs costs only itself, and an interrupted run can be
continued. `--dry-run` runs every stage's code on a CPU, with a launcher that launches nothing if a GPU is needed.
"""
