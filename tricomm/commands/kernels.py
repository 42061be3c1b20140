"""`tricomm kernels`: the machine code of the shipped kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tricomm.commands.common import FAILED, errors_told, progress, usage

if TYPE_CHECKING:
    from tricomm.perf.machine_code.kernel_report import KernelReport, Variant


@click.command()
@click.option("--arch", default="sm_80,sm_90,sm_100", show_default=True, help="Comma list, from sm_70 to sm_121.")
@click.option("--kernel", help="Only this kernel [default: all].")
@click.option("--all-variants", is_flag=True, help="All types, operations, world sizes, alignments (many hours).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kernels(arch: str, kernel: str | None, all_variants: bool, as_json: bool) -> None:
    """Compile the shipped kernels, without a GPU, and report registers, spills, access widths and flags.

    All kernels take ten minutes to half an hour an architecture on two cores. Standard error says how far it is; the
    table comes at the end.

    \b
    tricomm kernels --arch sm_90
    tricomm kernels --kernel all_reduce_one_shot_ll --json
    """
    from rich.console import Console
    from rich.progress import track

    from tricomm.perf.machine_code import kernel_report

    archs = tuple(part.strip() for part in arch.split(","))
    variants = usage(lambda: kernel_report.variants(archs, kernel, all_variants))
    for line in kernel_report.left_out(archs, kernel):
        click.echo(line, err=True)
    console = Console(stderr=True)
    with errors_told("kernels"):
        if console.is_terminal:
            examined = kernel_report.examine_all(variants)
            reports = list(track(examined, "compiling", len(variants), console=console, transient=True))
        else:
            reports = list(_told(variants))
    records = [kernel_report.record(report) for report in reports]
    broken = sum(bool(record["violations"]) for record in records)
    if as_json:
        click.echo(json.dumps({"schema": 1, "variants": records}, indent=1))
    else:
        click.echo("\n".join(kernel_report.lines(reports)))
        click.echo(f"\n{kernel_report.LEGEND}\n\n{len(records)} variants, {broken} break a bar")
    if broken:
        sys.exit(FAILED)


def _told(variants: list[Variant]) -> Iterator[KernelReport]:
    """The reports, with lines on stderr of how far it is: what reads them is no terminal, and waits for minutes."""
    from tricomm.perf.machine_code import kernel_report

    say, number, total = progress(), 0, len(variants)

    def late(variant: Variant) -> None:
        say(f"{number} of {total} compiled; {variant.kernel} {variant.arch} {variant.operation} takes minutes")

    for number, report in enumerate(kernel_report.examine_all(variants, late), 1):
        say(f"{number} of {total} compiled: {report.variant.kernel} {report.variant.arch}")
        yield report
