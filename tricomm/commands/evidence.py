"""`tricomm evidence`: the results of the GPU evidence kit."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tricomm.commands.common import FAILED


@click.group()
def evidence() -> None:
    """Results of `python -m tricomm.perf.evidence`, which proves and measures tricomm on a GPU box.

    \b
    tricomm evidence verify evidence/evidence.zip
    """


@evidence.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def verify(files: tuple[Path, ...]) -> None:
    """Check archives or result files of the GPU evidence kit: their form, and that no number in them is impossible.

    \b
    tricomm evidence verify evidence/evidence.zip
    """
    from tricomm.errors import InvalidArgument
    from tricomm.perf.evidence import result_schema

    good = True
    for path in files:
        try:
            results = result_schema.read_all(path)
        except InvalidArgument as error:
            click.echo(str(error), err=True)
            good = False
            continue
        for result in results:
            devices = result["environment"]["device"]
            names = devices if isinstance(devices, str) else ", ".join(str(d.get("name")) for d in devices)
            label = " (simulated)" if result["simulated"] else ""
            click.echo(f"{path}: {result['stage']}: {result['status']}, {len(result['cases'])} cases on {names}{label}")
    if not good:
        sys.exit(FAILED)
