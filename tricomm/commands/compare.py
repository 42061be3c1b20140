"""`tricomm compare`: two runs of the history, or of files, point by point."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from tricomm.commands.common import FAILED, NO_DATA, NO_RUNS, FiniteRange, ends_at_once, errors_told, usage

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("old", required=False)
@click.argument("new", default="latest")
@click.option("--threshold", type=FiniteRange(0), default=5.0, show_default=True, help="Per cent taken for noise.")
@click.option("--history", type=_FILE, help="The history [default: history.sqlite in the XDG data directory].")
def compare(old: str | None, new: str, threshold: float, history: Path | None) -> None:
    """Compare the times of NEW [default: latest] with those of OLD. Without both, list the runs of the history.

    \b
    OLD and NEW can be:
      12, latest, latest~1   A run by its number in the list, or counted from the latest.
      3f9c2ab                All runs of a commit, by at least 6 digits.
      monday, 2026-01-31     All runs of that day, or of the last day before it that has runs.
      7d, 12h                The same, until that long ago.
      FILE                   A file of tricomm bench --json, or the latest run of another history.

    Compares the points that both have measured on the same kind of box, by their medians. Two runs also differ by
    chance: tricomm dashboard --changes judges all runs. Exit codes: 0 no point is slower by more than the threshold,
    1 one is, 6 there is nothing to compare.

    \b
    tricomm compare monday
    tricomm compare 3f9c2ab 8d01e77 --threshold 10
    tricomm compare before.json after.json
    """
    with ends_at_once():
        from tricomm.perf.dashboard import comparison
        from tricomm.perf.history import database, schema

    with errors_told("compare"):
        say = partial(click.echo, err=True)
        if history is not None:
            usage(lambda: schema.check_file(history))
        past = database.open_history(history, say, replaced=history is None)
        if past is None:
            sys.exit(NO_DATA)
        runs = comparison.grouped(past.read())
        if old is None:
            table = comparison.table({str(number): run for number, run in enumerate(runs, 1)})
            click.echo("\n".join(table) if runs else NO_RUNS)
            sys.exit(0 if runs else NO_DATA)
        sides = [usage(partial(comparison.side, text, runs, say)) for text in (old, new)]
        for text, rows in zip((old, new), sides, strict=True):
            if not rows:
                click.echo(f"{text}: the history begins later, at {runs[0][0].run.date}" if runs else NO_RUNS)
                sys.exit(NO_DATA)
        points = comparison.compare(*sides)
        slower = [point for point in points if point.step > threshold / 100]
        faster = [point for point in points if point.step < -threshold / 100]
        names = comparison.table({f"old: {old}": sides[0], f"new: {new}": sides[1]})
        click.echo("\n".join([*names, *map(str, slower + faster)]))
        click.echo(f"{len(slower)} points are slower, {len(faster)} faster, of {len(points)} that both have measured")
        if slower or not points:
            sys.exit(FAILED if points else NO_DATA)
