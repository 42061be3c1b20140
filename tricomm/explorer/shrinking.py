"""Makes the list of choices that shows a finding shorter, as long as it still shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tricomm.explorer.findings import Execution, Finding

_SECONDS = 10.0

Again = Callable[[Execution], tuple[list[Finding], Any]]


def shrink(again: Again, finding: Finding, execution: Execution) -> Execution:
    """The smallest execution found within some seconds that shows `finding` too: first without its faults, then with
    ever smaller parts of its choices left out."""
    end = time.monotonic() + _SECONDS

    def shows(tried: Execution) -> bool:
        return any(f.key == finding.key for f in again(tried)[0])

    for simpler in (replace(execution, choices=()), replace(execution, delays=None), replace(execution, first_epoch=1)):
        if simpler != execution and shows(simpler):
            execution = simpler
            if not execution.choices:
                return execution
    part = max(1, len(execution.choices) // 2)
    while time.monotonic() < end:
        at, before = 0, len(execution.choices)
        while at < len(execution.choices) and time.monotonic() < end:
            fewer = replace(execution, choices=execution.choices[:at] + execution.choices[at + part :])
            if shows(fewer):
                execution = fewer
            else:
                at += part
        if part == 1 and len(execution.choices) == before:
            break
        part = max(1, part // 2)
    return execution
