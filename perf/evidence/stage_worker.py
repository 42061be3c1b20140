"""The process that runs a stage's cases as they are asked for: python -m tricomm.perf.evidence.stage_worker STAGE JSON

A case's key comes as a line on standard input, what became of it goes back as a line of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tricomm.perf.evidence import compiling
from tricomm.perf.evidence.stage import Case, Settings, Skip
from tricomm.perf.evidence.stages import find
from tricomm.perf.workers import end_with_parent


def main(name: str, asked: str) -> int:
    """Run the cases that are asked for, until nothing more can come."""
    end_with_parent()  # a case that hangs must not outlive the command
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints, on any level, must not get between the lines

    def say(**record: Any) -> None:
        out.write(json.dumps(record) + "\n")

    wanted = json.loads(asked)
    wanted |= {"out": Path(wanted["out"]), "peers": Path(wanted["peers"]) if wanted["peers"] else None}
    settings = Settings(**wanted)
    cases = {case.key: case for case in find(name).cases(settings)}
    say(ready=True)
    for line in sys.stdin:
        _run(cases[json.loads(line)], settings, say)
    return 0


def _run(case: Case, settings: Settings, say: Callable[..., None]) -> None:
    data, status, reason = {}, "ok", ""
    began = time.monotonic()
    try:
        jobs = case.jobs()
        compiling.all_of(jobs, in_this_process=settings.dry_run)
        compiled = {"variants": len(jobs), "compile_s": round(time.monotonic() - began, 3)} if jobs else {}
        data = {**case.run(), **compiled}
    except Skip as missing:
        status, reason = "skipped", str(missing)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    say(status=status, reason=reason[:2000], data=data)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
