"""Finds points of a page's data that got slower or faster, and since which run, and points that cannot be judged
yet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tricomm.perf.dashboard import change_points

_FACTS = ("collective", "dtype", "world_size", "mode", "place", "device", "simulated")


@dataclass(frozen=True)
class Changed:
    """A point that takes `after_us` from the run of `date` on, and took `before_us` until then. `commits` is the range
    from the previous run to this one, as git writes it."""

    point: dict[str, Any]
    before_us: float
    after_us: float
    date: str = ""
    commits: str = ""

    @property
    def step(self) -> float:
        """0.1 if the point takes a tenth longer; infinite if it took no time before."""
        return self.after_us / self.before_us - 1 if self.before_us else math.inf

    def __str__(self) -> str:
        times, mark = (
            f"{self.before_us:.4g} -> {self.after_us:.4g} us",
            " (simulated)" if self.point["simulated"] else "",
        )
        names = "{collective} {dtype} {kernel} {nbytes} B, {world_size} ranks, {mode}, {place}, on {device}"
        return f"{self.step:+8.1%}  {times:<24}  {names.format(**self.point)}{mark}"


@dataclass(frozen=True)
class Verdict:
    """The latest change of each point since the date `since`, by run and size, and steps that are too recent to judge.

    `points` are those that the latest run of their chart has measured; `few` of them have too few runs to be judged.
    `latest` is the date of the latest run; `stale`: it is before `since`.
    """

    changes: tuple[Changed, ...]
    unproven: tuple[Changed, ...]
    points: int
    few: int
    latest: str
    since: str
    stale: bool

    @property
    def slower(self) -> int:
        return sum(change.step > 0 for change in self.changes)

    @property
    def judged(self) -> bool:
        """False if too few points could be judged for "no change" to mean anything."""
        return bool(self.points) and not (self.stale or self.few or 10 * len(self.unproven) > self.points)

    def to_json(self) -> dict[str, Any]:
        unjudged = "too few runs to judge" if self.points else "no data"
        words = "slower" if self.slower else "no point is slower" if self.judged else unjudged
        counts = {"slower": self.slower, "faster": len(self.changes) - self.slower}
        return {"schema": 1, "verdict": words, **counts, **asdict(self)}

    def lines(self) -> list[str]:
        """The changes by day and commits, the latest first, and what could not be judged."""
        events: dict[tuple[str, str], list[Changed]] = {}
        for change in self.changes:
            events.setdefault((change.date[:10], change.commits), []).append(change)
        told = []
        for (_, commits), found in events.items():
            told += [f"{found[0].date}, {commits}:", *map(str, found)]
        since = f" since {self.since}" if self.since else ""
        faster = len(self.changes) - self.slower
        told.append(f"{self.slower} points are slower{since}, {faster} faster, of {self.points} in the latest runs")
        if self.stale:
            told.append(f"nothing was measured since then; the latest run is of {self.latest or '(no run)'}")
        if self.unproven:
            told.append(
                f"{len(self.unproven)} of {self.points} points took longer in the latest runs than in any before, up "
                f"to {self.unproven[0].step:+.0%}; too recent to judge, measure again"
            )
            told += map(str, self.unproven[:5])
        if self.few:
            told.append(
                f"{self.few} of {self.points} points of the latest runs have too few runs to judge: "
                f"{change_points.FEWEST} are needed, {change_points.LATE} of them after a step"
            )
        return told


def judge(data: dict[str, Any], since: str = "") -> Verdict:
    """The verdict on the result of `collect.page_data`, from the first run on that is not before the date `since`."""
    dates = [date for date, _ in data["runs"]]
    first = next((number for number, date in enumerate(dates) if date >= since), len(dates))
    found = [(run, change) for run, change in _steps(data, "changes") if run >= first]
    found.sort(key=lambda pair: (-pair[0], -abs(pair[1].step)))
    unproven = sorted((c for _, c in _steps(data, "unproven")), key=lambda change: -change.step)
    few, points = unjudged(data)
    changes, stale = tuple(change for _, change in found), bool(since) and first == len(dates)
    return Verdict(changes, tuple(unproven), points, few, dates[-1] if dates else "", since, stale)


def unjudged(data: dict[str, Any]) -> tuple[int, int]:
    """Two counts over the points that the latest run of their chart has measured: those with too few runs for a change
    to be found, and all."""
    counts = []
    for scene in data["scenes"]:
        points = [runs for line in scene["lines"] for runs in line["run"]]
        latest = max(runs[-1] for runs in points)
        counts += [len(runs) for runs in points if runs[-1] == latest]
    return sum(count < change_points.FEWEST for count in counts), len(counts)


def points(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
    """The facts of each point, its line, and its place in the line."""
    for scene in data["scenes"]:
        facts = {name: scene[name] for name in _FACTS}
        for line in scene["lines"]:
            for place, size in enumerate(line["size"]):
                yield {"kernel": line["kernel"], "nbytes": size, **facts}, line, place


def _steps(data: dict[str, Any], kind: str) -> Iterator[tuple[int, Changed]]:
    for point, line, place in points(data):
        runs = line["run"][place]
        for at, before, after in line[kind][place][-1:]:
            (_, old), (date, new) = data["runs"][runs[max(at - 1, 0)]], data["runs"][runs[at]]
            commits = f"commit {new}" if old == new else f"commits {old or '?'}..{new or '?'}"
            yield runs[at], Changed(point, before, after, date, commits if new or old else "no commit")
