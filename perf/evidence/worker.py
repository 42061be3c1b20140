"""The process that runs a stage's cases, one after another: python -m tricomm.perf.evidence.worker STAGE JSON"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.stage import Case, Settings, Skip
from tricomm.perf.evidence.stages import find


def main(name: str, asked: str) -> int:
    """Run the cases that have not been run and were not lost; the exit code says that all have had their turn."""
    wanted = json.loads(asked)
    peers = Path(wanted["peers"]) if wanted["peers"] else None
    settings = Settings(Path(wanted["out"]), peers, wanted["dry_run"])
    stage = find(name)
    notes = Journal.of(stage, settings)
    for case in stage.cases(settings):
        if case.key not in notes.ended and case.key not in wanted["lost"]:
            _run(case, notes)
    return 0


def _run(case: Case, notes: Journal) -> None:
    notes.begin(case.key)
    began = time.monotonic()
    data, status, reason = {}, "ok", ""
    try:
        data = case.run()
    except Skip as missing:
        status, reason = "skipped", str(missing)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    notes.end(case.key, status, reason[:2000], round(time.monotonic() - began, 3), data)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
