"""The tasks that are scheduled: a rank's host code, and the blocks of its launches."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import greenlet

from tricomm.explorer.memory_model.regions import Array, Region
from tricomm.explorer.memory_model.source_lines import NOWHERE, Site
from tricomm.kernels.launch.interpreter import Program
from tricomm.kernels.launch.memory_access import Access


class State(enum.Enum):
    """The state of a task."""

    READY = "ready"
    PARKED = "parked"  # polls memory that does not change
    WAITING = "waiting"  # host code that waits for its launch, or for another rank's host code
    STOPPED = "stopped"  # its rank will never run again
    DONE = "done"


@dataclass
class Launch:
    """One launch of a kernel on one rank. `private` is the memory that only this launch may access; `host` is the host
    code that waits for its end."""

    rank: int
    number: int
    name: str
    blocks: list[Task]
    private: list[Region]
    error: BaseException | None = None
    ended: Callable[[], None] | None = None
    host: Task | None = None

    @property
    def running(self) -> int:
        """The number of blocks that have begun and not ended."""
        return len({task.block for task in self.blocks if task.started and task.state is not State.DONE})

    def has_begun(self, block: int) -> bool:
        return any(task.started for task in self.blocks if task.block == block)

    @property
    def done(self) -> bool:
        return all(block.state is State.DONE for block in self.blocks)


@dataclass
class Poll:
    """A task's last read at one line of its code, with the first comparison of the value and the mask of the
    comparison."""

    access: Access
    site: Site
    values: bytes
    relation: str = ""
    actual: Array | None = None
    expected: Array | None = None
    result: Array | None = None
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        # Rounded to 16 bytes, the widest element, because writes are known only by their first bytes.
        self.low, self.high = int(self.access.addresses.min()) & -16, int(self.access.addresses.max()) | 15

    def compared(self, relation: str, left: Array, right: Array, result: Array) -> None:
        if not self.relation and relation != "&":
            self.relation, self.actual, self.expected, self.result = relation, left, right, result
        elif relation == "&" and self.result is not None and (left is self.result or right is self.result):
            self.result = result

    def late(self) -> Array:
        """For each element, True if the comparison says that the awaited value has not arrived."""
        lanes = self.access.lanes
        if self.actual is None or self.expected is None or self.result is None:
            return np.zeros(len(self.access.addresses), bool)
        try:
            result = np.broadcast_to(self.result, lanes.shape)[lanes].astype(bool)
        except ValueError:  # another shape: the compared value combines several elements of the access
            return np.zeros(len(self.access.addresses), bool)
        if self.relation == "==":
            return ~result
        return result if self.relation == "!=" else np.ones(len(result), bool)


@dataclass(eq=False)
class Task:
    """`key` names it in choice lists: "r0" is rank 0's host code, "r0b1" its block 1, "r0b1w2" a compiled block's
    warp 2. `mates` are the warps of one block; `waits` is where one waits for the others."""

    rank: int
    block: int
    run: Callable[[], Any]
    program: Program | None = None
    launch: Launch | None = None
    state: State = State.READY
    started: bool = False
    sync: bool = False  # True if its next access is strong
    error: BaseException | None = None
    result: Any = None
    polls: dict[Any, Poll] = field(default_factory=dict)
    repeated: list[Any] = field(default_factory=list)  # keys of `polls`, one for each read since the last new value
    retries: int = 0
    last_poll: Poll | None = None
    stored: set[Any] = field(default_factory=set)  # stores of the present value since it last changed memory
    host_site: Site = NOWHERE
    warp: int = -1
    mates: list[Task] = field(default_factory=list)
    waits: Site | None = None
    greenlet: greenlet = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"r{self.rank}" if self.is_host else f"r{self.rank}b{self.block}"
        self.key += f"w{self.warp}" if self.warp >= 0 else ""
        self.greenlet = greenlet(self._body)

    def _body(self) -> None:
        self.started = True
        try:
            self.result = self.run()
        except Exception as error:
            self.error = error
        self.state = State.DONE

    @property
    def is_host(self) -> bool:
        return self.block < 0

    @property
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.block, self.warp

    # Polling: if a task has read every word of its loop again without a new value, it need not run until one of these #
    # words changes.

    def note_read(self, access: Access, site: Site, values: Array, rounds: int) -> bool:
        """Note a read. True if it completes `rounds` rounds of a loop in which no value has changed."""
        key = (site, access.addresses.tobytes())
        seen = values.tobytes()
        before = self.polls.get(key)
        if before is None or before.values != seen:
            self.last_poll = self.polls[key] = Poll(access, site, seen)
            self.repeated, self.retries = [key], 0
            return False
        self.last_poll = before
        self.repeated.append(key)
        round_ = len(self.loop())
        return bool(round_) and len(self.repeated) > round_ * rounds

    def loop(self) -> list[Poll]:
        """The reads of one round of the polling loop: all after the previous occurrence of the latest read."""
        *before, last = self.repeated or [None]
        if last not in before:
            return []
        round_ = before[len(before) - 1 - before[::-1].index(last) :]
        return [self.polls[key] for key in dict.fromkeys(round_)]

    def waits_strongly(self) -> bool:
        """True at a barrier and in a loop with a strong load. A loop of weak loads is expected to end, because weak
        loads are no way to wait."""
        return self.waits is not None or any(poll.access.sem is not None for poll in self.loop())

    def forget_polls(self) -> None:
        """Note that the task has made progress, so it is not in a polling loop."""
        if self.polls:
            self.polls, self.repeated = {}, []

    def changed_memory(self) -> None:
        self.stored.clear()
        self.forget_polls()

    def stored_the_same(self, where: Any, addresses: Array) -> None:
        """Note a store at `where` that has changed nothing. In a polling loop, an earlier round has made the same
        store."""
        key = (where, addresses.tobytes())
        if key not in self.stored:
            self.stored.add(key)
            self.forget_polls()

    def watches(self, low: int, high: int) -> bool:
        """True if the task, or another warp of its block, polls an address from `low` to `high`."""
        for task in self.mates or (self,):
            for poll in task.polls.values():
                if poll.low <= high and poll.high >= low:
                    return True
        return False
