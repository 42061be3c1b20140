"""Vector clocks for happens-before, on four levels of strictness.

    STRICT   what the rules promise: release to acquire, both scopes wide enough, and the block barrier between a
             flag and the accesses of the block's other threads (`tl.debug_barrier`)
    THREAD   the same, as if a block were one thread
    ANY      the same, whatever the scopes
    SEEN     every message that a strong read has read, ordered or not

Only STRICT decides whether two accesses race. The others say which ordering is missing: the first level that has the
two in order names what the level before it lacks.

Rules (the PTX memory model, as "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS'19) has it, and
scopes as in HRF (ASPLOS'14)):
  program order within a block; end of a launch -> next launch of the rank; the ranks' exchanges on the host.
  release -> acquire that reads it, or reads a read-modify-write that continues it.
  A launch begins behind the end of the one before it, which is a fence for the whole system: even a relaxed flag
  hands on what its rank did in earlier launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tricomm.explorer.memory_model.source_lines import Site

STRICT, THREAD, ANY, SEEN = range(4)
Clock = NDArray[Any]


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
    """A release message: that of one release, and those that read-modify-writes have continued."""

    parts: list[Part]
    any: Clock
    seen: Clock


@dataclass(slots=True)
class Joined:
    """One read of a flag, kept to explain later why it did not order two accesses."""

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
        """Start a launch with the clock `known`; no acquire is pending."""
        own = self.now[STRICT, self.slot]
        self.now = np.maximum(self.now, known)
        self.now[:, self.slot] = own + 1
        self.birth = self.now.copy()
        self.fenced = self.now[STRICT].copy()
        self.pending = np.zeros_like(self.fenced)
        self.joins.clear()
        self.tick()  # later accesses come after the launch's beginning and after no block barrier

    @property
    def time(self) -> int:
        return int(self.now[STRICT, self.slot])

    def tick(self) -> None:
        self.now[:, self.slot] += 1

    def barrier(self) -> None:
        """A block barrier: an acquire by one thread now holds for all, and a release by one now covers all."""
        np.maximum(self.now[STRICT], self.pending, out=self.now[STRICT])
        self.fenced = self.now[STRICT].copy()
        self.tick()

    def finish(self) -> Clock:
        """The clock at the end of the launch, which joins all threads of the block."""
        self.barrier()
        return self.now

    def publish(self, sem: str, scope: str, site: Site, before: Message | None) -> Message:
        """The message of a strong write; `before` is the one that a read-modify-write continues."""
        releases = sem in ("release", "acq_rel")
        source = self.now if releases else self.birth
        strict = self.fenced if releases else self.birth[STRICT]
        part = Part(self.slot, self.rank, self.block, scope, sem, site, strict.copy(), source[THREAD].copy())
        message = Message([part], source[ANY].copy(), self.now[SEEN].copy())
        self.tick()
        if before is not None:
            message.parts = _merged(before.parts, part)
            np.maximum(message.any, before.any, out=message.any)
            np.maximum(message.seen, before.seen, out=message.seen)
        return message

    def observe(self, message: Message, sem: str, scope: str, site: Site) -> None:
        """A strong read has read `message`."""
        if sem in ("acquire", "acq_rel"):
            for part in message.parts:
                if part.reaches(self.rank, self.block, scope):
                    np.maximum(self.pending, part.strict, out=self.pending)
                    np.maximum(self.now[THREAD], part.thread, out=self.now[THREAD])
            np.maximum(self.now[ANY], message.any, out=self.now[ANY])
        np.maximum(self.now[SEEN], message.seen, out=self.now[SEEN])
        if not self.joins or self.joins[-1].parts is not message.parts:
            self.joins.append(Joined(site, sem, scope, message.parts, message.seen))


def _merged(parts: list[Part], new: Part) -> list[Part]:
    """`parts` and `new`. Earlier releases of the same thread stay in force."""
    kept = []
    for part in parts:
        if part.slot == new.slot and part.scope == new.scope:
            np.maximum(new.strict, part.strict, out=new.strict)
            np.maximum(new.thread, part.thread, out=new.thread)
        else:
            kept.append(part)
    return [*kept, new]
