"""Kernels that a tool leaves out, told by name: each tool decides by `Kernel.why_not_compiled`, and says it so."""

from __future__ import annotations

from collections.abc import Iterable


def left_out_lines(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason of pairs (name, reason), with the names in order."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(named)}: {reason}" for reason, named in names.items()]
