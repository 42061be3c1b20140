"""One form of message for kernels that a tool leaves out."""

from __future__ import annotations

from collections.abc import Iterable


def left_out_lines(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason in `reasons`, pairs (name, reason), with the names in order."""
    return [f"left out: {text}" for text in by_reason(reasons)]


def by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """`NAME, NAME: REASON` for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(named)}: {reason}" for reason, named in names.items()]
