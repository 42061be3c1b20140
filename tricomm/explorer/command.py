"""What `tricomm check` does, apart from reading its options."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from tricomm.errors import InvalidArgument
from tricomm.explorer import campaign, shipped, subjects
from tricomm.explorer.report import timeline
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.report.report import Report, digest

_SETTINGS = ("schedules", "strategy", "preemptions", "seed", "residency", "keep_going")


def check(options: dict[str, Any]) -> bool:
    """Check a user's function, or shipped kernels; prints as it goes. True where nothing was found."""
    _check_paths(options)
    reports = []
    for name, run in _runs(options):
        report = run()
        reports.append(report)
        if not options["as_json"]:
            click.echo(f"{name}: {report}")
    if options["as_json"]:
        click.echo(json.dumps([r.as_json() for r in reports], indent=1))
    _write(reports, options)
    return all(report.ok for report in reports)


def replay(path: Path, options: dict[str, Any]) -> bool:
    """Run the schedules of a stored report's findings again. True where none of them shows anything any more."""
    _check_paths(options)
    if options["function"] is not None:
        raise InvalidArgument(f"--replay names its function itself; {options['function']} would not be looked at")
    report = Report.load(path)
    if report.ok:
        raise InvalidArgument(f"{path}: nothing was found, so there is nothing to repeat")
    again = campaign.replay(report, subjects.of_report(report))
    if options["as_json"]:
        click.echo(json.dumps([[f.as_json() for f in found] for found in again], indent=1))
    else:
        if digest(report.subject.get("file")) != report.subject.get("sha256"):
            click.echo(f"{report.subject['file']} has changed since: steps and lines may have moved")
        for number, (before, found) in enumerate(zip(report.findings, again, strict=True), 1):
            click.echo(f"{number}. {_compared(before, found)}")
    _write([report], options)
    return not any(again)


def _compared(before: Finding, found: list[Finding]) -> str:
    same = next((f for f in found if f.key == before.key), None)
    if same is not None:
        return f"repeated: {same}"
    return f"NOT repeated: {before}" + "".join(f"\n   found instead: {other}" for other in found)


def _check_paths(options: dict[str, Any]) -> None:
    """Before a campaign, not after it: can its outcome be written where it is wanted?"""
    for name in ("report", "timeline"):
        path = options[name]
        if path is not None and not path.parent.is_dir():
            raise InvalidArgument(f"--{name} {path}: the folder {path.parent} does not exist")
    if options["timeline"] is not None:
        timeline.check_path(options["timeline"])


def _runs(options: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Report]]]:
    faults = () if options["faults"] == "none" else tuple(options["faults"].split(","))
    settings = {name: options[name] for name in _SETTINGS}
    if settings["schedules"] is None and settings["strategy"] != "exhaustive":
        settings["schedules"] = 200
    size, progress = options["world_size"], None if options["as_json"] else _progress()
    if options["function"] is not None:
        if any(options[name] is not None for name in ("collective", "algorithm", "protocol", "blocks")):
            raise InvalidArgument("--collective, --algorithm, --protocol and --blocks are for the shipped kernels")
        fn = subjects.from_file(options["function"])
        yield options["function"], lambda: campaign.check(fn, size, faults=faults, progress=progress, **settings)
        return
    for kernel in shipped.kernels(options["collective"], options["algorithm"], options["protocol"]):
        memory = shipped.options(size, options["blocks"] or shipped.BLOCKS)
        body = shipped.body(kernel)
        yield (
            kernel.name,
            lambda body=body, memory=memory: campaign.check(  # type: ignore[misc]
                body, size, faults=faults, options=memory, progress=progress, **settings
            ),
        )


def _progress() -> Callable[[int, int], None]:
    """Says every ten seconds how far a campaign is."""
    last = time.monotonic()

    def tell(ran: int, found: int) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            click.echo(f"  {ran} schedules, {found} findings", err=True)

    return tell


def _write(reports: list[Report], options: dict[str, Any]) -> None:
    shown = next((r for r in reports if not r.ok), reports[0])
    if options["report"] is not None:
        shown.save(options["report"])
    if options["timeline"] is not None:
        if shown.ok:
            click.echo("nothing was found, so there is no timeline to draw", err=True)
        else:
            timeline.write(shown, options["timeline"])
