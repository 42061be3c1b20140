"""`tricomm check` of all shipped kernels: its announcement, and the order of the kernels."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from click.testing import CliRunner

from tricomm.cli import cli
from tricomm.commands.check import check
from tricomm.explorer import campaign, shipped
from tricomm.explorer.report.report import CampaignPlan, Report
from tricomm.perf.parsing import parse_budget

ALL = shipped.kernels(None, None, None)


def _passed(fn, world_size, *, options, schedules, progress, **more):
    progress(schedules, 0)
    subject = campaign.Subject(fn, world_size, options, compiled=more["compiled"])
    report = Report.of(subject, CampaignPlan(schedules, "random", 2, 0, ("delay",), None, False, (1,)))
    report.ran, report.steps = schedules, 1
    return report


def test_without_arguments_check_estimates_its_time_and_starts_with_one_kernel_of_each_collective(monkeypatch):
    monkeypatch.setattr(campaign, "check", _passed)
    done = CliRunner().invoke(cli, ["check"])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"{len(ALL)} kernels, 20 schedules each, about ") and " min: first one" in done.stderr
    names = [line.partition(":")[0] for line in done.stdout.splitlines() if ": no finding in 20 schedules" in line]
    assert sorted(names) == sorted(kernel.name for kernel in ALL)
    by_name, collectives = {kernel.name: kernel for kernel in ALL}, {kernel.collective for kernel in ALL}
    assert {by_name[name].collective for name in names[: len(collectives)]} == collectives


def test_with_a_number_or_a_choice_check_prints_no_estimate(monkeypatch):
    monkeypatch.setattr(campaign, "check", _passed)
    for asked in (["--schedules", "3"], ["--collective", "barrier"]):
        done = CliRunner().invoke(cli, ["check", *asked])
        assert done.exit_code == 0 and done.stderr == "", done.stderr


def test_the_workflow_gives_options_that_there_are():
    workflow = (Path(__file__).parents[2] / "examples" / "check_kernels.yml").read_text()
    (line,) = re.findall(r"^ *tricomm (check .*?)\n      - ", workflow, re.DOTALL | re.MULTILINE)
    _, *arguments = shlex.split(line)
    options = check.make_context("check", arguments).params
    assert options["function"] == "kernels/one_shot.py:one_shot" and parse_budget(options["budget"]) == 300
    for name in ("report", "timeline"):
        assert workflow.count(f": {options[name]}") == 1, "what is written is not uploaded"
    assert options["report"].suffix == ".sarif"
