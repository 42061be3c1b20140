"""The latest change of each point of the history, for a terminal and for CI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Changed:
    """A point whose level is `after` microseconds from run (date, commit) `since` on, and was `before` until then."""

    point: str
    before: float
    after: float
    since: tuple[str, str]

    @property
    def step(self) -> float:
        """0.1 if the point takes a tenth longer."""
        return self.after / self.before - 1 if self.before else 0.0

    def __str__(self) -> str:
        date, commit = self.since
        times = f"{self.before:g} -> {self.after:g} us"
        return f"{self.step:+8.1%}  {times:<24}  since {date} {commit or '(no commit)'}  {self.point}"


def latest(data: dict[str, Any]) -> list[Changed]:
    """Of `collect.page_data`'s result; the largest step first."""
    return sorted(_all(data), key=lambda change: -abs(change.step))


def _all(data: dict[str, Any]) -> Iterator[Changed]:
    for scene in data["scenes"]:
        mark = " (simulated)" if scene["simulated"] else ""
        where = f"{scene['world_size']} ranks, {scene['mode']}, {scene['place']}, on {scene['device']}{mark}"
        for line in scene["lines"]:
            for size, runs, changes in zip(line["size"], line["run"], line["changes"], strict=True):
                if changes:
                    at, before, after = changes[-1]
                    point = f"{scene['collective']} {scene['dtype']} {line['kernel']} {size} B, {where}"
                    yield Changed(point, before, after, tuple(data["runs"][runs[at]]))
