"""Counts the mutants of the kernels that an ordinary stress test catches, to compare it with the explorer.

    python -m devtools.mutant_stress [--unchanged] [K01 ...]

The stress test makes many calls with a process per rank over shared memory, and compares the results. It prints a row
of a Markdown table per mutant. With `--unchanged` the shipped kernels make the same calls, and nothing must be caught.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import click
import torch

import tricomm
from tests import ranks
from tests.explorer import bodies
from tests.explorer.mutants import MUTANTS
from tests.explorer.mutation import Mutant, explore, loaded

CALLS = 150
_SILENCE = 30.0  # seconds without the end of a call on any rank: a hang
_TIMEOUT = 20.0  # seconds of one call
_LATE = ("CollectiveTimeout", "PeerStalled")


def calls(rank: int, world_size: int, tell: Any, url: str, mutant: Mutant) -> str:
    """Run one rank: sends the number of each call that has ended. Returns a description of a wrong result, or ""."""
    options = replace(mutant.options, timeout=_TIMEOUT)
    with loaded(mutant.edits) as pads, tricomm.init(url, rank, world_size, "cpu", options=options) as comm:
        body = mutant.body or bodies.in_turn
        for number, (got, want) in enumerate(body(comm, mutant, pads, CALLS), 1):
            if not torch.equal(got, want):
                return f"wrong result in call {number}"
            tell(number)
    return ""


def stress(mutant: Mutant) -> str:
    """The verdict: caught, hang or missed."""
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
    """The number of calls that all ranks have ended, and the outcome of the ranks that have ended."""
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


@click.command()
@click.option("--unchanged", is_flag=True, help="The shipped kernels instead of the mutants.")
@click.argument("names", nargs=-1, type=click.Choice(list(MUTANTS)), metavar="[NAMES]...")
def main(names: tuple[str, ...], unchanged: bool) -> None:
    """Print what the stress test and the explorer find in the mutants NAMES, or in all of them."""
    click.echo(f"| mutant | change | stands for | separate processes, {CALLS} calls | explorer | schedule |")
    click.echo("|---|---|---|---|---|---|")
    for name in names or MUTANTS:
        mutant = replace(MUTANTS[name], edits=()) if unchanged else MUTANTS[name]
        report = explore(mutant)
        kinds = ", ".join(sorted({f.kind for f in report.findings})) or "missed"
        number = report.findings[0].schedule + 1 if report.findings else f"none of {report.ran}"
        row = (name, mutant.title, mutant.bug, stress(mutant), kinds, str(number))
        click.echo("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
