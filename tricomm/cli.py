"""The `tricomm` command. Exit codes are in `tricomm.commands.common`.

A command imports what it needs when it runs: the others must not pay for it, nor fail with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from tricomm import __version__
from tricomm.commands.bench import bench
from tricomm.commands.common import FAILED, INTERRUPTED, UNSUPPORTED, exit_code
from tricomm.commands.common import usage as _usage
from tricomm.commands.completion import completion
from tricomm.commands.dashboard import dashboard
from tricomm.commands.doctor import doctor
from tricomm.commands.predict import predict
from tricomm.commands.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tricomm")
def cli() -> None:
    """Single-node multi-GPU collectives in Triton: measure them, explain them, look at their machine code.

    \b
    Exit codes: 0 fine, 1 a check failed or something got slower, 2 usage, 3 the environment lacks something,
    4 a wrong result, 130 interrupted.

    \b
    tricomm doctor
    tricomm bench --nproc 4 --algorithm all --protocol all
    tricomm dashboard --html page.html
    eval "$(tricomm completion bash)"
    """


@cli.command()
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
    if topology is not None:
        return _topology(topology, as_json)
    from tricomm.perf.system import info as facts
    from tricomm.perf.system import info_table

    found = facts.collect()
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(info_table.lines(found, whole)))


def _topology(file: str, as_json: bool) -> None:
    """Draw the topology in `file`, or of this machine where that is empty."""
    from tricomm.perf.system import topology_picture
    from tricomm.topology import discovery, json_format
    from tricomm.topology.model import Topology

    found = _usage(lambda: discovery.Discovery(Topology.load(file))) if file else discovery.read()
    if found.topology is None:
        click.echo(json_format.render({"unknown": found.reason}) if as_json else f"no topology: {found.reason}")
    elif as_json:
        click.echo(found.topology.dumps(), nl=False)
        for note in found.notes:
            click.echo(note, err=True)
    else:
        click.echo(topology_picture.draw(found.topology, found.notes, found.fabric))


@cli.command()
@click.option("--arch", default="sm_80,sm_90,sm_100", show_default=True, help="Comma list of architectures.")
@click.option("--kernel", help="Only this kernel [default: all].")
@click.option("--all-variants", is_flag=True, help="All types, operations, world sizes, alignments (an hour or more).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kernels(arch: str, kernel: str | None, all_variants: bool, as_json: bool) -> None:
    """Compile the shipped kernels, without a GPU, and report registers, spills, access widths and flags.

    \b
    tricomm kernels --arch sm_90
    tricomm kernels --kernel all_reduce_one_shot_ll --json
    """
    from rich.console import Console
    from rich.progress import track

    from tricomm.errors import ResourceError
    from tricomm.perf.machine_code import kernel_report, kernel_table

    archs = tuple(part.strip() for part in arch.split(","))
    variants = _usage(lambda: kernel_report.variants(archs, kernel, all_variants))
    reports, console = [], Console(stderr=True)
    examined = kernel_report.examine_all(variants)
    try:
        for report in track(
            examined, "compiling", len(variants), console=console, transient=True, disable=not console.is_terminal
        ):
            reports.append(report)
    except ResourceError as error:
        click.echo(f"tricomm kernels: {error}", err=True)
        sys.exit(UNSUPPORTED)
    records = [kernel_table.record(report) for report in reports]
    broken = sum(bool(record["violations"]) for record in records)
    if as_json:
        click.echo(json.dumps({"schema": 1, "variants": records}, indent=1))
    else:
        click.echo("\n".join(kernel_table.lines(reports)))
        click.echo(f"\n{kernel_table.LEGEND}\n\n{len(records)} variants, {broken} break a bar")
    if broken:
        sys.exit(FAILED)


@cli.command()
@click.argument("function", required=False, metavar="[FILE.py:FUNCTION]")
@click.option("--collective", help="Shipped kernels to check: a collective, a list, or all [default: all].")
@click.option("--algorithm", help="Only these [default: all].")
@click.option("--protocol", help="Only these [default: all].")
@click.option("--world-size", type=click.IntRange(1, 16), default=3, show_default=True, help="Ranks.")
@click.option("--schedules", type=click.IntRange(1), help="How many [default: 200; exhaustive: all there are].")
@click.option("--strategy", type=click.Choice(["random", "pct", "exhaustive"]), default="random", show_default=True)
@click.option("--preemptions", type=click.IntRange(0), default=2, show_default=True, help="Bound of exhaustive.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--fault", "faults", default="delay", show_default=True, help="A list of delay, stop, drop, or none.")
@click.option("--residency", type=click.IntRange(1), help="Blocks of a launch on a device at once [default: all].")
@click.option("--blocks", type=click.IntRange(1, 64), help="Blocks a launch, of shipped kernels [default: 2].")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first schedule that shows something.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write what was found there, as JSON.")
@click.option("--timeline", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, as .html or .svg.")
@click.option(
    "--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Repeat a report's finding."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(replay: Path | None, **options: Any) -> None:
    """Run kernels under many schedules, without a GPU, and find races, deadlocks and wrong results.

    FILE.py:FUNCTION is a function of one communicator; without it the shipped kernels are checked.

    \b
    tricomm check --collective all_reduce --world-size 2
    tricomm check mine.py:body --schedules 500 --report found.json
    tricomm check --replay found.json
    """
    from tricomm.errors import InvalidArgument, ResourceError
    from tricomm.explorer import command

    try:
        ok = command.replay(replay, options) if replay is not None else command.check(options)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    except ResourceError as error:
        click.echo(f"tricomm check: {error}", err=True)
        sys.exit(UNSUPPORTED)
    if not ok:
        sys.exit(FAILED)


@cli.group()
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
        for found in results:
            where = found["environment"]["device"]
            device = where if isinstance(where, str) else ", ".join(str(d.get("name")) for d in where)
            label = " (simulated)" if found["simulated"] else ""
            click.echo(f"{path}: {found['stage']}: {found['status']}, {len(found['cases'])} cases on {device}{label}")
    if not good:
        sys.exit(FAILED)


cli.add_command(bench)
cli.add_command(completion)
cli.add_command(dashboard)
cli.add_command(doctor)
cli.add_command(predict)
cli.add_command(tune)


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read this has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail once more
        sys.exit(FAILED)
    except OSError as error:
        click.echo(f"tricomm: {error}", err=True)
        sys.exit(FAILED)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        click.echo(f"tricomm: {error}", err=True)
        sys.exit(code)
