"""`tricomm info`: shows this machine, and the choices that would be made on it."""

from __future__ import annotations

import json

import click

from tricomm.commands.common import ends_at_once, usage


@click.command()
@click.option("--topology", is_flag=False, flag_value="", metavar="[FILE]", help="Draw how GPUs (of FILE) are linked.")
@click.option("--table", "whole", is_flag=True, help="Everything, and which row of which table decides.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --topology: such a FILE.")
def info(topology: str | None, whole: bool, as_json: bool) -> None:
    """Show devices, links, versions, paths, limits, and what would be used here and why. Never fails.

    \b
    tricomm info
    tricomm info --table
    tricomm info --topology box.json
    """
    if topology is not None and whole:
        raise click.UsageError("--topology draws links alone, so --table would not be looked at; ask for one of them")
    if topology is not None:
        return _topology(topology, as_json)
    with ends_at_once():
        from tricomm.perf.system import info as facts
        from tricomm.perf.system import info_table

    collected = facts.collect()
    click.echo(json.dumps(collected, indent=1) if as_json else "\n".join(info_table.lines(collected, whole)))


def _topology(file: str, as_json: bool) -> None:
    """Draw the topology in `file`, or of this machine if that is empty."""
    from tricomm.perf.system import topology_picture
    from tricomm.topology import discovery
    from tricomm.topology.model import Topology, render_json

    read = usage(lambda: discovery.Discovery(Topology.load(file))) if file else discovery.read()
    if read.topology is None:
        click.echo(render_json({"unknown": read.reason}) if as_json else f"no topology: {read.reason}")
    elif as_json:
        click.echo(read.topology.dumps(), nl=False)
        for note in read.notes:
            click.echo(note, err=True)
    else:
        click.echo(topology_picture.draw(read.topology, read.notes, read.fabric))
