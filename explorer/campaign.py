"""`tricomm.check`: runs one function under many schedules, and examines every access."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.errors import InvalidArgument
from tricomm.explorer import selftest
from tricomm.explorer.execution import Ranks
from tricomm.explorer.ptx.global_memory import BadAddress
from tricomm.explorer.report.findings import FORMAL, KINDS, REAL, Execution, Finding, Outcome, Subject
from tricomm.explorer.report.report import CampaignPlan, Report, options_of
from tricomm.explorer.schedule import shrinking
from tricomm.explorer.schedule.contention import Contention
from tricomm.explorer.schedule.host_watchdog import OutOfTime
from tricomm.explorer.schedule.strategies import NAMES, Given, Priorities, RandomWalk, Strategy
from tricomm.explorer.simulation import architecture_of, prepared
from tricomm.explorer.world import oracle
from tricomm.kernels import layout
from tricomm.options import Options, tuned

FAULTS = ("delay", "stop", "drop")
# First epochs just before 32-bit counters wrap or mailboxes are cleared. Every fourth schedule starts at one of them.
_EDGES = ((1 << 31) - 2, (1 << 32) - 2, layout.CLEAR_EVERY - 1)
_EPOCHS = (1, _EDGES[0], 1, 1, 1, 1, _EDGES[1], 1, 1, 1, 1, _EDGES[2])
_DEPTHS = (2, 3, 4)
_KEEP = (0.0, 0.0, 0.5, 0.9)
_MOST_STEPS = 200_000
_PATIENT = 12
_TRIES = 8  # schedules in which `_tell_effects` looks for the reverse order of a race
_SAME = (
    "world_size",
    "strategy",
    "preemptions",
    "seed",
    "faults",
    "residency",
    "options",
    "subject",
    "identical",
    "compiled",
)


def check(
    fn: Callable[[Communicator], Any],
    world_size: int,
    schedules: int | None = 200,
    strategy: str = "random",
    preemptions: int = 2,
    seed: int = 0,
    *,
    faults: Sequence[str] = ("delay",),
    residency: int | None = None,
    options: Options | None = None,
    identical: bool | None = None,
    keep_going: bool = False,
    ignore: Sequence[str] = (),
    compiled: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    budget: float | None = None,
    since: Report | None = None,
) -> Report:
    """Run `fn(comm)` for all ranks under many schedules, and report what is wrong in any of them.

    `strategy` is "random", "pct" (random priorities, 2 to 4 deep) or "exhaustive" (every schedule with at most
    `preemptions` preemptions; `schedules` then is a limit, None for no limit). A schedule is a function of `seed` and
    its number, so a campaign repeats itself. A switch is possible at every access to symmetric memory; the blocks of
    a launch enter in any order, and all of them can be resident (`residency` is a smaller number of places a rank).

    `faults` are tried in some of the schedules: "delay" (stores that release nothing arrive late, tiles in pieces),
    "stop" (a rank never runs again), "drop" (a rank dies at some step). After a stop or a drop, each other rank must
    raise a documented error or return the right result.

    Looks for: races and insufficient scopes, deadlocks, accesses out of bounds, reads of memory never written, wrong
    results of the collectives, returned tensors that depend on the schedule, ranks that do not hold the same bits
    (`identical=True`: in all results of `fn`; None: only in results that are equal except for rounding), flags that no
    rank has read, exceptions. An `AssertionError` of `fn` counts as a wrong result. The first schedule with a finding
    ends the campaign, unless `keep_going`; its choices are shrunk. Findings of a kind in `ignore` do not count.

    `fn` may also be a function without arguments that uses `torch.distributed`, torch's symmetric memory and
    `kernel[grid](...)` on tensors of device "cuda", as on a box with `world_size` GPUs. It runs compiled, by default
    for sm_90, or interpreted with `compiled="none"`. Each rank has its own process groups, environment and variables.

    The default `options` have the smallest arena. Every fourth schedule starts its epochs at another number: at 1,
    before 2^30, before 2^31 and before 2^32. Random numbers are the same in every schedule.

    `compiled` is an architecture, such as "sm_90": then the kernels are compiled for it, launched as on a GPU, and
    their PTX is executed, warp by warp, with the memory model of PTX for every thread; a finding names the Python
    lines and the PTX instruction. The default `options` then have room for a GPU's tiles.

    After `budget` seconds the campaign ends, even in the middle of a schedule, which then does not count. With a
    budget, `schedules` may be None. `since` is the report of an earlier campaign with the same arguments, except
    `schedules` and `budget`: its schedules are not run again, except schedules with a finding. "exhaustive" takes no
    `since`.

    Raises `InvalidArgument` for bad arguments, for a function that takes no communicator, makes a call in another
    thread or blocks outside of tricomm, and for a kernel that the interpreter cannot run. Sources of the method: CHESS
    (bounded preemptions), PCT (priorities), HRF and the PTX memory model (scopes).
    """
    began = time.monotonic()
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise InvalidArgument(f"budget={budget!r}: seconds, more than 0, are needed")
    endless = schedules is None and budget is not None
    plan = _plan(1 if endless else schedules, strategy, preemptions, seed, faults, identical, keep_going, options)
    plan = replace(plan, schedules=schedules)
    if isinstance(ignore, str) or any(kind not in KINDS for kind in ignore):
        raise InvalidArgument(f"ignore={ignore!r}: a list of {', '.join(KINDS)} is needed")
    plan = replace(plan, ignore=frozenset(ignore))
    compiled = architecture_of(fn, compiled)
    if options is None and compiled is None:
        options = smallest(world_size)
    subject = prepared(fn, world_size, options, residency, _MOST_STEPS, compiled)
    if budget is not None:
        subject = replace(subject, ends=began + budget)
    selftest.require(compiled)
    return Campaign(subject, plan).run(progress, since)


def replay(report: Report, fn: Callable[[Communicator], Any]) -> list[list[Finding]]:
    """Runs `fn` again under the schedule of each finding of `report`; returns the findings of each such run."""
    options = options_of(report.options)
    subject = prepared(fn, report.world_size, options, report.residency, _MOST_STEPS, report.compiled)
    plan = _plan(
        report.schedules or 1,
        report.strategy,
        report.preemptions,
        report.seed,
        report.faults,
        report.identical,
        True,
        options,
    )
    selftest.require(report.compiled)
    return [Campaign(subject, plan).replay(finding) for finding in report.findings]


def smallest(world_size: int) -> Options:
    """Options with the smallest arena for a group of this size, so that there is little to examine and many chunks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= layout.MAX_WORLD_SIZE:
        return Options()  # `prepared` refuses it
    nbytes = layout.MIN_ARENA
    while True:
        try:
            layout.plan(world_size, nbytes)
            return Options(arena_bytes=nbytes)
        except InvalidArgument:
            nbytes *= 2


def _plan(
    schedules: int | None,
    strategy: str,
    preemptions: int,
    seed: int,
    faults: Sequence[str],
    identical: bool | None,
    keep_going: bool,
    options: Options | None,
) -> CampaignPlan:
    if strategy not in NAMES:
        raise InvalidArgument(f"strategy={strategy!r}: one of {', '.join(NAMES)} is needed")
    if schedules is None and strategy != "exhaustive":
        raise InvalidArgument(f"schedules=None: {strategy} never ends; a number is needed")
    for name, value, least in (("schedules", schedules, 1), ("preemptions", preemptions, 0), ("seed", seed, 0)):
        if name == "schedules" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"{name}={value!r}: an integer from {least} on is needed")
    if seed >= 1 << 32:
        raise InvalidArgument(f"seed={seed}: less than 2**32 is needed")
    if not isinstance(faults, str | list | tuple | set | frozenset):
        raise InvalidArgument(f"faults={faults!r}: a list of {', '.join(FAULTS)} is needed")
    unknown = [f for f in ([faults] if isinstance(faults, str) else faults) if f not in FAULTS]
    if unknown or isinstance(faults, str):
        raise InvalidArgument(f"faults={faults!r}: a list of {', '.join(FAULTS)} is needed")
    first = options._tuning.first_epoch if isinstance(options, Options) else 1  # anything else is refused below
    epochs = _EPOCHS if first == 1 else (first,)
    return CampaignPlan(schedules, strategy, preemptions, seed, tuple(faults), identical, keep_going, epochs)


class Interrupted(KeyboardInterrupt):
    """An interrupt of a campaign, with the report of the schedules that had ended."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


class Campaign:
    """The schedules of one call of `check`."""

    def __init__(self, subject: Subject, plan: CampaignPlan) -> None:
        self._subject, self._plan = subject, plan
        self._contention = Contention(plan.preemptions) if plan.strategy == "exhaustive" else None
        self._steps_of_first, self._over = 100, False
        self._most_spent = shrinking.STEPS if subject.compiled is None else shrinking.COMPILED_STEPS
        self._first: dict[int, list[torch.Tensor]] = {}

    def run(self, progress: Callable[[int, int], None] | None = None, since: Report | None = None) -> Report:
        began, report = time.monotonic(), Report.of(self._subject, self._plan)
        frozen = gc.get_freeze_count() == 0
        if frozen:  # each collection would walk all objects of torch and Triton: a tenth of a schedule's time
            gc.freeze()
        try:
            if since is not None:
                self._go_on(report, since)
            if self._plan.keep_going or report.ok:
                self._explore(report, progress)
            self._tell_effects(report)
        except OutOfTime as error:
            report.ended = f"the budget ended in schedule {report.ran}, {error}"
        except KeyboardInterrupt:
            report.ended = f"interrupted in schedule {report.ran}"
            raise Interrupted(report) from None
        finally:
            report.seconds += time.monotonic() - began
            if frozen:
                gc.unfreeze()
        return report

    def _explore(self, report: Report, progress: Callable[[int, int], None] | None) -> None:
        for number, execution in self._executions(report.ran):
            outcome = self._one(number, execution)
            findings = self._judged(outcome)
            report.ran, report.steps = number + 1, report.steps + outcome.steps
            if number == 0:
                self._steps_of_first = outcome.steps
            if findings:
                self._keep(report, findings, replace(execution, choices=outcome.choices), number, outcome)
                if not self._plan.keep_going:
                    break
            if progress is not None:
                progress(number + 1, len(report.findings))
        else:
            report.complete = self._contention is None or self._over

    def _go_on(self, report: Report, since: Report) -> None:
        """Make `report` begin where `since` has ended. Keep each finding of `since` that is found again."""
        other = [name for name in _SAME if getattr(report, name) != getattr(since, name)]
        if other or self._contention is not None:
            why = f"another {' and '.join(other)}" if other else f'strategy="{self._plan.strategy}" begins anew'
            raise InvalidArgument(f"since: the report is of a campaign that cannot be continued: {why}")
        report.earlier, report.ran, report.steps, report.seconds = since.ran, since.ran, since.steps, since.seconds
        if since.findings or self._plan.schedules is None or since.ran < self._plan.schedules:
            first = self._one(0, self._execution(0))
            self._judged(first)
            self._steps_of_first = first.steps
        for finding in since.findings:
            shown, outcome = self._again(finding.execution)
            again = next((f for f in shown if f.key == finding.key), None)
            if again is not None:
                events = () if report.findings else tuple(r.as_json() for r in outcome.records)
                report.findings.append(again.found_in(finding.execution, finding.schedule, events))

    def replay(self, finding: Finding) -> list[Finding]:
        """Run the first schedule, then one execution of an earlier campaign again, and compare their results."""
        self._judged(run_one(self._subject, self._execution(0), self._strategy(0, self._execution(0))))
        return self._again(finding.execution)[0]

    def _executions(self, number: int) -> Iterator[tuple[int, Execution]]:
        plan = self._plan
        while plan.schedules is None or number < plan.schedules:
            if self._contention is not None and not self._contention.begin():
                self._over = True
                return
            yield number, self._execution(number)
            if self._contention is not None:
                self._contention.search.end()
            number += 1

    def _execution(self, number: int) -> Execution:
        plan = self._plan
        if self._contention is not None:
            return Execution(plan.seed, plan.epochs[0])
        seed = plan.seed * 1_000_003 + number
        fault, delays = None, None
        kinds = [f for f in plan.faults if f != "delay"]
        if kinds and number % 2:
            random = Random(seed)
            last = max(1, self._steps_of_first)  # 0 if no kernel accesses symmetric memory
            rank, step = random.randrange(self._subject.world_size), random.randint(1, last)
            fault = (kinds[number // 2 % len(kinds)], rank, step)
        if "delay" in plan.faults and number % 4 >= 2:
            delays = seed
        # A loop that gives up after a few reads must not be parked at once.
        patience = _PATIENT if number % 4 == 1 else 1
        return Execution(seed, plan.epochs[number % len(plan.epochs)], delays, fault, patience=patience)

    def _strategy(self, number: int, execution: Execution) -> Strategy:
        if self._contention is not None:
            return self._contention.search
        if self._plan.strategy == "pct":
            return Priorities(execution.seed, _DEPTHS[number % len(_DEPTHS)], self._steps_of_first)
        return RandomWalk(execution.seed, _KEEP[number // 4 % len(_KEEP)])

    def _one(self, number: int, execution: Execution) -> Outcome:
        return run_one(self._subject, execution, self._strategy(number, execution), self._contention)

    def _judged(self, outcome: Outcome) -> list[Finding]:
        findings = list(outcome.findings)
        if not findings:
            findings += self._compared({rank: _tensors(result) for rank, result in outcome.results.items()})
        return [finding for finding in findings if finding.kind not in self._plan.ignore]

    def _compared(self, results: dict[int, list[torch.Tensor]]) -> list[Finding]:
        """Compare the ranks' results with each other and with the first schedule's."""
        findings = oracle.mismatched(results, self._plan.identical)
        for rank, now in results.items():
            first = self._first.setdefault(rank, [t.clone() for t in now])
            apart = [i for i, (a, b) in enumerate(zip(first, now, strict=False)) if not oracle.same_bits(a, b)]
            if apart or len(first) != len(now):
                what = oracle.difference(first[apart[0]], now[apart[0]]) if apart else "another number of tensors"
                text = f"what rank {rank} returns depends on the schedule: {what}"
                findings.append(Finding("wrong_result", (rank,), (), text, "find the unordered write"))
                break
        return findings

    def _keep(
        self, report: Report, findings: list[Finding], execution: Execution, number: int, outcome: Outcome
    ) -> None:
        known = {f.key for f in report.findings}
        for finding in findings:
            if finding.key in known:
                continue
            known.add(finding.key)
            first = not report.findings
            events = tuple(r.as_json() for r in outcome.records) if first else ()
            report.findings.append(finding.found_in(execution, number, events))  # not shrunk if the time has ended
            smaller = shrinking.shrink(self._again, finding, execution, self._most_spent) if first else execution
            shown, again = self._again(smaller)
            finding = next((f for f in shown if f.key == finding.key), finding)
            events = tuple(r.as_json() for r in again.records) if first else ()
            report.findings[-1] = finding.found_in(smaller, number, events)

    def _tell_effects(self, report: Report) -> None:
        """Find out whether timing alone reverses a race: run more schedules, without late stores."""
        spent = 0
        for seed in range(_TRIES):
            races = {n: f for n, f in enumerate(report.findings) if _order(f) and f.effect not in (REAL, FORMAL)}
            if not races or spent > self._most_spent:
                return
            walk = RandomWalk(seed, hosts_first=seed % 2 == 0)  # host code of one rank may come long after another's
            findings, outcome = self._again(Execution(seed, self._plan.epochs[0]), walk)
            orders, spent = [_order(f) for f in findings], spent + outcome.steps
            for number, finding in races.items():
                if _order(finding)[::-1] in orders:
                    report.findings[number] = replace(finding, effect=REAL)

    def _again(self, execution: Execution, strategy: Strategy | None = None) -> tuple[list[Finding], Outcome]:
        """Repeat an execution by its recorded choices, or under another strategy."""
        outcome = run_one(self._subject, execution, strategy or Given(execution.choices))
        return self._judged(outcome), outcome


def _order(finding: Finding) -> list[Any]:
    """The accesses of a race in the order in which they happened, by line, or by rank if both have the same line. Empty
    for two strong accesses, whose order does not matter."""
    both = () if finding.kind == "deadlock" else finding.accesses  # the accesses of a deadlock are waits
    if len(both) != 2 or all(access["sem"] for access in both):
        return []
    one_line = len(set(finding.where)) == 1
    return [(a["where"], *((a["rank"], a["owner"], a["kind"]) if one_line else ())) for a in finding.accesses]


def run_one(
    subject: Subject, execution: Execution, strategy: Strategy, contention: Contention | None = None
) -> Outcome:
    """Run and examine one execution. Raises `OutOfTime`."""
    if time.monotonic() >= subject.ends:
        raise OutOfTime("before its first step")
    options = tuned(subject.options, first_epoch=execution.first_epoch)
    outcome = Ranks(replace(subject, options=options), execution, strategy, True, contention).execute()
    for error in outcome.errors.values():
        # A bad address is a mistake of a kernel, not of the caller, so it is a finding.
        if isinstance(error, InvalidArgument) and not isinstance(error, BadAddress):
            raise error
    return outcome


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in what a function returned, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach()] if value.layout == torch.strided and not value.is_nested else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []
