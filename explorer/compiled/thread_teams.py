"""The threads of a block, and the messages between threads: the data that `thread_clocks` works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from tricomm.explorer.ptx.access import Array


@dataclass(frozen=True, slots=True)
class ReleasePart:
    """A release pattern of thread `slot` (0: a launch): its scope, and the clock at its first operation."""

    slot: int
    rank: int
    block: int
    scope: int
    time: int
    known: Array


@dataclass(frozen=True, slots=True)
class FlagMessage:
    """The message of a strong write. `rank`, `block` and `scope` describe the last write of the chain."""

    rank: int
    block: int
    scope: int
    parts: tuple[ReleasePart, ...]


@dataclass(eq=False, slots=True)
class BarrierRounds:
    """One barrier of a block: how often it has opened, and the threads that have arrived since then with their
    clocks."""

    phase: int = 0
    known: Array | None = None
    waiting: int = 0
    came: dict[int, int] = field(default_factory=dict)  # by thread: the phase in which it arrived last
    # what the arrived threads knew, and whether that is `rows[0]` now
    opened: dict[int, tuple[Array, bool]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Team:
    """The threads of one running block, or one task of the host: their consecutive slots, and what they know.

    rows    `rows[0]` is the clock that all threads share; `row_of` has, by thread, the number of its row
    birth   released by each of their relaxed writes: all that ended before this launch began
    reborn  the same for threads of `waited`, after they have executed `griddepcontrol.wait`
    """

    number: int
    rank: int
    slots: Array
    rows: list[Array]
    row_of: Array
    present: int
    birth: tuple[ReleasePart, ...] = ()
    reborn: tuple[ReleasePart, ...] = ()
    waited: Array | None = None
    seen: dict[tuple[int, int, bytes], tuple[int, int, Array]] = field(default_factory=dict)
    joined: set[tuple[int, int, bytes]] = field(default_factory=set)
    barriers: dict[int, BarrierRounds] = field(default_factory=dict)

    def born(self, slots: Array) -> tuple[ReleasePart, ...]:
        """The release that each relaxed write of these threads makes."""
        return self.birth if self.waited is None or not self.waited[self.local(slots)].all() else self.reborn

    def local(self, slots: Array) -> Array:
        """The numbers of these threads in the block."""
        numbers: Array = slots - self.slots[0]
        return numbers
