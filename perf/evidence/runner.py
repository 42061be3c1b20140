"""Runs cases in the order of their value until all have had their turn or the budget is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tricomm.perf.evidence import archive, environment
from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.schedule import Entry, Schedule
from tricomm.perf.evidence.stage import FIRST, SLICE, Settings, Stage
from tricomm.perf.evidence.stage_workers import Workers

_WRITING = 5.0  # seconds of the budget for what is written at the end
_LOOK = 0.5  # seconds before the end at which a case counts as ended by it
_OFTEN = 30.0  # seconds between two writings: who is ended from outside has left a summary
_BAD = ("failed", "crashed", "timeout")
_BUDGET = "the budget was over"
Say = Callable[[str], None]


def run(
    stages: Sequence[Stage], settings: Settings, say: Say, budget: float = math.inf,
    workers: Callable[[Settings], Any] = Workers, clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run what has not been run yet, for `budget` seconds at most; the stages' results, which `settings.out` has then.

    A case that has begun is ended when the budget is over; it counts as not run.
    """
    end = clock() + budget
    settings.out.mkdir(parents=True, exist_ok=True)
    notes = Journal.of(settings.out)
    said = notes.start(environment.facts(settings))
    if said:
        say(said)
    return _Run(stages, settings, say, notes, workers(settings), clock, end - _WRITING).all()


@dataclass
class _Run:
    stages: Sequence[Stage]
    settings: Settings
    say: Say
    notes: Journal
    processes: Any
    clock: Callable[[], float]
    end: float
    trouble: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        possible = []
        for stage in self.stages:
            reason = stage.missing(self.settings)
            if reason is None:
                possible.append((stage, list(stage.cases(self.settings))))
            else:
                self.trouble[stage.name] = ("skipped", reason)
        self.plan = Schedule.of(possible, list(self.notes.ended))
        self.plan.known = {key: case["seconds"] for key, case in self.notes.ended.items()}
        self.plan.cut = self.notes.cut

    def all(self) -> list[dict[str, Any]]:
        written = self.clock()
        try:
            while (entry := self.plan.next(self.end - self.clock())) is not None:
                self._one(entry)
                if self.clock() - written > _OFTEN:
                    self._write()
                    written = self.clock()
        finally:
            self.processes.close()
            found = self._write()
        return found

    def _one(self, entry: Entry) -> None:
        stage, case = entry.stage, entry.case
        if case.tier != FIRST and self.settings.slice_us is None:
            self._measured()
        self.notes.begin(*entry.key)
        began = self.clock()
        left = self.end - began
        outcome = self.processes.run(stage, case, left)
        seconds = round(self.clock() - began, 3)
        self.plan.took(entry, seconds)
        if outcome.status == "timeout" and seconds > left - _LOOK:
            self.notes.cut_off(*entry.key, seconds)
            self.plan.left[entry.key] = f"{_BUDGET} while it ran"
            self.say(f"  {stage.name}/{case.key}: cut off after {seconds:.0f} s, {_BUDGET}")
            return
        if not outcome.started:
            self.trouble[stage.name] = (outcome.status, outcome.reason)
            self.plan.left[entry.key] = outcome.reason
            self.plan.leave_stage(stage.name, f"its process does not start: {outcome.reason}")
            self.say(f"{stage.name}: {outcome.status}: {outcome.reason}")
            return
        self.notes.end(*entry.key, outcome.status, outcome.reason, seconds, outcome.data)
        self.say(f"  {stage.name}/{case.key}: {outcome.status}" + (f" ({outcome.reason})" if outcome.reason else ""))
        if outcome.status != "ok" and case.tier == FIRST:
            name = "/".join(entry.key)
            self.plan.leave_dependents(name, f"{name} is needed, which was {outcome.status}: {outcome.reason}"[:300])
        if not any(waiting.stage is stage for waiting in self.plan.waiting):
            self.processes.end(stage)

    def _measured(self) -> None:
        """Tell the processes that start from here on what the first minute has found."""
        stage, _, key = SLICE.partition("/")
        case = self.notes.ended.get((stage, key), {"data": {}})
        self.settings = replace(self.settings, slice_us=case["data"].get("slice_us"))
        self.processes.knows(self.settings)

    def _write(self) -> list[dict[str, Any]]:
        """Results, summary and archive of what there is."""
        waiting = {entry.key: _BUDGET for entry in self.plan.waiting}
        left = {**self.plan.left, **waiting}
        found = []
        for stage in self.stages:
            mine = {key: left[name, key] for name, key in left if name == stage.name}
            found.append(self.notes.result(stage, self.trouble.get(stage.name), mine, self.settings.dry_run))
        archive.write(self.settings.out, self.stages, found)
        return found


def good(results: Sequence[dict[str, Any]], dry_run: bool) -> bool:
    """True if nothing was wrong; a stage that cannot run on this machine is wrong, too, but for a dry run."""
    states = {result["status"] for result in results}
    return not states & {*_BAD, *(() if dry_run else ("skipped",))}
