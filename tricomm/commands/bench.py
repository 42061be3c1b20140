"""`tricomm bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tricomm.commands.common import (
    INTERRUPTED,
    WRONG,
    FiniteRange,
    check_row_options,
    ends_at_once,
    errors_told,
    joined,
    told_every,
    usage,
)

_FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


@click.command()
@click.option("-g", "--nproc", type=click.IntRange(1, 8), help="Ranks to start here [default: 2]; not under torchrun.")
@click.option("--collective", default="all_reduce", show_default=True, help="all_reduce, broadcast, a list, or all.")
@click.option("--algorithm", help="one_shot, two_shot_fp8, a list, or all [default: what selection picks].")
@click.option("--protocol", help="ll, ll128, simple, a list, or all [default: what selection picks].")
@click.option("-d", "--dtype", default="float32", show_default=True, help="Element type, a list, or all that --op has.")
@click.option("-o", "--op", default="sum", show_default=True, help="Reduction: sum, avg, min, max, prod, ...")
@click.option("--hidden", type=click.IntRange(1), default=8192, show_default=True, help="Row of all_reduce_rms_norm.")
@click.option("--quantize", type=click.Choice(["fp8", "fp8_per_token", "nvfp4"]), help="Of all_reduce_rms_norm.")
@click.option("--top-k", type=click.IntRange(1, 255), help="Of all_reduce_rms_norm: sum so many experts' rows first.")
@click.option(
    "--mode",
    default="eager",
    show_default=True,
    help="eager, graph (one call), kernel (many, whose launches overlap), or all.",
)
@click.option("--sizes", help="first:last:factor in bytes, or a comma list [default: 1K:1M:4].")
@click.option("-b", "--minbytes", help="First size, instead of --sizes [default: 1K].")
@click.option("-e", "--maxbytes", help="Last size [default: the first].")
@click.option("-f", "--stepfactor", type=click.IntRange(2), help="Factor between sizes [default: 2].")
@click.option("--against", help="Libraries in the same run: nccl, gloo, symm_mem, flashinfer, kraken.")
@click.option("-n", "--iters", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Timed calls.")
@click.option(
    "-w", "--warmup", type=click.IntRange(0, 1_000_000), default=1, show_default=True, help="Calls before them."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Compare results exactly.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--timeout",
    type=FiniteRange(1, 86400),
    default=300.0,
    show_default=True,
    help="Seconds without a row after which all ranks are ended.",
)
@click.option("--json", "json_file", type=_FILE, help="Write rows there too, at the end, in any case; - is stdout.")
@click.option("--csv", "csv_file", type=_FILE, help="Write rows there too, each when it is measured; - is stdout.")
@click.option("--history/--no-history", default=True, show_default=True, help="Append rows to the history.")
@click.pass_context
def bench(
    context: click.Context,
    /,
    nproc: int | None,
    json_file: Path | None,
    csv_file: Path | None,
    history: bool,
    **options: Any,
) -> None:
    """Time the collectives and check their results, with the formulas and short options of nccl-tests.

    The table is grouped by size and marks the fastest kernel of each; --against adds how much faster it is.

    Starts --nproc ranks on this machine, or is one of them if torchrun (RANK, WORLD_SIZE) has started it. Every row
    is in the history when it is printed: an interrupt loses nothing that was measured.

    \b
    tricomm bench --nproc 8 --algorithm all --protocol all --against nccl
    tricomm bench -g 8 -b 64K -d bf16 --against nccl
    tricomm bench --collective all --dtype float32,bfloat16 --mode eager,graph --against nccl,symm_mem
    tricomm bench --collective all_reduce_rms_norm --dtype bfloat16 --hidden 8192 --against nccl,flashinfer
    torchrun --nproc-per-node 8 -m tricomm bench --csv rows.csv
    """
    with ends_at_once():
        from tricomm.errors import ResourceError
        from tricomm.kernels.left_out import left_out_lines
        from tricomm.perf.bench import session as runner
        from tricomm.perf.bench.outputs import STANDARD, Files, Output
        from tricomm.perf.history import database as past

    world_size, started, quiet = joined(nproc)
    settings, left_out = usage(lambda: _settings(options, world_size))
    check_row_options(context, [case.collective for case in settings.cases])
    for line in [] if quiet else left_out_lines(left_out):
        click.echo(line, err=True)
    results = runner.Results()

    def files() -> Files:
        record = past.open_history(say=lambda text: click.echo(text, err=True)) if history and not quiet else None
        return Files(settings, results, None if quiet else json_file, None if quiet else csv_file, record)

    aside = STANDARD in (json_file, csv_file)
    with usage(files) as written, Output(settings, quiet, started, aside) as output:

        def header(record: dict[str, Any]) -> None:
            output.header(record)
            written.header(record)

        def row(rows: Any) -> None:
            written.row(rows)
            output.row(rows)

        listener = runner.Listener(header, row, output.note)
        try:
            with errors_told("bench", output.stop), told_every(lambda: output.state, quiet or output.shows_bar):
                if started:
                    runner.join(settings, listener, results)
                else:
                    runner.run(settings, world_size, listener, results)
                if not results.rows:
                    raise ResourceError("nothing was measured: none of the kernels that were asked for runs here")
        except KeyboardInterrupt:
            output.stop()
            output.summary(results)
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        output.summary(results)
    if results.wrong:
        sys.exit(WRONG)


def _settings(options: dict[str, Any], world_size: int) -> tuple[Any, list[tuple[str, str]]]:
    """The settings, and (name, reason) for requested combinations that no kernel has."""
    from tricomm.core.fused.fused_call import FUSED
    from tricomm.perf import parsing
    from tricomm.perf.bench import request as plan
    from tricomm.perf.units import DATA_COLLECTIVES

    known = DATA_COLLECTIVES if options["collective"] == "all" else (*DATA_COLLECTIVES, FUSED)
    collectives = parsing.parse_names(options["collective"], known, "collective")
    dtypes = plan.parse_dtypes(options["dtype"], options["op"], collectives)
    against = parsing.parse_names(options["against"], plan.LIBRARIES, "library") if options["against"] else ()
    row = (options["hidden"], options["quantize"] or "", options["top_k"] or 0)
    kernels = (options["algorithm"], options["protocol"], world_size)
    cases = plan.cases(collectives, *kernels, dtypes, against, row)
    steps = (options["minbytes"], options["maxbytes"], options["stepfactor"])
    sizes = parsing.parse_range(options["sizes"], *steps, default="1K:1M:4")
    modes = parsing.parse_names(options["mode"], plan.MODES, "mode")
    rest = {name: options[name] for name in ("iters", "warmup", "check", "device", "timeout")}
    return plan.Settings(cases, sizes, options["op"], modes, **rest), plan.left_out(collectives, *kernels)
