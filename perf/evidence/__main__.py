"""python -m tricomm.perf.evidence: run stages within a budget, and sum up what there is."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.perf import parsing
from tricomm.perf.evidence import archive, runner
from tricomm.perf.evidence.stage import EvidenceSettings
from tricomm.perf.evidence.stages import STAGES, find
from tricomm.store import process

_ABOUT = """Prove and measure tricomm on this machine, most telling cases first, until all are done or the budget ends.

The same command continues a run. Exit code 1 if a case failed or a stage cannot run here; cases that the budget left
over are no failure. In a dry run, stages that need a GPU may be missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    asked = _parsed(arguments)
    if asked.list:
        for stage in STAGES:
            print(f"{stage.name:<16} {stage.title}")
        return 0
    try:
        budget = parsing.parse_budget(asked.budget) if asked.budget is not None else math.inf
        stages = [find(name) for name in asked.stage or ()] or list(STAGES)
        if asked.peers is not None and not asked.peers.is_dir():
            raise InvalidArgument(f"--peers {asked.peers}: there is no such folder")
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    settings = EvidenceSettings(asked.out, asked.peers, asked.dry_run)
    with env.without("TRICOMM_BATCH_INVARIANT"):  # with it, not all kernels may be forced
        results = runner.run(stages, settings, _log, budget - _running())
    for result in results:
        label = " (simulated)" if result["simulated"] else ""
        _log(f"{result['stage']}: {result['status']}{label}" + (f": {result['reason']}" if result["reason"] else ""))
    left = sum(len(result["left"]) for result in results)
    if left:
        _log(f"{left} cases were not run; the same command goes on with those that the budget has left over")
    _log(f"see {asked.out / archive.SUMMARY}; {asked.out / archive.NAME} has everything")
    return 0 if runner.good(results, asked.dry_run) else 1


def _running() -> float:
    """Seconds since this process began, which count for the budget, because importing torch may take many of them."""
    ticks = process.start_time(os.getpid())
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _log(text: str) -> None:
    print(text, flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """By argparse, because other packages may not be installed."""
    parser = argparse.ArgumentParser("python -m tricomm.perf.evidence", description=_ABOUT)
    parser.add_argument("--budget", metavar="TIME", help="time for this command, such as 90s, 9m, 25m; default: no end")
    parser.add_argument("--stage", action="append", metavar="NAME", help="only this stage; may be given several times")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("evidence"),
        metavar="DIR",
        help="folder for results, where a run goes on; default: evidence",
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with checkouts to compare with: kraken")
    parser.add_argument(
        "--dry-run", action="store_true", help="run every stage's code without a GPU; no number means anything"
    )
    parser.add_argument("--list", action="store_true", help="name the stages")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
