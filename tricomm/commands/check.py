"""`tricomm check`: kernels under many schedules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tricomm import env
from tricomm.commands.common import FAILED, OutputFile, errors_told, given, progress, usage

if TYPE_CHECKING:
    from tricomm.explorer.report.findings import Finding
    from tricomm.explorer.report.report import Report

_OF_REPLAY = ("replay", "report", "timeline", "as_json", "function")  # which has a message of its own
_SETTINGS = ("schedules", "strategy", "preemptions", "seed", "residency", "keep_going", "compiled")


@click.command()
@click.argument("function", required=False, metavar="[FILE.py:FUNCTION]")
@click.option("--collective", help="Shipped kernels to check: a collective, a list, or all [default: all].")
@click.option("--algorithm", help="Only these [default: all].")
@click.option("--protocol", help="Only these [default: all].")
@click.option("--world-size", type=click.IntRange(1, 16), help="Ranks [default: 3; a cube mesh's kernels: 8].")
@click.option("--schedules", type=click.IntRange(1), help="How many [default: 200; exhaustive: all there are].")
@click.option("--strategy", type=click.Choice(["random", "pct", "exhaustive"]), default="random", show_default=True)
@click.option("--preemptions", type=click.IntRange(0), default=2, show_default=True, help="Bound of exhaustive.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--fault", "faults", default="delay", show_default=True, help="A list of delay, stop, drop, or none.")
@click.option("--residency", type=click.IntRange(1), help="Blocks of a launch on a device at once [default: all].")
@click.option("--blocks", type=click.IntRange(1, 64), help="Blocks a launch, of shipped kernels [default: 2].")
@click.option("--compiled", metavar="SM", help="Run what Triton compiles for this architecture, such as sm_90.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first schedule that shows something.")
@click.option("--report", type=OutputFile(), help="Write what was found there, as JSON.")
@click.option("--timeline", type=OutputFile(), help="Draw it, as .html or .svg.")
@click.option(
    "--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Repeat a report's finding."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(context: click.Context, /, replay: Path | None, **options: Any) -> None:
    """Run kernels under many schedules, without a GPU, and find races, deadlocks and wrong results.

    FILE.py:FUNCTION is a function of one communicator; without it the shipped kernels are checked.

    \b
    tricomm check --collective all_reduce --world-size 2
    tricomm check mine.py:body --schedules 500 --report found.json
    tricomm check --compiled sm_90 --collective all_reduce --schedules 20
    tricomm check --replay found.json
    """
    _check_unused(given(context), options)
    with errors_told("check"):
        ok = usage(lambda: _check(options) if replay is None else _replay(replay, options))
    if not ok:
        sys.exit(FAILED)


def _check_unused(asked: dict[str, str], options: dict[str, Any]) -> None:
    """Raises click's usage error for options that what was asked for would not look at."""
    unused = [asked[name] for name in asked if "replay" in asked and name not in _OF_REPLAY]
    if unused:
        raise click.UsageError(
            f"--replay takes function, ranks and schedule from the report, so {', '.join(unused)} would not be looked "
            "at; leave it out"
        )
    if "preemptions" in asked and options["strategy"] != "exhaustive":
        raise click.UsageError("--preemptions is the bound of --strategy exhaustive; give that, or leave it out")


def _check(options: dict[str, Any]) -> bool:
    """Check a user's function, or shipped kernels, and print the reports. True if they have no findings."""
    from tricomm.errors import InvalidArgument

    _check_paths(options)
    reports = []
    for name, run in _runs(options):
        report = run()
        if report.ok and not report.steps:
            raise InvalidArgument(
                f"{name}: nothing was examined: in {report.ran} schedules of {report.world_size} rank(s) no kernel "
                "accessed symmetric memory; call a collective, or launch a kernel over `comm.symmetric`, on 2 ranks or "
                "more"
            )
        reports.append(report)
        if not options["as_json"]:
            click.echo(f"{name}: {report}")
    if options["as_json"]:
        click.echo(json.dumps([r.as_json() for r in reports], indent=1))
    _write(reports, options)
    return all(report.ok for report in reports)


def _replay(path: Path, options: dict[str, Any]) -> bool:
    """Run the schedules of a stored report's findings again. True if none of them has a finding any more."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer import campaign, subjects
    from tricomm.explorer.report.report import Report, digest

    _check_paths(options)
    if options["function"] is not None:
        raise InvalidArgument(f"--replay names its function itself; {options['function']} would not be looked at")
    report = Report.load(path)
    if report.ok:
        raise InvalidArgument(f"{path}: nothing was found, so there is nothing to repeat")
    again = campaign.replay(report, subjects.of_report(report))
    if options["as_json"]:
        click.echo(json.dumps([[f.as_json() for f in findings] for findings in again], indent=1))
    else:
        file = report.subject.get("file")
        if digest(file) != report.subject.get("sha256"):
            click.echo(f"{file} has changed since: steps and lines may have moved")
        for number, (before, findings) in enumerate(zip(report.findings, again, strict=True), 1):
            click.echo(f"{number}. {_compared(before, findings)}")
    _write([report], options)
    return not any(again)


def _compared(before: Finding, findings: list[Finding]) -> str:
    same = next((f for f in findings if f.key == before.key), None)
    if same is not None:
        return f"repeated: {same}"
    return f"NOT repeated: {before}" + "".join(f"\n   found instead: {other}" for other in findings)


def _check_paths(options: dict[str, Any]) -> None:
    """Before a campaign: raises `InvalidArgument` if its outcome cannot be written to the files that were given."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer.report import timeline

    for name in ("report", "timeline"):
        path = options[name]
        if path is not None and not path.parent.is_dir():
            raise InvalidArgument(f"--{name} {path}: the folder {path.parent} does not exist")
    if options["timeline"] is not None:
        timeline.check_path(options["timeline"])


def _runs(options: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Report]]]:
    """The campaigns, by name."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer import campaign, shipped, subjects
    from tricomm.kernels.left_out import left_out_lines

    faults = () if options["faults"] == "none" else tuple(options["faults"].split(","))
    settings = {name: options[name] for name in _SETTINGS}
    if settings["schedules"] is None and settings["strategy"] != "exhaustive":
        settings["schedules"] = 200
    told = None if options["as_json"] else _progress()
    if options["function"] is not None:
        if any(options[name] is not None for name in ("collective", "algorithm", "protocol", "blocks")):
            raise InvalidArgument("--collective, --algorithm, --protocol and --blocks are for the shipped kernels")
        fn = subjects.from_file(options["function"])
        size = options["world_size"] or shipped.RANKS
        yield options["function"], lambda: campaign.check(fn, size, faults=faults, progress=told, **settings)
        return
    asked = shipped.kernels(options["collective"], options["algorithm"], options["protocol"])
    kernels, left_out = shipped.usable(asked, options["world_size"], options["compiled"])
    for line in left_out_lines(left_out.items()):
        click.echo(line, err=True)
    with env.without("TRICOMM_BATCH_INVARIANT"):  # with it, not all kernels may be forced
        for kernel in kernels:
            size = options["world_size"] or shipped.ranks(kernel)
            memory = shipped.options(
                size, options["blocks"] or shipped.BLOCKS, compiled=options["compiled"], kernel=kernel
            )
            body = shipped.body(kernel, shipped.sizes(kernel, size, memory, options["compiled"]))
            yield (
                kernel.name,
                lambda body=body, size=size, memory=memory: campaign.check(  # type: ignore[misc]
                    body, size, faults=faults, options=memory, progress=told, **settings
                ),
            )


def _progress() -> Callable[[int, int], None]:
    """Prints the state of a campaign now and then."""
    say = progress()
    return lambda schedules, findings: say(f"{schedules} schedules, {findings} findings")


def _write(reports: list[Report], options: dict[str, Any]) -> None:
    from tricomm.explorer.report import timeline

    written = next((r for r in reports if not r.ok), reports[0])
    if options["report"] is not None:
        written.save(options["report"])
    if options["timeline"] is not None:
        if written.ok:
            click.echo("nothing was found, so there is no timeline to draw", err=True)
        else:
            timeline.write(written, options["timeline"])
