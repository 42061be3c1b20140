"""`tricomm check`: kernels under many schedules."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tricomm import env
from tricomm.commands.common import FAILED, OutputFile, ends_at_once, errors_told, given, told_every, usage

if TYPE_CHECKING:
    from tricomm.explorer.report.findings import Finding
    from tricomm.explorer.report.report import Report
    from tricomm.kernels.collectives.registry import Kernel

_OF_REPLAY = ("replay", "report", "timeline", "as_json", "function")  # refused separately
_SETTINGS = ("schedules", "strategy", "preemptions", "seed", "residency", "keep_going", "compiled")
# options that a continued campaign may change
_NOT_OF_IDENTITY = ("schedules", "budget", "again", "report", "timeline", "as_json")
_RANKS = 2  # default for programs that use torch's symmetric memory, because kernels may need a power of 2
_FEW = 20  # schedules of each kernel, if no kernel and no number is given
_SECONDS = (0.5, 2.5)  # per schedule of a shipped kernel on two cores: interpreted, compiled


@click.command()
@click.argument("function", required=False, metavar="[FILE.py:FUNCTION]")
@click.option("--args", "arguments", help="Arguments of FUNCTION, a Python text that each rank evaluates.")
@click.option("--calls", type=click.IntRange(1), default=2, show_default=True, help="Calls of FUNCTION with --args.")
@click.option("--config", type=click.IntRange(0), help="Number of the configuration of autotuned kernels [default: 0].")
@click.option("--stub", "stubs", multiple=True, help="A module that FILE.py imports and does not need here.")
@click.option("--collective", help="Shipped kernels to check: a collective, a list, or all [default: all].")
@click.option("--algorithm", help="Only these [default: all].")
@click.option("--protocol", help="Only these [default: all].")
@click.option("--world-size", type=click.IntRange(1, 16), help="Ranks [default: 3; a cube mesh's kernels: 8].")
@click.option(
    "--schedules", type=click.IntRange(1), help="How many [default: 200; of all kernels 20; no limit with --budget]."
)
@click.option("--strategy", type=click.Choice(["random", "pct", "exhaustive"]), default="random", show_default=True)
@click.option("--preemptions", type=click.IntRange(0), default=2, show_default=True, help="Bound of exhaustive.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--fault", "faults", default="delay", show_default=True, help="A list of delay, stop, drop, or none.")
@click.option("--residency", type=click.IntRange(1), help="Blocks of a launch on a device at once [default: all].")
@click.option("--blocks", type=click.IntRange(1, 64), help="Blocks a launch, of shipped kernels [default: 2].")
@click.option("--compiled", metavar="SM", help="Architecture to compile for, such as sm_90, or none.")
@click.option("--ignore", default="", help="A list of kinds of findings that do not count, such as rank_mismatch.")
@click.option("--keep-going", is_flag=True, help="Do not stop at the first schedule that shows something.")
@click.option("--budget", help="End after this time, such as 90s or 2m; the next run continues.")
@click.option("--again", is_flag=True, help="With --budget: begin anew.")
@click.option("--report", type=OutputFile(), help="Write the findings to this file: JSON, or SARIF if .sarif.")
@click.option("--timeline", type=OutputFile(), help="Draw it, as .html or .svg.")
@click.option(
    "--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Repeat a report's finding."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(context: click.Context, /, replay: Path | None, **options: Any) -> None:
    """Run kernels under many schedules, without a GPU, and find races, deadlocks and wrong results.

    FILE.py:FUNCTION is a function of one communicator, or a function without arguments (or with --args) that uses
    torch's symmetric memory; without it the shipped kernels are checked, one of each collective first.

    \b
    tricomm check --collective all_reduce --world-size 2
    tricomm check mine.py:body --schedules 500 --report found.json
    tricomm check allreduce.py:one_shot --args "symm_mem.empty(1024, device='cuda').fill_(rank)"
    tricomm check --compiled sm_90 --collective all_reduce --schedules 20
    tricomm check mine.py:body --budget 2m --report found.sarif
    tricomm check --replay found.json
    """
    _check_unused(given(context), options)
    with errors_told("check"):
        with ends_at_once():
            from tricomm import explorer  # noqa: F401  # with torch and Triton, for all imports that follow
        ok = usage(lambda: _check(options) if replay is None else _replay(replay, options))
    if not ok:
        sys.exit(FAILED)


def _check_unused(asked: dict[str, str], options: dict[str, Any]) -> None:
    """Raises click's usage error for options without an effect."""
    unused = [asked[name] for name in asked if "replay" in asked and name not in _OF_REPLAY]
    if unused:
        raise click.UsageError(
            f"--replay takes function, ranks and schedule from the report, so {', '.join(unused)} would have no "
            "effect; leave it out"
        )
    if "calls" in asked and options["arguments"] is None:
        raise click.UsageError("--calls is the number of calls with --args; give that, or leave it out")
    if "again" in asked and options["budget"] is None:
        raise click.UsageError("--again drops the schedules that --budget has kept; give --budget, or no --again")
    if "preemptions" in asked and options["strategy"] != "exhaustive":
        raise click.UsageError("--preemptions is the bound of --strategy exhaustive; give that, or leave it out")


def _check(options: dict[str, Any]) -> bool:
    """Check a user's function, or shipped kernels, and print the reports. True if they have no findings."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer.report.report import nothing_examined
    from tricomm.perf.parsing import parse_budget

    _check_paths(options)
    began = time.monotonic()
    budget = math.inf if options["budget"] is None else parse_budget(options["budget"])
    reports, runs = [], _runs(options, began + budget)
    schedules, count = next(runs)
    with _shown(schedules, count, options["as_json"], began, budget) as tell, warnings.catch_warnings():
        # Triton warns about a default of its next version; a check needs no change for it.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        for number, (name, run) in enumerate(runs):
            left = began + budget - time.monotonic()
            if left <= 0:
                click.echo(f"the budget has ended before {count - number} of {count} kernels", err=True)
                break
            report = _kept(name, options, left, partial(run, partial(tell, number, name)))
            if report.ok and not report.steps:
                raise InvalidArgument(f"{name}: {nothing_examined(report)}")
            reports.append(report)
            if not options["as_json"]:
                click.echo("\r\033[K" * sys.stderr.isatty(), nl=False, err=True)  # over the bar
                click.echo(f"{name}: {report}")
    if not reports:
        raise InvalidArgument(f"--budget {options['budget']} has ended before the first schedule: give more")
    if options["as_json"]:
        click.echo(json.dumps([r.as_json() for r in reports], indent=1))
    _write(reports, options)
    return all(report.ok for report in reports)


def _kept(name: str, options: dict[str, Any], left: float, run: Callable[..., Report]) -> Report:
    """Run a campaign. With a budget it continues after the schedules of earlier runs, for `left` seconds."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer import campaign
    from tricomm.explorer.report.kept import Kept

    if options["budget"] is None:
        return run()
    if options["strategy"] == "exhaustive":  # a later search does not know which schedules are left
        return run(budget=left)
    file = options["function"] and str(Path(options["function"].rpartition(":")[0]).resolve())
    identity = {"name": name, "file": file} | {k: v for k, v in options.items() if k not in _NOT_OF_IDENTITY}
    kept = Kept(identity, file, lambda text: click.echo(text, err=True))
    try:
        report = run(budget=left, since=None if options["again"] else kept.report())
    except campaign.Interrupted as interrupt:
        if interrupt.report.ran > interrupt.report.earlier:
            kept.keep(interrupt.report)
            click.echo(f"{name}: {interrupt.report}", err=True)
        raise
    if report.ended and report.ran == report.earlier:
        if report.ok:
            raise InvalidArgument(f"{name}: no schedule has ended: {report.ended}. Give a longer --budget")
    else:
        kept.keep(report)
    return report


@contextmanager
def _shown(
    schedules: int | None, count: int, silent: bool, began: float, budget: float
) -> Iterator[Callable[[int, str, int, int], None]]:
    """Shows the progress of `count` campaigns of `schedules` each, or of the budget if they have none: a bar on a
    terminal, a line every 10 s elsewhere.

    A context manager; its value is a function of a campaign's number and name, the schedules that have run, and the
    findings.
    """
    state = 0, "", 0, 0

    def text() -> str:
        number, name, ran, findings = state
        if not name:
            return f"the first schedule has run for {time.monotonic() - began:.0f} s; --budget 5m would end it"
        what = f"{name}: {ran}{f' of {schedules}' if schedules else ''} schedules, {findings} findings"
        passed = time.monotonic() - began
        whole = f"kernel {number + 1} of {count}; {passed / 60:.0f} min; " if count > 1 else ""
        return whole + what

    def keep(*now: Any) -> None:
        nonlocal state
        state = now

    length = round(budget) if schedules is None and budget < math.inf else count * (schedules or 0)
    if not length or not sys.stderr.isatty():
        with told_every(text, silent):
            yield keep
        return
    with click.progressbar(length=length, file=sys.stderr, item_show_func=lambda name: name) as bar:

        def draw(number: int, name: str, ran: int, findings: int) -> None:
            done = number * schedules + ran if schedules else int(time.monotonic() - began)
            bar.update(done - bar.pos, name)

        yield draw


def _replay(path: Path, options: dict[str, Any]) -> bool:
    """Run the schedules of the findings in a stored report again. True if no schedule has a finding any more."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer import campaign, subjects
    from tricomm.explorer.report.report import Report, digest

    _check_paths(options)
    if options["function"] is not None:
        raise InvalidArgument(f"--replay names its function itself; {options['function']} would have no effect")
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
    """Called before a campaign: raises `InvalidArgument` if the given files cannot be written."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer.report import timeline

    for name in ("report", "timeline"):
        path = options[name]
        if path is not None and not path.parent.is_dir():
            raise InvalidArgument(f"--{name} {path}: the folder {path.parent} does not exist")
        try:
            if path is not None and not os.path.lexists(path):
                path.touch(exist_ok=False)
                path.unlink()
            elif path is not None and path.is_file():
                path.open("a").close()
        except OSError as error:
            raise InvalidArgument(f"--{name} {path}: it cannot be written: {error.strerror}") from None
    if options["timeline"] is not None:
        timeline.check_path(options["timeline"])


def _runs(options: dict[str, Any], ends: float) -> Iterator[Any]:
    """Yields first (schedules of each campaign, or None; number of campaigns), then (name, function that runs it) for
    each campaign."""
    from tricomm.errors import InvalidArgument
    from tricomm.explorer import campaign, shipped, subjects
    from tricomm.explorer.simulation import INTERPRETED, is_program
    from tricomm.kernels.left_out import left_out_lines
    from tricomm.perf import parsing

    faults = () if options["faults"] == "none" else parsing.parse_names(options["faults"], campaign.FAULTS, "fault")
    settings = {name: options[name] for name in _SETTINGS}
    settings["ignore"] = tuple(filter(None, options["ignore"].split(",")))
    if options["function"] is None and options["compiled"] == INTERPRETED:  # the default of shipped kernels
        options["compiled"] = settings["compiled"] = None
    selected = any(options[name] is not None for name in ("collective", "algorithm", "protocol"))
    everything = options["function"] is None and not selected and settings["schedules"] is None
    endless = options["budget"] is not None and options["function"] is not None
    if settings["schedules"] is None and settings["strategy"] != "exhaustive" and not endless:
        settings["schedules"] = _FEW if everything else 200
    if options["function"] is not None:
        if selected or options["blocks"] is not None:
            raise InvalidArgument("--collective, --algorithm, --protocol and --blocks are for the shipped kernels")
        with_args = options["arguments"] is not None
        fn = subjects.from_file(options["function"], options["stubs"], with_args, ends, options["compiled"])
        if options["arguments"] is not None or options["config"] is not None:
            if options["arguments"] is None and not is_program(fn):
                raise InvalidArgument("--config chooses for autotuned kernels of a function that uses torch's memory")
            calls = 1 if options["arguments"] is None else options["calls"]
            call = options["arguments"] or "", calls, options["function"], options["stubs"], options["config"] or 0
            fn = subjects.with_arguments(fn, *call)
        size = options["world_size"] or (_RANKS if is_program(fn) else shipped.RANKS)
        yield settings["schedules"], 1
        yield (
            options["function"],
            lambda told, **more: campaign.check(fn, size, faults=faults, progress=told, **more, **settings),
        )
        return
    if options["arguments"] is not None or options["stubs"] or options["config"] is not None:
        raise InvalidArgument("--args, --config and --stub are for FILE.py:FUNCTION")
    asked = shipped.kernels(options["collective"], options["algorithm"], options["protocol"])
    kernels, left_out = shipped.usable(asked, options["world_size"], options["compiled"])
    for line in left_out_lines(left_out.items()):
        click.echo(line, err=True)
    if everything:
        kernels = _useful_first(kernels)
        click.echo(_announced(len(kernels), settings), err=True)
    yield settings["schedules"], len(kernels)
    with env.without("TRICOMM_BATCH_INVARIANT"):  # with it set, some kernels cannot be forced
        for kernel in kernels:
            size = options["world_size"] or shipped.ranks(kernel)
            memory = shipped.options(
                size, options["blocks"] or shipped.BLOCKS, compiled=options["compiled"], kernel=kernel
            )
            body = shipped.body(kernel, shipped.sizes(kernel, size, memory, options["compiled"]))
            yield (
                kernel.name,
                lambda told, body=body, size=size, memory=memory, **more: campaign.check(
                    body, size, faults=faults, options=memory, progress=told, **more, **settings
                ),
            )


def _useful_first(kernels: list[Kernel]) -> list[Kernel]:
    """One kernel of each collective, then the others."""
    first = {kernel.collective: kernel for kernel in reversed(kernels)}
    return [k for k in kernels if first[k.collective] is k] + [k for k in kernels if first[k.collective] is not k]


def _announced(count: int, settings: dict[str, Any]) -> str:
    """How long a check of all kernels takes, and how to take less or more."""
    if settings["schedules"] is None:
        return f"{count} kernels, every schedule: this takes hours; --collective NAME checks some"
    seconds = count * settings["schedules"] * _SECONDS[settings["compiled"] is not None]
    return (
        f"{count} kernels, {settings['schedules']} schedules each, about {max(1, round(seconds / 60))} min: first one "
        "of each collective, then the others. --collective NAME checks some, --schedules N checks longer"
    )


def _write(reports: list[Report], options: dict[str, Any]) -> None:
    from tricomm.explorer.report import timeline
    from tricomm.explorer.report.report import save

    if options["report"] is not None:
        save(reports, options["report"])
    if options["timeline"] is not None:
        found = next((r for r in reports if not r.ok), None)
        if found is None:
            click.echo("nothing was found, so there is no timeline to draw", err=True)
        else:
            timeline.write(found, options["timeline"])
