"""Runs cases in the order of the schedule until all have run or the budget is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tricomm.perf.evidence import archive, environment
from tricomm.perf.evidence.journal import Journal
from tricomm.perf.evidence.schedule import PendingCase, Schedule
from tricomm.perf.evidence.stage import FIRST, SLICE, EvidenceSettings, Stage
from tricomm.perf.evidence.stage_process import UNCOMPILED, StageProcesses

_WRITING = 5.0  # seconds of the budget for writing results at the end
_MARGIN = 0.5  # seconds before the end; a timeout after that is the budget's and not the case's
_WRITE_EVERY = 30.0  # seconds, so that a run that is killed has left a summary
_BAD = ("failed", "crashed", "timeout")
_BUDGET = "the budget was over"
Log = Callable[[str], None]


def run(
    stages: Sequence[Stage], settings: EvidenceSettings, log: Log, budget: float = math.inf,
    processes: Callable[[EvidenceSettings], Any] = StageProcesses, clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the cases that have not run yet, for `budget` seconds at most; the stages' results, also in `settings.out`.

    A case that runs when the budget is over is ended and counts as not run.
    """
    end = clock() + budget
    settings.out.mkdir(parents=True, exist_ok=True)
    journal = Journal.of(settings.out)
    started = journal.start(environment.facts(settings))
    if started:
        log(started)
    return _EvidenceRun(stages, settings, log, journal, processes(settings), clock, end - _WRITING).all()


@dataclass
class _EvidenceRun:
    stages: Sequence[Stage]
    settings: EvidenceSettings
    log: Log
    journal: Journal
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
        self.schedule = Schedule.of(possible, list(self.journal.ended))
        self.schedule.known = {key: case["seconds"] for key, case in self.journal.ended.items()}
        self.schedule.cut = self.journal.cut

    def all(self) -> list[dict[str, Any]]:
        written = self.clock()
        try:
            while (entry := self.schedule.next(self.end - self.clock())) is not None:
                self._one(entry)
                if self.clock() - written > _WRITE_EVERY:
                    self._write()
                    written = self.clock()
        finally:
            self.processes.close()
            results = self._write()
        return results

    def _one(self, entry: PendingCase) -> None:
        stage, case = entry.stage, entry.case
        if case.tier != FIRST and self.settings.slice_us is None:
            self._use_time_slice()
        self.journal.begin(*entry.key)
        began = self.clock()
        left = self.end - began
        outcome = self.processes.run(stage, case, left)
        seconds = round(self.clock() - began, 3)
        self.schedule.add_cost(entry, seconds)
        if outcome.status == "timeout" and seconds > left - _MARGIN:
            self.journal.cut_off(*entry.key, seconds)
            self.schedule.left[entry.key] = f"{_BUDGET} while it ran"
            self.log(f"  {stage.name}/{case.key}: cut off after {seconds:.0f} s, {_BUDGET}")
            return
        if outcome.status == UNCOMPILED:
            self.schedule.left[entry.key] = outcome.reason
            self.log(f"  {stage.name}/{case.key}: not run, {outcome.reason}")
            return
        if not outcome.started:
            self.trouble[stage.name] = (outcome.status, outcome.reason)
            self.schedule.left[entry.key] = outcome.reason
            self.schedule.leave_stage(stage.name, f"its process does not start: {outcome.reason}")
            self.log(f"{stage.name}: {outcome.status}: {outcome.reason}")
            return
        self.journal.end(*entry.key, outcome.status, outcome.reason, seconds, outcome.data)
        self.log(f"  {stage.name}/{case.key}: {outcome.status}" + (f" ({outcome.reason})" if outcome.reason else ""))
        if outcome.status != "ok" and case.tier == FIRST:
            name = "/".join(entry.key)
            reason = f"{name} is needed, which was {outcome.status}: {outcome.reason}"[:300]
            self.schedule.leave_dependents(name, reason)
        if not any(waiting.stage is stage for waiting in self.schedule.waiting):
            self.processes.end(stage)

    def _use_time_slice(self) -> None:
        """Give processes that start after this the time slice that the first stage has measured."""
        stage, _, key = SLICE.partition("/")
        case = self.journal.ended.get((stage, key), {"data": {}})
        self.settings = replace(self.settings, slice_us=case["data"].get("slice_us"))
        self.processes.update(self.settings)

    def _write(self) -> list[dict[str, Any]]:
        """Write results, summary and archive of the cases so far."""
        left = self.schedule.left | {entry.key: _BUDGET for entry in self.schedule.waiting}
        results = []
        for stage in self.stages:
            of_stage = {key: reason for (name, key), reason in left.items() if name == stage.name}
            trouble = self.trouble.get(stage.name)
            results.append(self.journal.result(stage, trouble, of_stage, self.settings.dry_run))
        archive.write(self.settings.out, self.stages, results)
        return results


def good(results: Sequence[dict[str, Any]], dry_run: bool) -> bool:
    """True if nothing failed and every stage can run on this machine; in a dry run, some need not."""
    states = {result["status"] for result in results}
    return not states & {*_BAD, *(() if dry_run else ("skipped",))}
