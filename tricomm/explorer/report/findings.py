"""Findings, the accesses that they are about, and the executions that show them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tricomm.explorer.memory_model.source_lines import Site

KINDS = (
    "race", "scope", "deadlock", "out_of_bounds", "uninitialised", "wrong_result", "rank_mismatch", "leftover",
    "exception",
)  # fmt: skip


@dataclass(slots=True)
class Record:
    """One access that was made. `owner` is the rank whose memory it went to; `block` is -1 for host code."""

    step: int
    rank: int
    block: int
    launch: int
    kind: str
    sem: str | None
    scope: str | None
    site: Site
    place: str
    count: int
    itemsize: int
    owner: int

    @property
    def who(self) -> str:
        return f"rank {self.rank}, " + ("host code" if self.block < 0 else f"block {self.block}")

    @property
    def what(self) -> str:
        """For people: "release store at .sys", "load"."""
        order = f"{self.sem} " if self.sem is not None else ""
        scope = f" at .{self.scope}" if self.scope is not None else ""
        return f"{order}{self.kind}{scope}"

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "site"}
        return {**values, "where": self.site.where, "chain": self.site.text}


@dataclass(frozen=True)
class Execution:
    """All inputs of one execution besides the function: enough to repeat it exactly.

    `choices` are the switches, (step, task); at other steps the last task continues. `patience` is the number of rounds
    of a loop without new values after which a block is parked.
    """

    seed: int = 0
    first_epoch: int = 1
    delays: int | None = None
    fault: tuple[str, int, int] | None = None  # stop or drop, rank, step
    choices: tuple[tuple[int, str], ...] = ()
    patience: int = 1


@dataclass(frozen=True)
class Finding:
    """Something wrong that at least one schedule showed.

    kind      race, scope, deadlock, out_of_bounds, uninitialised, wrong_result, rank_mismatch, leftover or exception
    ranks     the ranks that are involved, in the order of `where`
    where     file:line of each, in the file of the kernel (or of the function, for host code)
    text      what happened, with blocks, addresses and values
    advice    which ordering is missing and what would give it
    seed      of the schedule that showed it
    schedule  its number in the campaign
    """

    kind: str
    ranks: tuple[int, ...]
    where: tuple[str, ...]
    text: str
    advice: str
    seed: int = 0
    schedule: int = 0
    execution: Execution = Execution()
    accesses: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """The same for two findings about the same lines."""
        return self.kind, frozenset(self.where)

    def found_in(self, execution: Execution, schedule: int, events: tuple[dict[str, Any], ...]) -> Finding:
        return replace(self, seed=execution.seed, schedule=schedule, execution=execution, events=events)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        execution = dict(values["execution"])
        execution["choices"] = tuple((int(s), str(t)) for s, t in execution["choices"])
        if execution["fault"] is not None:
            kind, rank, step = execution["fault"]
            if kind not in ("stop", "drop") or not isinstance(rank, int) or not isinstance(step, int):
                raise ValueError(f"fault {execution['fault']!r}")
            execution["fault"] = kind, rank, step
        lists = {n: tuple(values[n]) for n in ("ranks", "where", "accesses", "events")}
        return cls(**{**values, **lists, "execution": Execution(**execution)})

    def __str__(self) -> str:
        where = " and ".join(dict.fromkeys(_short(w) for w in self.where if w != "?")) or "?"
        return f"{self.kind} at {where}: {self.text.removesuffix('.')}. {self.advice}"


def _short(where: str) -> str:
    path, _, line = where.rpartition(":")
    return f"{Path(path).name}:{line}"
