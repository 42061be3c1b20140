"""The output of `tricomm kernels`, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tricomm.perf import text_table
from tricomm.perf.machine_code.kernel_report import KernelReport, check

_NAMES = ("kernel", "arch", "dtype", "op", "W", "aligned")
_NUMBERS = ("regs", "spill", "stack", "shared", "128-bit", "narrow", "tail", "scalar", "control", "acq.sys", "rel.sys",
            "rlx.sys", "per 16 B")  # fmt: skip

LEGEND = """\
spill: local loads + stores in SASS.  128-bit, narrow: bulk accesses of the payload in SASS, of at least and of less
than 128 bits.  tail: element by element, past the last full tile or misaligned.  scalar, control: one word; headers,
polls, clearing.  acq, rel, rlx: acquire, release and relaxed accesses at `.sys` scope in PTX.  per 16 B:
instructions in SASS of the innermost loops that move payload, for each 16 bytes of a row."""


def lines(reports: Iterable[KernelReport]) -> list[str]:
    """A heading, a line per variant, and a line per broken bar."""
    reports = list(reports)
    table = text_table.lines((*_NAMES, *_NUMBERS), map(_cells, reports), right=("W", *_NUMBERS))
    return table + [f"! {_name(report)}: {broken}" for report in reports for broken in check(report)]


def _cells(report: KernelReport) -> tuple[object, ...]:
    v, r, s = report.variant, report.resources, report.sass
    dtype, op, aligned = (v.dtype, v.op, "yes" if v.aligned else "no") if report.payload else ("-", "-", "-")
    return (
        v.kernel, v.arch, dtype, op, v.world_size, aligned, r.registers, r.spill_loads + r.spill_stores, r.stack,
        r.shared, s.body_wide_loads + s.body_wide_stores, s.body_narrow, s.tail, s.scalar, s.control,
        report.sys_acquires, report.sys_releases, report.sys_relaxed, report.steady or "-",
    )  # fmt: skip


def _name(report: KernelReport) -> str:
    v = report.variant
    return f"{v.kernel} {v.arch} {v.dtype} {v.op} of {v.world_size} ranks{'' if v.aligned else ', misaligned'}"


def record(report: KernelReport) -> dict[str, Any]:
    """Everything about one variant as plain JSON values, with the bars that it breaks."""
    return {**asdict(report), "violations": check(report)}
