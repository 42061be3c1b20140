"""Vector clocks for happens-before, on four levels of strictness.

    STRICT   the order by the rules below, with scopes and block barriers (`tl.debug_barrier`).
    THREAD   as STRICT, as if a block were one thread.
    ANY      as THREAD, whatever the scopes.
    SEEN     every message that a strong read has read counts, ordered or not.

Only STRICT decides whether two accesses race. The other levels tell which ordering is missing: it is the one that the
first level at which the two accesses are ordered does not ask for.

Rules (the PTX memory model, as "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS'19) has it, and
scopes as in HRF (ASPLOS'14)):
  program order within a block; end of a launch -> next launch of the rank; the ranks' exchanges on the host.
  release -> acquire that reads it, or reads a read-modify-write that continues it, if both scopes are wide enough.
  A block barrier between a flag and the accesses of the block's other threads.
  A launch begins after the end of the previous one, which is a system fence: even a relaxed flag publishes what its
  rank did in earlier launches.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricomm.explorer.memory_model.source_lines import Site

STRICT, THREAD, ANY, SEEN = range(4)
ACQUIRES = ("acquire", "acq_rel")
# time steps for releases between two block barriers; releases beyond this number share the last step
_RELEASES = 1 << 10
Clock = NDArray[Any]


def longer(row: Clock, size: int) -> Clock:
    """`row`, padded with zeros to `size` entries. `np.pad` would take ten times as long."""
    missing = size - row.shape[-1]
    return row if missing <= 0 else np.concatenate([row, np.zeros((*row.shape[:-1], missing), row.dtype)], axis=-1)


@dataclass(slots=True)
class Part:
    """The part of a message that one thread has published."""

    slot: int
    rank: int
    block: object
    scope: str
    sem: str
    site: Site
    strict: Clock
    thread: Clock

    def reaches(self, rank: int, block: object, scope: str) -> bool:
        """True if the flag's scope and the reader's both include writer and reader."""
        return _includes(self.scope, self, rank, block) and _includes(scope, self, rank, block)


def _includes(scope: str, part: Part, rank: int, block: object) -> bool:
    return scope == "sys" or part.block is block or (scope == "gpu" and part.rank == rank)


@dataclass(slots=True)
class Message:
    """The message of a release, with the parts of other releases that a read-modify-write continues."""

    parts: list[Part]
    any: Clock
    seen: Clock


@dataclass(slots=True)
class Joined:
    """One read of a flag. It is kept to explain later why it did not order two accesses."""

    site: Site
    sem: str
    scope: str
    parts: list[Part]
    seen: Clock


@dataclass(eq=False)
class Thread:
    """The vector clocks of one block, or of one rank's host code. `slot` is its index in every clock."""

    slot: int
    rank: int
    now: Clock
    block: object = None
    joins: list[Joined] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block = self if self.block is None else self.block
        self.begin(self.now)

    def begin(self, known: Clock) -> None:
        """Start a launch with the clock `known`, and without pending acquires."""
        own = self.now[STRICT, self.slot]
        self.now = np.maximum(self.now, known)
        self.now[:, self.slot] = own + 1
        self.birth = self.now.copy()
        self.pending = np.zeros_like(self.now[STRICT])
        self.joins.clear()
        self._fence()

    def frozen(self) -> Thread:
        """A copy of the present state, for a store that reaches memory later."""
        now = copy(self)
        now.now, now.pending, now.joins = self.now.copy(), self.pending.copy(), list(self.joins)
        return now

    @property
    def time(self) -> int:
        return int(self.now[STRICT, self.slot])

    def tick(self) -> None:
        self.now[:, self.slot] += 1

    def barrier(self) -> None:
        """A block barrier: from now on, all threads have one thread's earlier acquires, and one thread's release covers
        what all did before."""
        np.maximum(self.now[STRICT], self.pending, out=self.now[STRICT])
        self._fence()

    def _fence(self) -> None:
        self.fenced, self._releases = self.now[STRICT].copy(), 0
        self.now[:, self.slot] += _RELEASES

    @property
    def known_by_release(self) -> Clock:
        """The clock that the next release publishes (STRICT), including the release itself.

        The releasing thread does not wait for what the others have done since the last block barrier. So the time of
        its release is after the barrier and before the time of their accesses.
        """
        known: Clock = self.fenced.copy()
        known[self.slot] += min(self._releases + 1, _RELEASES - 1)
        return known

    @property
    def known_to_block(self) -> Clock:
        """The clock that orders LL words. The block reduces over the values that its lanes have acquired, which acts as
        a block barrier after these acquires. Nothing acts as a barrier before a release."""
        known: Clock = np.maximum(self.now[STRICT], self.pending)
        return known

    def finish(self) -> Clock:
        """End the launch: the clock at its end, which joins all threads of the block."""
        self.barrier()
        return self.now

    def publish(self, sem: str, scope: str, site: Site, before: Message | None) -> Message:
        """The message of a strong write; `before` is the message that a read-modify-write continues."""
        releases = sem in ("release", "acq_rel")
        source = self.now if releases else self.birth
        strict = self.known_by_release if releases else self.birth[STRICT].copy()
        part = Part(self.slot, self.rank, self.block, scope, sem, site, strict, source[THREAD].copy())
        message = Message([part], source[ANY].copy(), self.now[SEEN].copy())
        self.tick()
        self._releases += releases
        if before is not None:
            message.parts = _merged(before.parts, part)
            np.maximum(message.any, before.any, out=message.any)
            np.maximum(message.seen, before.seen, out=message.seen)
        return message

    def observe(self, message: Message, sem: str, scope: str, site: Site) -> None:
        """A strong read has read `message`."""
        if sem in ACQUIRES:
            for part in self._reached(message, scope):
                np.maximum(self.pending, part.strict, out=self.pending)
                np.maximum(self.now[THREAD], part.thread, out=self.now[THREAD])
            np.maximum(self.now[ANY], message.any, out=self.now[ANY])
        np.maximum(self.now[SEEN], message.seen, out=self.now[SEEN])
        if not self.joins or self.joins[-1].parts is not message.parts:
            self.joins.append(Joined(site, sem, scope, message.parts, message.seen))

    def told(self, message: Message, scope: str) -> Clock:
        """The clock of the acquiring thread, before a block barrier passes it on to the others (STRICT)."""
        known: Clock = self.now[STRICT].copy()
        for part in self._reached(message, scope):
            np.maximum(known, part.strict, out=known)
        return known

    def _reached(self, message: Message, scope: str) -> list[Part]:
        return [part for part in message.parts if part.reaches(self.rank, self.block, scope)]


def _merged(parts: list[Part], new: Part) -> list[Part]:
    """`parts` and `new`, which takes in earlier releases of the same thread and scope."""
    kept = []
    for part in parts:
        if part.slot == new.slot and part.scope == new.scope:
            np.maximum(new.strict, part.strict, out=new.strict)
            np.maximum(new.thread, part.thread, out=new.thread)
        else:
            kept.append(part)
    return [*kept, new]
