"""Each mutant the ordinary way: a process per rank over shared memory, many calls, results compared, no explorer.

    python -m devtools.mutant_stress [--unchanged] [K01 ...]

Prints a row of a Markdown table per mutant: what this finds, beside what the explorer finds. With `--unchanged` the
shipped kernels make the same calls, and nothing must be caught.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import torch

import tricomm
from tests import ranks
from tests.explorer import bodies
from tests.explorer.mutants import MUTANTS
from tests.explorer.mutation import Mutant, explore, loaded

CALLS = 150
_SILENCE = 30.0  # seconds without the end of a call on any rank: a hang
_TIMEOUT = 20.0  # of one call
_LATE = ("CollectiveTimeout", "PeerStalled")


def calls(rank: int, world_size: int, tell: Any, url: str, mutant: Mutant) -> str:
    """One rank: says the number of each call that has ended; returns what was wrong, or nothing."""
    options = replace(mutant.options, timeout=_TIMEOUT)
    with loaded(mutant.edits) as pads, tricomm.init(url, rank, world_size, "cpu", options=options) as comm:
        body = mutant.body or bodies.in_turn
        for number, (got, want) in enumerate(body(comm, mutant, pads, CALLS), 1):
            if not torch.equal(got, want):
                return f"wrong result in call {number}"
            tell(number)
    return ""


def stress(mutant: Mutant) -> str:
    """caught, hang or missed, in words."""
    if mutant.processes:
        return str(mutant.processes)
    world_size = max(3, mutant.world_size)
    mutant = replace(mutant, world_size=world_size)
    with tempfile.TemporaryDirectory() as folder:
        with ranks.start(world_size, calls, f"file://{folder}/store", mutant) as running:
            done, ends = _watch(running)
    values = [o.value for o in ends.values() if o.value]
    errors = [o.error for o in ends.values() if o.error is not None]
    if values:
        return f"caught: {min(values, key=lambda v: int(v.split()[-1]))}"
    if len(ends) < world_size or any(e in _LATE for e in errors):
        return f"hang in call {done + 1}"
    if errors:
        refused = mutant.clean and "CollectiveMismatch" in errors
        return "missed" if refused else f"caught: {errors[0]} in call {done + 1}"
    return "missed"


def _watch(running: ranks.Ranks) -> tuple[int, dict[int, ranks.Outcome]]:
    """The number of calls that every rank has ended, and how those ranks ended that have."""
    numbers = dict.fromkeys(range(len(running.pipes)), 0)
    ends: dict[int, ranks.Outcome] = {}
    last = time.monotonic()
    while len(ends) < len(running.pipes) and time.monotonic() - last < _SILENCE:
        waiting = {pipe: rank for rank, pipe in enumerate(running.pipes) if rank not in ends}
        pipes: list[Any] = wait(list(waiting), 1.0)
        for pipe in pipes:
            rank, last = waiting[pipe], time.monotonic()
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "end", ranks.Outcome(error="died")
            if kind == "end":
                ends[rank] = value
            else:
                numbers[rank] = value
    return min(numbers.values()), ends


def main(names: list[str]) -> None:
    print("| mutant | change | stands for | separate processes, 150 calls | explorer | schedule |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in [n for n in names if n != "--unchanged"] or MUTANTS:
        mutant = MUTANTS[name]
        if "--unchanged" in names:
            mutant = replace(mutant, edits=())
        report = explore(mutant)
        kinds = ", ".join(sorted({f.kind for f in report.findings})) or "missed"
        number = report.findings[0].schedule + 1 if report.findings else f"none of {report.ran}"
        row = (name, mutant.title, mutant.bug, stress(mutant), kinds, str(number))
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
