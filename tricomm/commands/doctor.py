"""`tricomm doctor`."""

from __future__ import annotations

import json
import sys

import click

from tricomm.commands.common import FAILED, ends_at_once

_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Look for what could go wrong on this machine, and say what to do about it. Exit code 1 if something FAILs.

    \b
    tricomm doctor
    tricomm doctor --json
    """
    with ends_at_once():
        from tricomm.perf.system import doctor as probes

    findings = probes.examine()
    failed = sum(finding.verdict == probes.FAIL for finding in findings)
    if as_json:
        click.echo(json.dumps({"schema": 1, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = click.style(finding.verdict, fg=_COLOURS[finding.verdict])
            click.echo(f"{mark}  {finding.name:<{width}}  {finding.text}")
            if finding.remedy:
                click.echo(f"      {'':<{width}}  -> {finding.remedy}")
        warned = sum(finding.verdict == probes.WARN for finding in findings)
        click.echo(f"\n{len(findings)} findings, {failed} FAIL, {warned} WARN")
    if failed:
        sys.exit(FAILED)
