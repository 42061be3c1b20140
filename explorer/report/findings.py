"""Findings, the accesses of findings, and the executions that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tricomm.explorer.memory_model.source_lines import Site
from tricomm.options import Options

KINDS = {
    "race": "two conflicting accesses without an ordering",
    "scope": "an ordering or atomic whose scope does not reach the other block or GPU",
    "no_wait": "a dependent launch that never executes griddepcontrol.wait",
    "deadlock": "no task can run: each waits for another",
    "out_of_bounds": "an access outside of the kernel's memory, or to a closed symmetric handle",
    "uninitialised": "a plain read of symmetric memory that was never written",
    "wrong_result": "a result that differs from the reference, or depends on the schedule",
    "rank_mismatch": "ranks that hold different bits after the same collective",
    "leftover": "a signal that is not read, or a word that is not reset, at the end",
    "exception": "an exception, or a misaligned access",
}


REAL = "real: either one comes first, by timing alone"
REORDERED = "by reordering: a flag keeps this order, unless the hardware delays or reorders the two"
FORMAL = "formal: one warp makes both, in this order unless it diverges"
CACHED = "formal: the first one ended before the flag's kernel began; only a cache may hold an older value"
MOST_FINDINGS = 20
MOST_PATIENCE = 64
_LIMIT = 1 << 63


def checked(value: Any, kind: type, among: Container[Any] | None = None) -> Any:
    """Returns `value` of a stored report if its type is `kind` (a number must be from 0 and fit 63 bits, a text must
    have no NUL) and it is one of `among`. Raises `ValueError` otherwise."""
    fits = type(value) is kind and (among is None or value in among)
    fits = fits and (kind is not int or 0 <= value < _LIMIT) and (kind is not str or "\0" not in value)
    if not fits:
        raise ValueError(f"{value!r:.60} where {kind.__name__} of a report is expected")
    return value


@dataclass(slots=True)
class Record:
    """One access. `owner` is the rank whose memory was accessed; `block` is -1 for host code."""

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
        """A description for people, such as "release store at .sys" or "load"."""
        order = f"{self.sem} " if self.sem is not None else ""
        scope = f" at .{self.scope}" if self.scope is not None else ""
        return f"{order}{self.kind}{scope}"

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "site"}
        return {**values, "where": self.site.where, "chain": self.site.text}


def _check_event(event: dict[str, Any]) -> None:
    """Raises `ValueError` or `KeyError` if `event` is not a `Record` as JSON."""
    for name in ("step", "rank", "block", "launch", "count", "itemsize", "owner"):
        checked(event[name] if event[name] != -1 else 0, int)  # -1: host code, or memory of no rank
    for name in ("kind", "place", "where", "chain"):
        checked(event[name], str)
    for name in [name for name in ("sem", "scope") if event[name] is not None]:
        checked(event[name], str)


@dataclass(frozen=True)
class Execution:
    """All inputs of one execution besides the function. With these it can be repeated exactly.

    `choices` are the switches, (step, task). At all other steps the last task continues. `patience` is the number of
    rounds of a loop without new values after which a block is parked.
    """

    seed: int = 0
    first_epoch: int = 1
    delays: int | None = None
    fault: tuple[str, int, int] | None = None  # stop or drop, rank, step
    choices: tuple[tuple[int, str], ...] = ()
    patience: int = 1


@dataclass(frozen=True)
class Finding:
    """A problem that at least one schedule showed.

    kind      one of KINDS.
    ranks     the ranks that are involved, in the order of `where`.
    where     file:line of each rank's access, in the file of the kernel (or of the function, for host code).
    text      what happened, with blocks, addresses and values.
    advice    the ordering that is missing, and a way to establish it.
    effect    of a race: REAL, REORDERED, FORMAL or CACHED; "" if unknown.
    seed      of the schedule that showed it.
    schedule  its number in the campaign.
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
    effect: str = ""

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """A key that is the same for two findings about the same lines."""
        return self.kind, frozenset(self.where)

    def found_in(self, execution: Execution, schedule: int, events: tuple[dict[str, Any], ...]) -> Finding:
        return replace(self, seed=execution.seed, schedule=schedule, execution=execution, events=events)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Read a finding that `as_json` made. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        given = values["execution"]
        choices = tuple((checked(step, int), checked(task, str)) for step, task in given["choices"])
        fault = None
        if given["fault"] is not None:
            kind, rank, step = given["fault"]
            fault = checked(kind, str, ("stop", "drop")), checked(rank, int), checked(step, int)
        delays = None if given["delays"] is None else checked(given["delays"], int)
        numbers = {"seed": checked(given["seed"], int), "first_epoch": checked(given["first_epoch"], int)}
        patience = checked(given["patience"], int, range(1, MOST_PATIENCE + 1))
        execution = Execution(
            **{**given, **numbers, "delays": delays, "fault": fault, "choices": choices, "patience": patience}
        )
        kinds = {"ranks": int, "where": str, "accesses": dict, "events": dict}
        lists = {name: tuple(checked(v, kind) for v in checked(values[name], list)) for name, kind in kinds.items()}
        for event in lists["events"]:
            _check_event(event)
        values = {"effect": "", **values}
        plain = {name: checked(values[name], str) for name in ("text", "advice", "effect")}
        plain["kind"] = checked(values["kind"], str, KINDS)
        plain |= {name: checked(values[name], int) for name in ("seed", "schedule")}
        return cls(**{**values, **plain, **lists, "execution": execution})

    def __str__(self) -> str:
        where = " and ".join(dict.fromkeys(_short(w) for w in self.where if w != "?")) or "?"
        return f"{self.kind} at {where}: {self.text.removesuffix('.')}. {self.advice}"


def _short(where: str) -> str:
    path, _, line = where.rpartition(":")
    return f"{Path(path).name}:{line}"


@dataclass
class Outcome:
    """The outcome of an execution. `results` belong to the ranks that returned; `errors` to the ranks that raised, in
    the order in which they were raised."""

    results: dict[int, Any]
    errors: dict[int, Exception]
    findings: list[Finding]
    records: list[Record]
    choices: tuple[tuple[int, str], ...]
    steps: int
    deadlock: str | None = None


@dataclass
class Subject:
    """The function to execute: `fn(comm)` for `world_size` ranks under `options`, or `fn()` of a `program`, which uses
    torch's process groups and symmetric memory. `residency`: resident blocks of a launch; `compiled`: the architecture
    whose compiled kernels run, None for Triton's interpreter; `ends`: when its executions have to end, by the monotonic
    clock."""

    fn: Callable[..., Any]
    world_size: int
    options: Options
    residency: int | None = None
    most_steps: int = 1_000_000
    compiled: str | None = None
    program: bool = False
    ends: float = math.inf
