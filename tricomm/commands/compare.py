"""`tricomm compare`: two runs of the history, or of files, point by point."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from tricomm.commands.common import FAILED, NO_DATA, errors_told, usage

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("old", required=False)
@click.argument("new", default="latest")
@click.option("--threshold", type=click.FloatRange(0), default=5.0, show_default=True, help="Per cent taken for noise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all points that both have.")
@click.option("--history", type=_FILE, help="The history [default: history.sqlite in the XDG data directory].")
def compare(old: str | None, new: str, threshold: float, as_json: bool, history: Path | None) -> None:
    """Compare the times of NEW [default: latest] with those of OLD. Without both, list the runs of the history.

    \b
    OLD and NEW are each one of
      12, latest, latest~1   a run by its number in the list, or counted from the latest
      3f9c2ab                all runs of a commit, by at least 6 digits
      monday, 2026-01-31     all runs of that day, or of the last day before it that has runs
      7d, 12h                the same, until that long ago
      FILE                   of tricomm bench --json, or the latest run of another history

    Compares the points that both have measured on the same kind of box, by their medians. Two runs also differ by
    chance: tricomm dashboard --changes judges all runs. Exit codes: 0 no point is slower by more than the threshold,
    1 one is, 6 there is nothing to compare.

    \b
    tricomm compare monday
    tricomm compare 3f9c2ab 8d01e77 --threshold 10
    tricomm compare before.json after.json
    """
    from tricomm.perf.dashboard import comparison
    from tricomm.perf.history import database

    with errors_told("compare"):
        say = partial(click.echo, err=True)
        past = database.open_history(history, say)
        runs = comparison.grouped(past.read()) if past is not None else []
        if old is None:
            click.echo("\n".join(comparison.table(runs)))
            sys.exit(0 if runs else NO_DATA)
        sides = [usage(partial(comparison.side, text, runs, say)) for text in (old, new)]
        points = comparison.compare(*sides)
        slower = [point for point in points if point.step > threshold / 100]
        faster = [point for point in points if point.step < -threshold / 100]
        if as_json:
            counts = {"slower": len(slower), "faster": len(faster), "points": len(points)}
            found = [asdict(point) for point in points]
            click.echo(json.dumps({"schema": 1, "old": old, "new": new, **counts, "compared": found}, indent=1))
        else:
            for name, rows in zip((old, new), sides, strict=True):
                click.echo(f"{name}: {comparison.described(rows)}")
            for point in slower + faster:
                click.echo(point)
            click.echo(
                f"{len(slower)} points are slower, {len(faster)} faster, of {len(points)} that both have measured"
            )
        if slower or not points:
            sys.exit(FAILED if points else NO_DATA)
