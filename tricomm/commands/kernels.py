"""`tricomm kernels`: the machine code of the shipped kernels."""

from __future__ import annotations

import json
import sys

import click

from tricomm.commands.common import FAILED, ends_at_once, errors_told, told_every, usage


@click.command()
@click.option("--arch", default="sm_80,sm_90,sm_100", show_default=True, help="Comma list, from sm_70 to sm_121.")
@click.option("--kernel", help="Only this kernel [default: all].")
@click.option("--all-variants", is_flag=True, help="All types, operations, world sizes, alignments (many hours).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def kernels(arch: str, kernel: str | None, all_variants: bool, as_json: bool) -> None:
    """Compile the shipped kernels, without a GPU, and report registers, spills, access widths and flags.

    All kernels take ten minutes to half an hour an architecture on two cores. Standard error says how far it is; the
    table follows at the end.

    \b
    tricomm kernels --arch sm_90
    tricomm kernels --kernel all_reduce_one_shot_ll --json
    """
    with ends_at_once():
        from rich.console import Console
        from rich.progress import track

        from tricomm.perf.machine_code import kernel_report

    archs = tuple(part.strip() for part in arch.split(","))
    variants = usage(lambda: kernel_report.variants(archs, kernel, all_variants))
    for line in kernel_report.left_out(archs, kernel):
        click.echo(line, err=True)
    console = Console(stderr=True)
    reports: list[kernel_report.KernelReport] = []

    def state() -> str:
        now = variants[min(len(reports), len(variants) - 1)]
        return f"{len(reports)} of {len(variants)} compiled; {now.kernel} {now.arch} {now.operation} is next"

    with errors_told("kernels"), told_every(state, console.is_terminal):
        examined = kernel_report.examine_all(variants)
        if console.is_terminal:
            examined = iter(track(examined, "compiling", len(variants), console=console, transient=True))
        reports.extend(examined)
    records = [kernel_report.record(report) for report in reports]
    broken = sum(bool(record["violations"]) for record in records)
    if as_json:
        click.echo(json.dumps({"schema": 1, "variants": records}, indent=1))
    else:
        click.echo("\n".join(kernel_report.lines(reports)))
        click.echo(f"\n{kernel_report.LEGEND}\n\n{len(records)} variants, {broken} break a bar")
    if broken:
        sys.exit(FAILED)
