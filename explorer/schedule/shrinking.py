"""Shrinks the choices of an execution, as long as it still shows its finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tricomm.explorer.report.findings import Execution, Finding, Outcome
from tricomm.explorer.schedule.strategies import Priorities, Strategy

# Limits of each of the two methods, which take some seconds. In steps, because times are not reproducible.
STEPS, COMPILED_STEPS = 6000, 1500

Again = Callable[[Execution, Strategy | None], tuple[list[Finding], Outcome]]


def shrink(again: Again, finding: Finding, execution: Execution, most: int = STEPS) -> Execution:
    """The simplest execution with the same `finding` that two methods find in `most` steps each. It has few preemptions
    and choices and, if possible, no delayed stores and epochs from 1."""
    spent = 0

    def shows(tried: Execution) -> bool:
        nonlocal spent
        findings, outcome = again(tried, None)
        spent += outcome.steps
        return any(f.key == finding.key for f in findings)

    for simpler in (replace(execution, choices=()), replace(execution, delays=None), replace(execution, first_epoch=1)):
        if simpler != execution and shows(simpler):
            execution = simpler
            if not execution.choices:
                return execution
    execution = _few_preemptions(again, finding, execution, most)
    spent = 0
    return _left_out(shows, lambda: spent > most, execution)


def _few_preemptions(again: Again, finding: Finding, execution: Execution, most: int) -> Execution:
    """The best of some schedules with few switches, which are random priorities that drop at most twice."""
    spent, best = 0, execution
    steps = max((step for step, _ in execution.choices), default=1) + 1
    for seed in range(60):
        if spent > most or len(best.choices) <= 1:
            break
        findings, outcome = again(execution, Priorities(seed, 1 + seed % 3, steps))
        spent += outcome.steps
        if len(outcome.choices) < len(best.choices) and any(f.key == finding.key for f in findings):
            best = replace(execution, choices=outcome.choices)
    return best


def _left_out(shows: Callable[[Execution], bool], enough: Callable[[], bool], execution: Execution) -> Execution:
    part, smaller = max(2, len(execution.choices) // 2), True
    while part and not enough():
        before, at = len(execution.choices), 0
        while at < len(execution.choices) and not enough():
            fewer = replace(execution, choices=execution.choices[:at] + execution.choices[at + part :])
            if shows(fewer):
                execution = fewer
            else:
                at += 1 if part == 2 else part
        smaller = smaller or len(execution.choices) < before
        if part == 1 and smaller:  # remove two at a time: a switch and the switch back belong together
            part, smaller = 2, False
        else:
            part //= 2
    return execution
