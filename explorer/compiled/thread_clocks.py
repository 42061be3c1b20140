"""Vector clocks of all threads, under the memory consistency model of PTX.

A clock has two times for each thread: the thread's accesses up to the first time happen before this moment, and those
up to the second do so through an alias fence. After a barrier of the whole block, its threads share one clock. A thread
that acquires something later gets a separate clock, or shares one with threads that have acquired the same. A clock
needs no entry for the thread's own time. Numbers in brackets are sections of the PTX ISA manual.

  program order (8.9.1)         of one thread; two lanes of a warp have none
  barriers (8.9.4)              `bar.sync`, `bar.red`, `bar.arrive`, `bar.warp.sync`: order the threads that take part
  release patterns (8.8)        a release; a fence, then a strong write; a release, then a strong write to the same word
  acquire patterns (8.8)        an acquire; a strong read, then a fence
  observation order (8.9.2)     the strong read takes its value from the strong write, or from a read-modify-write
                                that continues it, each two of them morally strong
  morally strong (8.7)          both scopes include the other's thread
  Fence-SC order (8.9.3)        a `fence.sc` before a later one
  proxies (8.9.5)               accesses by a plain and by a multicast address are ordered through a `fence.proxy.alias`
  the CUDA API                  a launch begins after the end of earlier work of its stream. The end of a launch is
                                a system fence and an alias fence. So a reader of a relaxed write is ordered after
                                earlier launches of the writer, and later launches after a write read by a relaxed read.
                                `griddepcontrol.wait` (9.7.13.13) is such a begin for its threads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.thread_teams import BarrierRounds, FlagMessage, ReleasePart, Team
from tricomm.explorer.memory_model.clocks import longer

MOST_THREADS = 16384
Array = NDArray[Any]
SCOPES = {"cta": 1, "cluster": 1, "gpu": 2, "sys": 3}  # a cluster counts as one block: never overestimated
CTA, GPU, SYS = 1, 2, 3
_FIRST_SLOTS = 256


def distinct(values: Array) -> list[int]:
    """The distinct values. Fast if all are equal, which is the usual case."""
    first = values[0]
    return [int(first)] if (values == first).all() else np.unique(values).tolist()


def includes(scope: int | Array, rank: Any, block: Any, other_rank: Any, other_block: Any) -> Any:
    """True if the scope `scope` of a thread of `rank` and `block` includes the other thread."""
    return (scope >= SYS) | ((scope >= GPU) & (rank == other_rank)) | (block == other_block)


def both_include(scopes: tuple[int, int], one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if the scopes of two threads include each other. Each thread is (rank, block)."""
    return bool(includes(scopes[0], *one, *other) and includes(scopes[1], *other, *one))


class Clocks:
    """The clocks of all threads of an execution. Slot 0 stands for initial values, which all threads know."""

    def __init__(self) -> None:
        size = _FIRST_SLOTS
        self.time = np.zeros(size, np.int32)
        self.rank = np.full(size, -1, np.int32)
        self.block = np.full(size, -1, np.int32)
        self.thread = np.full(size, -1, np.int32)  # the thread's number in its block; -1 for host code
        self._fenced_aliases = np.zeros(size, np.int32)  # the thread's time at its last alias fence
        self.switched = False  # true from the first access by a multicast address on
        self.messages: list[FlagMessage | None] = [None]
        self._fenced: dict[int, ReleasePart] = {}
        # by team, scope, birth: the message of a write that releases nothing
        self._plain: dict[tuple[int, int, bool], int] = {}
        self._sc: dict[tuple[int, int, int], Array] = {}
        self._used, self._teams = 1, 0
        self._free: list[Array] = []

    @property
    def size(self) -> int:
        return len(self.time)

    # Queries

    def known(self, team: Team, slots: Array, others: Array, apart: Array | None = None) -> Array:
        """For each n, the latest time of thread `others[n]` that thread `slots[n]` of the team knows. If `apart[n]`,
        only what it knows through an alias fence counts."""
        if apart is not None and apart.any():
            return np.where(apart, self._known(team, slots, others, 1), self._known(team, slots, others, 0))
        return self._known(team, slots, others, 0)

    def _known(self, team: Team, slots: Array, others: Array, half: int) -> Array:
        times: Array = self._row(team, 0)[half][others]
        rows = team.row_of[team.local(slots)]
        if rows.any():
            for row in distinct(rows[rows > 0]):
                mine = rows == row
                times[mine] = self._row(team, row)[half][others[mine]]
        own = np.maximum(times, self._fenced_aliases[slots]) if half else self.time[slots]
        return np.where(slots == others, own, times)

    def known_of_all(self, team: Team, slots: Array, apart: Array | None = None) -> Array:
        """As `known`, but with a row for each thread of `slots`, which has the time of every other thread. So `apart`
        is two-dimensional."""
        known = self._known_of_all(team, slots, 0)
        return known if apart is None else np.where(apart, self._known_of_all(team, slots, 1), known)

    def _known_of_all(self, team: Team, slots: Array, half: int) -> Array:
        rows, each = team.row_of[team.local(slots)], np.arange(len(slots))
        times = np.stack([self._row(team, row)[half] for row in range(len(team.rows))])[rows]
        times[each, slots] = np.maximum(times[each, slots], (self._fenced_aliases if half else self.time)[slots])
        return times

    def order(self, team: Team, slot: int, other: int, time: int) -> bool:
        """True if the thread knows the time `time` of the other one, through an alias fence or not."""
        ordered: bool = self.known(team, np.array([slot]), np.array([other]))[0] >= time
        return ordered

    def released_by_launch(self, team: int, slot: int, time: int) -> bool:
        """True if the time `time` of a thread is before the launch of team number `team`. The team's writes then
        release it."""
        messages = (message for message in self.messages if message is not None and message.block == team)
        parts = (part for message in messages for part in message.parts if part.slot == 0)
        return any(slot < part.known.shape[1] and part.known[0, slot] >= time for part in parts)

    def row(self, team: Team, thread: int = 0) -> Array:
        """A copy of a thread's clock. The thread's time advances, so the copy does not cover its later accesses."""
        slot = team.slots[thread]
        known = self._row(team, int(team.row_of[thread])).copy()
        known[:, slot] = self.time[slot], max(known[1, slot], self._fenced_aliases[slot])
        self.time[slot] += 1
        return known

    def learn(self, team: Team, threads: Array, known: Array) -> None:
        known = self._fitted(known)
        if len(threads) == len(team.slots) == 1:
            row = int(team.row_of[0])
            team.rows[row] = np.maximum(self._row(team, row), known)
            return
        rows = team.row_of[threads]
        for row in distinct(rows):
            team.rows.append(np.maximum(self._row(team, row), known))
            team.row_of[threads[rows == row]] = len(team.rows) - 1

    def _row(self, team: Team, row: int) -> Array:
        """The row, extended to the present number of slots."""
        if team.rows[row].shape[1] < self.size:
            team.rows[row] = self._fitted(team.rows[row])
        return team.rows[row]

    def _fitted(self, known: Array) -> Array:
        return longer(known, self.size)

    def _highest(self, team: Team, slots: Array) -> Array:
        """The join of these threads' clocks."""
        rows = [self._row(team, row) for row in distinct(team.row_of[team.local(slots)])]
        known: Array = rows[0].copy() if len(rows) == 1 else np.max(rows, axis=0)
        known[0, slots] = self.time[slots]
        known[1, slots] = np.maximum(known[1, slots], self._fenced_aliases[slots])
        return known

    # Teams

    def team(self, rank: int, threads: int, known: Array | None = None, host: bool = False) -> Team:
        """`threads` new threads of one block, whose clocks begin as `known` (a row)."""
        slots = self._slots(threads, known)
        self._teams += 1
        known = np.zeros((2, self.size), np.int32) if known is None else _behind_alias_fence(self._fitted(known))
        team = Team(self._teams, rank, slots, [known], np.zeros(threads, np.int32), threads)
        if not host:
            team.birth = (ReleasePart(0, rank, team.number, SYS, 0, known.copy()),)
        self.rank[slots], self.block[slots] = rank, team.number
        self.thread[slots] = -1 if host else np.arange(threads)
        self._fenced_aliases[slots] = self.time[slots]
        self.time[slots] += 1
        return team

    def begin_again(self, team: Team, threads: Array, known: Array) -> None:
        """`griddepcontrol.wait`: from now on, these threads count as if they had begun after `known` (a row)."""
        if team.waited is None:
            team.waited = np.zeros(len(team.slots), bool)
            earlier = [self._fitted(part.known) for part in team.birth]
            known = np.max([_behind_alias_fence(self._fitted(known)), *earlier], axis=0)
            team.reborn = (ReleasePart(0, team.rank, team.number, SYS, 0, known),)
        self.learn(team, threads, team.reborn[0].known)
        team.waited[threads] = True

    def leave(self, team: Team, slots: Array) -> None:
        """Threads of the team have ended."""
        team.present -= len(slots)

    def end(self, team: Team) -> Array:
        """End a team: the join of the clocks of its threads. Threads whose clocks include this end may reuse the
        slots."""
        self._end_acquires(team, team.slots, SYS)
        known = self._highest(team, team.slots)
        self.time[team.slots] += 1
        for slot in team.slots.tolist():
            self._fenced.pop(slot, None)
        self._free.append(team.slots)
        return _behind_alias_fence(known)

    def _slots(self, threads: int, known: Array | None) -> Array:
        """Unused slots, or those of ended threads whose last accesses happen before `known`."""
        if known is not None:
            known = self._fitted(known)
            for n, free in enumerate(self._free):
                if len(free) == threads and (known[0, free] >= self.time[free] - 1).all():
                    return self._free.pop(n)
        if self._used + threads > MOST_THREADS:
            raise InvalidArgument(
                f"{self._used - 1 + threads} threads: the clocks of at most {MOST_THREADS} are kept; take fewer ranks, "
                "blocks or warps"
            )
        while self._used + threads > self.size:
            missing = self.size
            self.time, self._fenced_aliases = (
                np.pad(values, (0, missing)) for values in (self.time, self._fenced_aliases)
            )
            self.rank, self.block, self.thread = (
                np.pad(values, (0, missing), constant_values=-1) for values in (self.rank, self.block, self.thread)
            )
        slots = np.arange(self._used, self._used + threads)
        self._used += threads
        return slots

    # Order within a block

    def arrive(self, team: Team, barrier: int, slots: Array, waits: bool = True) -> None:
        """These threads have arrived at a barrier of their block; `waits` is False for `bar.arrive`."""
        gathering = team.barriers.setdefault(barrier, BarrierRounds())
        mine = self._highest(team, slots)
        before = gathering.known
        gathering.known = mine if before is None else np.maximum(self._fitted(before), mine)
        gathering.waiting += len(slots) if waits else 0
        gathering.came[int(slots[0])] = gathering.phase
        self.time[slots] += 1

    def go_on(self, team: Team, barrier: int, slots: Array) -> None:
        """These threads leave the barrier. Each now knows what all threads knew when they arrived."""
        gathering = team.barriers.setdefault(barrier, BarrierRounds())
        mine = gathering.came.get(int(slots[0]), gathering.phase)
        if mine == gathering.phase and gathering.known is not None:
            whole = gathering.waiting == team.present
            gathering.opened[mine] = gathering.known, whole
            gathering.opened.pop(mine - 2, None)
            if whole:  # the others are at this barrier and do nothing before they leave it
                team.rows, team.row_of = [gathering.known], np.zeros_like(team.row_of)
            gathering.phase, gathering.known, gathering.waiting = mine + 1, None, 0
        known, whole = gathering.opened.get(mine, (None, True))
        if known is not None and not whole:
            self.learn(team, team.local(slots), known)

    def meet(self, team: Team, slots: Array) -> None:
        """`bar.warp.sync`."""
        known = self._highest(team, slots)
        self.time[slots] += 1
        self.learn(team, team.local(slots), known)

    # Order through memory

    def fence_aliases(self, team: Team, slots: Array) -> None:
        """An alias fence by these threads: from now on they know through an alias fence all that they know."""
        threads = team.local(slots)
        rows = team.row_of[threads]
        for row in distinct(rows):
            known = self._row(team, row)
            if (known[0] != known[1]).any():
                team.rows.append(_behind_alias_fence(known))
                team.row_of[threads[rows == row]] = len(team.rows) - 1
        self._fenced_aliases[slots] = self.time[slots]
        self.time[slots] += 1

    def fence(self, team: Team, slots: Array, scope: int, sc: bool) -> None:
        """A fence ends acquire patterns and begins release patterns."""
        self._end_acquires(team, slots, scope)
        if sc:
            self._fence_sc(team, slots, scope)
        for slot in slots.tolist():
            time = int(self.time[slot])
            known = self.row(team, int(slot - team.slots[0]))
            self._fenced[slot] = ReleasePart(slot, team.rank, team.number, scope, time, known)

    def _end_acquires(self, team: Team, slots: Array, scope: int) -> None:
        for number, ends, seers in list(team.seen.values()):
            mine = seers[np.isin(seers, slots)]
            if len(mine):
                self._join(team, mine, number, ends, scope)

    def _fence_sc(self, team: Team, slots: Array, scope: int) -> None:
        for (rank, block, other), known in self._sc.items():
            if both_include((other, scope), (rank, block), (team.rank, team.number)):
                self.learn(team, team.local(slots), known)
        key = (team.rank, team.number, scope)
        known, before = self._highest(team, slots), self._sc.get(key)
        self._sc[key] = known if before is None else np.maximum(self._fitted(before), known)

    def plain(self, team: Team, slots: Array, scope: int) -> int:
        """The message of a strong write that releases only the accesses of earlier launches."""
        born = team.born(slots)
        key = (team.number, scope, born is team.reborn)
        if key not in self._plain:
            self._plain[key] = self._message(team, scope, born)
        return self._plain[key]

    def publish(self, team: Team, slot: int, sem: str, scope: int, continues: Sequence[int] = ()) -> int:
        """The number of the message of a strong write. The message continues the messages `continues`: those that a
        read-modify-write has read, or this thread's own release to the same word."""
        fence = self._fenced.get(slot)
        parts = [part for number in continues for part in self._handed_on(number, team, scope)]
        born = team.born(np.array([slot]))
        parts += born if fence is None else (fence,)
        if sem in ("release", "acq_rel"):
            time = int(self.time[slot])
            parts.append(
                ReleasePart(slot, team.rank, team.number, scope, time, self.row(team, int(slot - team.slots[0])))
            )
        elif fence is None and len(parts) == len(born):
            return self.plain(team, np.array([slot]), scope)
        return self._message(team, scope, _merged(parts))

    def _handed_on(self, number: int, team: Team, scope: int) -> tuple[ReleasePart, ...]:
        message = self.messages[number]
        if message is None:
            return ()
        both = both_include((message.scope, scope), (message.rank, message.block), (team.rank, team.number))
        return message.parts if both else ()

    def _message(self, team: Team, scope: int, parts: tuple[ReleasePart, ...]) -> int:
        self.messages.append(FlagMessage(team.rank, team.number, scope, parts))
        return len(self.messages) - 1

    def has_fenced(self, slots: Array) -> bool:
        return bool(self._fenced) and any(slot in self._fenced for slot in slots.tolist())

    def observe(self, team: Team, slots: Array, numbers: Array, sem: str, scope: int) -> None:
        """Strong reads by `slots` have taken their values from the writes of the messages `numbers`."""
        for number in distinct(numbers):
            message = self.messages[number]
            if message is None or not message.parts:
                continue
            readers = np.unique(slots[numbers == number])
            key = (number, scope, readers.tobytes())
            if sem in ("acquire", "acq_rel"):
                if key not in team.joined:
                    team.joined.add(key)
                    self._join(team, readers, number, scope, scope)
            elif message.block != team.number or len(message.parts) > 1:
                team.seen.setdefault(key, (number, scope, readers))

    def _join(self, team: Team, readers: Array, number: int, scope: int, last: int) -> None:
        """`scope` is the scope of the read, `last` the scope of the acquire pattern's last operation."""
        message = self.messages[number]
        assert message is not None
        reader = team.rank, team.number
        if not both_include((message.scope, scope), (message.rank, message.block), reader):
            return
        for part in message.parts:
            if not both_include((part.scope, last), (part.rank, part.block), reader):
                continue
            # A reader whose clock includes a release also has everything that was released with it.
            late = readers
            if part.slot:
                late = readers[self.known(team, readers, np.full(len(readers), part.slot)) < part.time]
            if len(late):
                self.learn(team, team.local(late), part.known)


def _behind_alias_fence(row: Array) -> Array:
    return np.stack([row[0], row[0]])


def _merged(parts: Sequence[ReleasePart]) -> tuple[ReleasePart, ...]:
    """The latest part of each thread and scope, which covers the earlier ones."""
    last: dict[tuple[int, int, int], ReleasePart] = {}
    for part in parts:
        before = last.get((part.slot, part.block, part.scope))
        if before is None or before.time <= part.time:
            last[part.slot, part.block, part.scope] = part
    return tuple(last.values())
