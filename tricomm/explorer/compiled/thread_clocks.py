"""What each thread knows of every other: vector clocks under the memory consistency model of PTX.

A clock is a row of a matrix, threads by threads. Numbers in brackets are sections of the PTX ISA manual.

  program order (8.9.1)         of one thread; two lanes of a warp have none
  barriers (8.9.4)              `bar.sync`, `bar.red`, `bar.arrive`, `bar.warp.sync`: of the threads that take part
  release patterns (8.8)        a release; a fence, then a strong write; a release, then a strong write to the same word
  acquire patterns (8.8)        an acquire; a strong read, then a fence
  observation order (8.9.2)     the strong read takes its value from the strong write, or from a read-modify-write
                                that continues it, each two of them morally strong
  morally strong (8.7)          both scopes include the other's thread
  Fence-SC order (8.9.3)        a `fence.sc` before a later one
  the CUDA API                  a launch begins behind the end of what its stream did before. The end of a launch is
                                a fence of the whole system, so a relaxed write hands on what earlier launches did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricomm.errors import InvalidArgument

MOST_THREADS = 4096
Array = NDArray[Any]
SCOPES = {"cta": 1, "cluster": 1, "gpu": 2, "sys": 3}  # a cluster is taken for a block: never more than it is
CTA, GPU, SYS = 1, 2, 3
_FIRST_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """What a release pattern hands on: the clock `known` of thread `slot` at its first operation, whose scope it is."""

    slot: int
    rank: int
    block: int
    scope: int
    time: int
    known: Array
    sem: str = "release"


@dataclass(frozen=True, slots=True)
class Message:
    """What a strong write carries. `rank`, `block` and `scope` are of the last write of the chain."""

    rank: int
    block: int
    scope: int
    parts: tuple[Part, ...]


@dataclass(eq=False, slots=True)
class Team:
    """The threads of one running block, or one actor of the host: their slots, and what they share."""

    number: int
    rank: int
    slots: Array
    birth: tuple[Part, ...] = ()
    seen: dict[tuple[int, int, bytes], tuple[int, int, Array]] = field(default_factory=dict)
    joined: set[tuple[int, int, bytes]] = field(default_factory=set)
    gathered: dict[int, tuple[int, Array | None]] = field(default_factory=dict)  # by barrier: its phase, who came
    opened: dict[tuple[int, int], Array] = field(default_factory=dict)
    came: dict[tuple[int, int], int] = field(default_factory=dict)


def includes(scope: int | Array, rank: Any, block: Any, other_rank: Any, other_block: Any) -> Any:
    """True if `scope`, of a thread of `rank` and `block`, includes the other thread."""
    return (scope >= SYS) | ((scope >= GPU) & (rank == other_rank)) | (block == other_block)


class Clocks:
    """All threads of an execution. Slot 0 is nobody: what nobody has written is known to all."""

    def __init__(self) -> None:
        size = _FIRST_SLOTS
        self.now = np.zeros((size, size), np.int32)
        self.rank = np.full(size, -1, np.int32)
        self.block = np.full(size, -1, np.int32)
        self.thread = np.full(size, -1, np.int32)  # its number in its block; -1 for host code
        self.messages: list[Message | None] = [None]
        self._fenced: dict[int, Part] = {}
        self._cached: dict[tuple[int, int, int], int] = {}
        self._sc: dict[tuple[int, int, int], Array] = {}
        self._used, self._teams = 1, 0
        self._free: list[Array] = []

    @property
    def size(self) -> int:
        return len(self.rank)

    # Teams

    def team(self, rank: int, threads: int, known: Array | None = None, host: bool = False) -> Team:
        """`threads` new threads of one block, which begin with what `known` (a row) knows."""
        slots = self._slots(threads, known)
        self._teams += 1
        team = Team(self._teams, rank, slots)
        self.rank[slots], self.block[slots] = rank, team.number
        self.thread[slots] = -1 if host else np.arange(threads)
        own = self.now[slots, slots]
        if known is not None:
            self.now[slots] = self.fitted(known)
            birth = self.fitted(known).copy()
            team.birth = (Part(0, rank, team.number, SYS, 0, birth, "relaxed"),)
        self.now[slots, slots] = own + 1
        return team

    def end(self, team: Team) -> Array:
        """What is known when all its threads have ended. Their slots may be used again by whoever knows of that."""
        known: Array = self.now[team.slots].max(axis=0)
        self.now[team.slots, team.slots] += 1
        for slot in team.slots.tolist():
            self._fenced.pop(slot, None)
        self._free.append(team.slots)
        return known

    def row(self, slot: int) -> Array:
        """What a thread knows now, handed to somebody: what it does from here on is not part of it."""
        known = self.now[slot].copy()
        self.now[slot, slot] += 1
        return known

    def learn(self, slot: int, known: Array) -> None:
        np.maximum(self.now[slot], self.fitted(known), out=self.now[slot])

    def fitted(self, known: Array) -> Array:
        """A row of earlier times, as long as rows are now."""
        missing = self.size - len(known)
        return known if missing <= 0 else np.pad(known, (0, missing))

    def _slots(self, threads: int, known: Array | None) -> Array:
        """Unused ones, or those of threads whose last accesses `known` knows."""
        if known is not None:
            known = self.fitted(known)
            for n, free in enumerate(self._free):
                if len(free) == threads and (known[free] >= self.now[free, free] - 1).all():
                    return self._free.pop(n)
        if self._used + threads > MOST_THREADS:
            raise InvalidArgument(
                f"{self._used - 1 + threads} threads: the clocks of at most {MOST_THREADS} are kept; take fewer ranks, "
                "blocks or warps"
            )
        while self._used + threads > self.size:
            self._widen()
        slots = np.arange(self._used, self._used + threads)
        self._used += threads
        return slots

    def _widen(self) -> None:
        size = 2 * self.size
        self.now = np.pad(self.now, ((0, size - self.size), (0, size - self.size)))
        self.rank = np.pad(self.rank, (0, size - len(self.rank)), constant_values=-1)
        self.block = np.pad(self.block, (0, size - len(self.block)), constant_values=-1)
        self.thread = np.pad(self.thread, (0, size - len(self.thread)), constant_values=-1)

    # Order within a block

    def arrive(self, team: Team, barrier: int, slots: Array) -> None:
        """These threads have come to a barrier of their block."""
        phase, known = team.gathered.get(barrier, (0, None))
        mine = self.now[slots].max(axis=0)
        team.gathered[barrier] = phase, mine if known is None else np.maximum(self.fitted(known), mine)
        for slot in slots.tolist():
            team.came[barrier, slot] = phase
        self.now[slots, slots] += 1

    def leave(self, team: Team, barrier: int, slots: Array) -> None:
        """They go on: each knows what all knew that came."""
        phase, known = team.gathered.get(barrier, (0, None))
        mine = team.came.get((barrier, int(slots[0])), phase)
        if mine == phase and known is not None:
            team.opened[barrier, phase] = known
            team.opened.pop((barrier, phase - 2), None)
            team.gathered[barrier] = phase + 1, None
        found = team.opened.get((barrier, mine))
        if found is not None:
            self.now[slots] = np.maximum(self.now[slots], self.fitted(found))

    def meet(self, slots: Array) -> None:
        """`bar.warp.sync`."""
        known = self.now[slots].max(axis=0)
        own = self.now[slots, slots] + 1
        self.now[slots] = np.maximum(self.now[slots], known)
        self.now[slots, slots] = own

    # Order through memory

    def fence(self, team: Team, slots: Array, scope: int, sc: bool) -> None:
        """Ends acquire patterns, begins release patterns."""
        chosen = set(slots.tolist())
        for number, ends, seers in list(team.seen.values()):
            mine = seers[[s in chosen for s in seers.tolist()]]
            if len(mine):
                self._join(mine, number, ends, scope)
        if sc:
            self._fence_sc(team, slots, scope)
        for slot in slots.tolist():
            time = int(self.now[slot, slot])
            self._fenced[slot] = Part(slot, team.rank, team.number, scope, time, self.now[slot].copy(), "fence")
        self.now[slots, slots] += 1

    def _fence_sc(self, team: Team, slots: Array, scope: int) -> None:
        for (rank, block, other), known in self._sc.items():
            both = includes(other, rank, block, team.rank, team.number) and includes(
                scope, team.rank, team.number, rank, block
            )
            if both:
                self.now[slots] = np.maximum(self.now[slots], self.fitted(known))
        key = (team.rank, team.number, scope)
        known, before = self.now[slots].max(axis=0), self._sc.get(key)
        self._sc[key] = known if before is None else np.maximum(self.fitted(before), known)

    def publish(self, team: Team, slot: int, sem: str, scope: int, continues: Sequence[int] = ()) -> int:
        """The number of the message of a strong write; it goes on with those of `continues`: what a read-modify-write
        has read, or this thread's own release to the same word."""
        releases = sem in ("release", "acq_rel")
        fence = self._fenced.get(slot)
        more = tuple(part for number in continues for part in self._handed_on(number, team, scope))
        if not (releases or fence or more):
            key = (team.number, scope, -1)
            if key not in self._cached:
                self._cached[key] = self._message(team, scope, team.birth)
            return self._cached[key]
        parts = list(team.birth)
        if fence is not None:
            parts = [fence]
        if releases:
            time = int(self.now[slot, slot])
            parts.append(Part(slot, team.rank, team.number, scope, time, self.now[slot].copy()))
            self.now[slot, slot] += 1
        return self._message(team, scope, _merged((*more, *parts)))

    def _handed_on(self, number: int, team: Team, scope: int) -> tuple[Part, ...]:
        message = self.messages[number]
        if message is None:
            return ()
        both = includes(message.scope, message.rank, message.block, team.rank, team.number) and includes(
            scope, team.rank, team.number, message.rank, message.block
        )
        return message.parts if both else ()

    def _message(self, team: Team, scope: int, parts: tuple[Part, ...]) -> int:
        self.messages.append(Message(team.rank, team.number, scope, parts))
        return len(self.messages) - 1

    def observe(self, team: Team, slots: Array, numbers: Array, sem: str, scope: int) -> None:
        """Strong reads by `slots` have taken their values from the writes of the messages `numbers`."""
        for number in np.unique(numbers).tolist():
            message = self.messages[number]
            if message is None or not message.parts:
                continue
            readers = np.unique(slots[numbers == number])
            key = (number, scope, readers.tobytes())
            if sem in ("acquire", "acq_rel"):
                if key not in team.joined:
                    team.joined.add(key)
                    self._join(readers, number, scope, scope)
            elif message.block != team.number or len(message.parts) > 1:
                team.seen.setdefault(key, (number, scope, readers))

    def _join(self, readers: Array, number: int, scope: int, last: int) -> None:
        """`scope` is that of the read, `last` that of the last operation of the acquire pattern."""
        message = self.messages[number]
        assert message is not None
        rank, block = int(self.rank[readers[0]]), int(self.block[readers[0]])
        if not (
            includes(message.scope, message.rank, message.block, rank, block)
            and includes(scope, rank, block, message.rank, message.block)
        ):
            return
        for part in message.parts:
            both = includes(part.scope, part.rank, part.block, rank, block) and includes(
                last, rank, block, part.rank, part.block
            )
            if not both:
                continue
            # Whoever knows a release knows all that was released with it.
            late = readers if part.slot == 0 else readers[self.now[readers, part.slot] < part.time]
            if len(late):
                self.now[late] = np.maximum(self.now[late], self.fitted(part.known))


def _merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Without those that a later one of the same thread and scope stands for."""
    last: dict[tuple[int, int, int], Part] = {}
    for part in parts:
        before = last.get((part.slot, part.block, part.scope))
        if before is None or before.time <= part.time:
            last[part.slot, part.block, part.scope] = part
    return tuple(last.values())
