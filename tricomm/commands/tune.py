"""`tricomm tune`, and the commands for the tables that it makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tricomm.commands.common import (
    FAILED,
    INTERRUPTED,
    UNSUPPORTED,
    USAGE,
    FiniteRange,
    OutputFile,
    check_row_options,
    ends_at_once,
    errors_told,
    given,
    joined,
    told_every,
    usage,
)

_FILES = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--nproc", type=click.IntRange(1, 8), help="Ranks to start here [default: 2]; not under torchrun.")
@click.option("--collective", default="all", show_default=True, help="all_reduce, a list, or all.")
@click.option("--bits", default="16,32", show_default=True, help="Widths of reduced elements: 8, 16, 32, 64, or all.")
@click.option("--mode", help="eager, graph, or both in a list [default: what the device has].")
@click.option("--sizes", default="1K:16M:4", show_default=True, help="Input bytes per rank, first:last:factor.")
@click.option(
    "--hidden", default="8192", show_default=True, help="Rows of all_reduce_rms_norm, of experts too, a list."
)
@click.option("--quantize", help="Of all_reduce_rms_norm: none, fp8, fp8_per_token, nvfp4, a list [default: none].")
@click.option("--budget", default="5m", show_default=True, help="Time to spend: 90s, 5m, 1h.")
@click.option("--beside-compute", "beside", is_flag=True, help="For groups with Options(beside_compute=True).")
@click.option("--wire", type=click.Choice(["fp8", "int8", "fp8_gather"]), help="For groups with Options(wire=).")
@click.option("--simulated", is_flag=True, help="Tune ranks on a CPU; no GPU ever uses such a table.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--timeout", type=FiniteRange(1, 3600), default=60.0, show_default=True, help="Seconds a call has.")
@click.pass_context
def tune(
    context: click.Context, /, nproc: int | None, hidden: str, quantize: str | None, wire: str | None, **options: Any
) -> None:
    """Find the fastest kernel and launch shape for every size on this box, and use them from now on.

    Every candidate's result is checked before it is timed; the slowest rank's time counts; most of the budget is
    spent on close decisions. Measurements are kept: the same command resumes an interrupted run. `tune undo` takes the
    last run's table back.

    \b
    tricomm tune --nproc 8 --budget 10m
    tricomm tune --collective all_reduce --bits 16 --mode graph --sizes 1K:1M:2
    tricomm tune --collective all_reduce_rms_norm --hidden 4096,8192 --quantize none,fp8 --bits 16
    tricomm tune show
    """
    if context.invoked_subcommand is not None:
        if unused := given(context):
            raise click.UsageError(
                f"{', '.join(unused.values())}: for tuning alone, so tune {context.invoked_subcommand} would not look "
                "at it; leave it out"
            )
        return
    with ends_at_once():
        from tricomm.perf import row_calls
        from tricomm.perf.tuner import points, tune_ranks

    world_size, started, quiet = joined(nproc)
    request = usage(lambda: points.parse(forms=row_calls.parse_forms(hidden, quantize), wire=wire or "", **options))
    check_row_options(context, request.collectives)
    state = "starting the ranks"

    def on_message(event: str, message: dict[str, Any]) -> None:
        nonlocal state
        if quiet:
            return
        if event == "note":
            click.echo(f"# {message['text']}", err=True)
        elif event == "round":
            state = f"{message['reached']} of {message['points']} decisions measured; {message['point']}"
            if sys.stderr.isatty():
                click.echo(f"\r{state}\x1b[K", err=True, nl=False)
        elif event == "result":
            if sys.stderr.isatty():
                click.echo("\r\x1b[K", err=True, nl=False)
            click.echo("\n".join(message["lines"]))
            click.echo(f"written to {message['file']}" if message["file"] else "nothing to change; no table is written")

    try:
        with errors_told("tune"), told_every(lambda: state, quiet or sys.stderr.isatty()):
            for line in [] if quiet else tune_ranks.plan(request, world_size):
                click.echo(f"# {line}", err=True)
            if started:
                tune_ranks.join(request, on_message)
            else:
                tune_ranks.run(request, world_size, on_message)
    except KeyboardInterrupt:
        click.echo("interrupted; what was measured is kept, tune again to go on", err=True)
        sys.exit(INTERRUPTED)


@tune.command()
@click.argument("files", nargs=-1, type=_FILES)
def show(files: tuple[Path, ...]) -> None:
    """Print tables: FILES, or all of the user's own, with the boxes that they are for.

    \b
    tricomm tune show
    """
    from tricomm.errors import InvalidArgument
    from tricomm.perf.tuner import tuned_tables
    from tricomm.policy import user_tables

    tables, broken = files or usage(user_tables.found), False
    if not tables:
        click.echo(f"no tables in {user_tables.folder()}; `tricomm tune` makes one")
    for file in tables:
        try:
            click.echo("\n".join(tuned_tables.table_lines(file, user_tables.read(file, bool(files)))))
        except InvalidArgument as error:
            broken = True
            click.echo(str(error), err=True)
    if broken:
        sys.exit(USAGE if files else FAILED)


@tune.command()
@click.argument("files", nargs=-1, type=_FILES)
def undo(files: tuple[Path, ...]) -> None:
    """Take the last change of FILES, or of all of the user's own tables, back: tune's or merge's.

    The table before it is used again, or none, so that the shipped ones decide.

    \b
    tricomm tune undo
    """
    from tricomm.policy import user_tables

    for file in files:
        if not user_tables.in_use(file):
            raise click.UsageError(f"{file}: tune and merge save no table under such a name; nothing was changed")
    tables = files or [file for file in usage(user_tables.found) if user_tables.in_use(file)]
    if not tables:
        click.echo(f"no tables in {user_tables.folder()}; nothing to undo")
    for file in tables:
        with errors_told("tune undo"):
            back = user_tables.undo(file)
        click.echo(f"{file}: {'the table before the last change' if back else 'removed; the shipped tables decide'}")


@tune.command()
@click.argument("files", nargs=-1, required=True, type=_FILES)
@click.option("-o", "--output", type=OutputFile(), help="Write this file instead.")
def merge(files: tuple[Path, ...], output: Path | None) -> None:
    """Make one table of FILES of the same kind of box, and use it from now on.

    Of a collective, width, mode and size, the last file that has it counts.

    \b
    tricomm tune merge first.json second.json -o both.json
    """
    from tricomm.errors import ResourceError
    from tricomm.perf.tuner import tuned_tables
    from tricomm.policy import tuning_tables, user_tables

    merged = usage(lambda: tuned_tables.merge([user_tables.read(file, True) for file in files]))
    try:
        where = user_tables.save(merged) if output is None else output
        if output is not None:
            output.write_bytes(tuning_tables.dumps(merged))
    except (ResourceError, OSError) as error:
        click.echo(f"tricomm tune merge: {error}", err=True)
        sys.exit(UNSUPPORTED)
    click.echo(f"{len(merged.rows)} rows written to {where}")
