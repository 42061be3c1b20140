"""How a communicator is made out of an earlier group: fewer ranks (`shrink`), or new ones in places of lost ones
(`replace`, `join`).

    survivors: agree as for shrink, over the old group's pages        new rank:
    free their memory, keep its addresses
    all: meet over the store (`meetings.py`, `handshake.py`)
    survivors: put the new control words where the old ones were
    all: share memory; the survivors map it at the addresses that they have kept
    all: exchange what they are; survivors refuse devices on which captured graphs cannot run
    survivors: decide as for shrink, then mark their new pages        waits for such a mark

So the survivors have the group or none has. The new rank has it if one of them has: if it ends before, they see a peer
that has died, and can replace it. The memory and the pages are new, so late stores of a lost rank do not reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch.distributed.distributed_c10d import Store

from tricomm.core import bootstrap
from tricomm.core.bootstrap import Rejoining, Terms
from tricomm.core.group import Group
from tricomm.deadline import Deadline, poll
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, ResourceError, TricommError
from tricomm.store.arenas.arena import Arena
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage, RankState
from tricomm.store.handshake import handshake

if TYPE_CHECKING:  # a group that loses no rank needs neither
    from tricomm.store.meetings import Meetings
    from tricomm.store.shrink import Shrink

WHAT = "the communicator"
_PAUSES = 5e-5, 2e-3
_NEW, _AWAKE, _ASLEEP = b"new", b"awake", b"asleep"


class Recovery(Rejoining, Protocol):
    """This rank's part in a recovery: after it has met the other ranks, these are called in this order."""

    def settle(self, group: Group) -> tuple[list[bytes], bool]:
        """Called once the group is made, on all ranks together: the ranks' numbers in the job, and whether the group is
        suspended."""

    def decide(self) -> None:
        """The last step: returns on all ranks or raises on all."""


@dataclass
class Fewer:
    """The recovery of `Communicator.shrink`. `number`: of this rank in the job."""

    shrink: Shrink
    number: int
    lender: Arena | None = field(default=None, init=False)

    @property
    def origin(self) -> str:
        return self.shrink.origin

    def connect(self) -> ControlPage:
        return self.shrink.connect()

    def met(self, control: ControlPage) -> None:
        control.agree(None, "shrink", self.shrink.deadline.left)

    def settle(self, group: Group) -> tuple[list[bytes], bool]:
        return group.control.exchange(str(self.number).encode(), WHAT, group.timeout), False

    def decide(self) -> None:
        self.shrink.decide()


class Survivor:
    """The recovery of `Communicator.replace`, on a rank of the group `old`."""

    def __init__(self, old: Group, shrink: Shrink, meetings: Meetings, terms: Terms) -> None:
        self.lender = old.arena
        self._old, self._shrink, self._meetings, self._terms = old, shrink, meetings, terms
        self._control: ControlPage | None = None

    @property
    def new(self) -> list[int]:
        """The ranks that are new."""
        return [rank for rank in range(self._old.world_size) if rank not in self._shrink.members]

    @property
    def origin(self) -> str:
        return f"group {self._old.name} {f'with new rank(s) {self.new}' if self.new else 'again'}"

    def connect(self) -> ControlPage:
        terms, shrink = self._terms, self._shrink
        left = max(shrink.deadline.left, 1e-3)
        store = self._meetings.call(shrink.nonce, self.new, shrink.members[0] == terms.rank, left)
        agreed, left = bootstrap.digest(terms), max(shrink.deadline.left, 1e-3)
        return handshake(store, terms.rank, terms.world_size, left, agreed, self._look)

    def _look(self) -> None:
        if self._old.closed:
            raise GroupAborted("another thread has closed the communicator")
        self._shrink.look_at_members()

    def met(self, control: ControlPage) -> None:
        self._control, control.limit = control, self._shrink.deadline
        control.set_state(RankState.CONNECTING)  # until it is decided
        stage = CollectiveStages(control, "replace", self._shrink.deadline)
        stage("keep the control words", lambda: control.take_place(self._old.control))

    def settle(self, group: Group) -> tuple[list[bytes], bool]:
        state = _ASLEEP if self._old.suspended else _AWAKE
        numbers, states = _told(group, self._old.recorder.rank, state, self._refusal(group))
        return numbers, set(states) <= {_ASLEEP, _NEW}

    def _refusal(self, group: Group) -> TricommError | None:
        """Why kernels that the old group's graphs hold cannot run in `group`; None if they can."""
        old = self._old
        for name in ("bases", "multicast", "control_address"):
            before, now = getattr(old.arena, name, 0), getattr(group.arena, name, 0)
            if before and now != before:
                return ResourceError(f"memory that captured graphs use cannot be where it was ({name}); shrink instead")
        facts = [
            (each.device_class, each.topology and each.topology.canonical, each.no_dependent_launch == "")
            for each in (old, group)
        ]
        if facts[0] != facts[1] or group.max_blocks < old.max_blocks:
            return InvalidArgument(
                "captured graphs cannot run with the new rank's device: it is of another kind, or has other links or "
                "fewer processors; take the device of the lost rank or one like it, or shrink"
            )
        return None

    def decide(self) -> None:
        self._shrink.decide()
        assert self._control is not None, "met comes first"
        self._control.set_state(RankState.READY)


class Newcomer:
    """The recovery of `join`, on a new rank."""

    lender: Arena | None = None
    origin = "joined in place of a lost rank"

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store, self._terms = store, terms
        self._deadline = Deadline(terms.timeout)
        self._control: ControlPage | None = None
        self._survivors: list[int] = []

    def connect(self) -> ControlPage:
        terms = self._terms

        def meet(store: Store, seconds: float, look: Callable[[], None]) -> ControlPage:
            return handshake(store, terms.rank, terms.world_size, seconds, bootstrap.digest(terms), look)

        from tricomm.store.meetings import Meetings

        return Meetings(self._store).come(terms.rank, meet, terms.rendezvous_timeout)

    def met(self, control: ControlPage) -> None:
        self._control, self._deadline = control, Deadline(self._terms.timeout)
        control.limit = self._deadline
        CollectiveStages(control, "replace", self._deadline)("keep the control words", lambda: None)

    def settle(self, group: Group) -> tuple[list[bytes], bool]:
        numbers, states = _told(group, int(group.recorder.job_rank()), _NEW)
        self._survivors = [rank for rank, state in enumerate(states) if state != _NEW]
        if not self._survivors:
            raise InvalidArgument("join: all ranks are new; make the group with init or Communicator")
        return numbers, set(states) <= {_ASLEEP, _NEW}

    def decide(self) -> None:
        if not poll(self._decided, self._deadline.left, *_PAUSES):
            raise CollectiveTimeout(
                f"join: timeout after {self._deadline.waited:.1f} s: the other ranks did not decide"
            )

    def _decided(self) -> bool:
        control = self._control
        assert control is not None, "met comes first"
        ended = [rank for rank in self._survivors if not control.alive(rank)]  # before the pages are read
        states = {rank: control.page(rank).state for rank in self._survivors}
        if RankState.READY in states.values():
            return True
        left = [rank for rank, state in states.items() if rank not in ended and state != RankState.CLOSED]
        if not left:
            faults = [fault.text for rank in self._survivors if (fault := control.page(rank).fault()) is not None]
            raise PeerDied(f"join: the other ranks have given up: {'; '.join(faults) or 'they have died'}")
        return False


def _told(
    group: Group, number: int, state: bytes, error: TricommError | None = None
) -> tuple[list[bytes], list[bytes]]:
    """All ranks' numbers in the job, and their states. Raises an `error` of one rank on all."""
    answers = group.control.exchange(b"%d %s" % (number, state), WHAT, group.timeout, error=error)
    numbers, states = zip(*(answer.split(b" ") for answer in answers), strict=True)
    return list(numbers), list(states)
