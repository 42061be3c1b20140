"""`tricomm kernels` for people and for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tricomm.perf.machine_code.kernel_report import Report, check

_COLUMNS = (
    ("kernel", -44), ("arch", -6), ("dtype", -13), ("op", -4), ("W", 2), ("aligned", -7), ("regs", 4), ("spill", 5),
    ("stack", 5), ("shared", 6), ("128-bit", 7), ("narrow", 6), ("tail", 4), ("scalar", 6), ("control", 7),
    ("acq.sys", 7), ("rel.sys", 7), ("rlx.sys", 7), ("per 16 B", 8),
)  # fmt: skip

LEGEND = """\
spill: local loads + stores in SASS.  128-bit, narrow: bulk accesses of the payload in SASS, of at least and of less
than 128 bits.  tail: element by element, past the last full tile or misaligned.  scalar, control: one word; headers,
polls, clearing.  acq, rel, rlx: acquire, release and relaxed accesses at `.sys` scope in PTX.  per 16 B:
instructions in SASS of the innermost loops that move payload, for each 16 bytes of a row."""


def heading() -> str:
    """The line of column names."""
    return "  ".join(f"{name:{_align(width)}}" for name, width in _COLUMNS)


def line(report: Report) -> str:
    """One variant, aligned under `heading`."""
    v, r, s = report.variant, report.resources, report.sass
    cells = (
        v.kernel, v.arch, v.dtype if report.payload else "-", v.op if report.payload else "-", v.world_size,
        "-" if not report.payload else "yes" if v.aligned else "no", r.registers, r.spill_loads + r.spill_stores,
        r.stack, r.shared, s.body_wide_loads + s.body_wide_stores, s.body_narrow, s.tail, s.scalar, s.control,
        report.sys_acquires, report.sys_releases, report.sys_relaxed, report.steady or "-",
    )  # fmt: skip
    return "  ".join(f"{cell!s:{_align(width)}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _align(width: int) -> str:
    return f"<{-width}" if width < 0 else f">{width}"


def record(report: Report) -> dict[str, Any]:
    """Everything about one variant as plain JSON values, with what breaks a bar."""
    return {**asdict(report), "violations": check(report)}
