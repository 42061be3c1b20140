"""What a soak has found, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.faults import FAULTS, Outcome
from tests.soak.growth import MEBIBYTE

BAD = {
    "wrong": "wrong results",
    "hang": "hangs",
    "unnamed": "unnamed errors",
    "unexpected": "other errors than expected",
    "late": "errors later than promised",
    "lost": "processes lost",
}
GROWTH = {"memory": "memory (MiB)", "descriptors": "descriptors", "threads": "threads", "mappings": "mappings"}


@dataclass
class Totals:
    """Sums of a soak; `ok` says whether everything but calls and faults is 0."""

    seed: int
    seconds: float = 0.0
    rounds: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    notice: dict[str, float] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    growth: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GROWTH, 0))
    names: list[str] = field(default_factory=list)
    _last: str = ""

    def add(self, number: int, route: str, ranks: int, fault: str | None, outcome: Outcome) -> None:
        self.rounds += 1
        self.routes[route] += 1
        if fault is not None:
            self.faults[fault] += 1
            key = f"{fault} {route}"
            self.notice[key] = max(self.notice.get(key, 0.0), outcome.notice)
        self.problems += outcome.problems
        errors = [r.error[0] if r and r.error else "-" for r in outcome.reports]
        self._last = (
            f"round {number}: {route}, {ranks} ranks, {fault or 'warm-up'}: {' '.join(errors)}, "
            f"after {outcome.notice:.1f} s" + "".join(f"\n  {kind}: {text}" for kind, text in outcome.problems)
        )

    def line(self) -> str:
        return self._last

    def grow(self, pid: int, result: dict[str, int]) -> None:
        for name, more in result.items():
            self.growth[name] = max(self.growth[name], more)
            if more:
                self.problems.append(("growth", f"process {pid}: {more} more {name}"))

    def figures(self) -> dict[str, Any]:
        """Everything that must be 0."""
        kinds = Counter(kind for kind, _ in self.problems)
        return {
            **{kind: kinds[kind] for kind in BAD},
            **{f"growth of {name}": self.growth[name] for name in GROWTH},
            "names in /dev/shm": len(self.names),
        }

    @property
    def ok(self) -> bool:
        return bool(self.calls) and not any(self.figures().values())

    def json(self) -> str:
        return json.dumps(
            {
                "seed": self.seed,
                "seconds": round(self.seconds, 1),
                "rounds": self.rounds,
                "ok": self.ok,
                "calls": sum(self.calls.values()),
                "faults": sum(self.faults.values()),
                **self.figures(),
                "calls by kind": dict(sorted(self.calls.items())),
                "faults by kind": dict(sorted(self.faults.items())),
                "rounds by route": dict(sorted(self.routes.items())),
                "slowest notice in seconds": {key: round(value, 2) for key, value in sorted(self.notice.items())},
                "names": self.names,
                "problems": self.problems,
            },
            indent=1,
        )

    def table(self) -> str:
        """For people; the kinds of fault with the slowest notice on each route."""
        rows = [("seed", self.seed), ("minutes", f"{self.seconds / 60:.1f}"), ("groups", self.rounds)]
        rows += [("calls", sum(self.calls.values())), ("faults", sum(self.faults.values()))]
        for name in FAULTS:
            slowest = [f"{self.notice[k]:.1f} s {k.split()[1]}" for k in sorted(self.notice) if k.split()[0] == name]
            rows.append((f"  {name}", f"{self.faults[name]}" + (f"  (within {', '.join(slowest)})" if slowest else "")))
        figures = self.figures()
        rows += [(text, figures[kind]) for kind, text in BAD.items()]
        for name, text in GROWTH.items():
            more = self.growth[name]
            rows.append((f"growth of {text}", f"{more / MEBIBYTE:.1f}" if name == "memory" and more else more))
        rows.append(("names in /dev/shm", len(self.names)))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"{kind}: {text}" for kind, text in self.problems)])
