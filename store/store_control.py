"""The control page of ranks that share no memory, as on several nodes: what they say goes through the Store.

    add  tricomm/apart/<rank>/generation                  which meeting on this store is this rank's next one
    set  tricomm/apart/<generation>/<step>/<rank>         what this rank says in a step, as a record

Nobody sees anybody here: who dies, stops or calls something else shows when the time is up. The Store stays in use,
for whatever the ranks have to agree on.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from collections.abc import Mapping

from torch.distributed.distributed_c10d import Store

from tricomm import env
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, RendezvousError
from tricomm.store import process, records
from tricomm.store.control import ControlPage, Member, State
from tricomm.store.deadline import Bounded
from tricomm.store.gather import gather, missing, next_generation
from tricomm.store.page import NBYTES, Message, Page
from tricomm.store.records import Record, Said, said_of
from tricomm.store.segments import Segment

_GRACE_SECONDS = 0.25
_FACTS = struct.Struct(f"<{records.NONCE_BYTES}s16sQ")  # nonce, node, options


class Apart(ControlPage):
    """A control page of which only this rank's own part is real."""

    def __init__(self, store: Store, rank: int, world_size: int, generation: int) -> None:
        started = process.start_time(os.getpid()) or 0
        own = Segment.create("tricomm-control", NBYTES)
        blank = _Blank()
        members = [Member(own if r == rank else blank, os.getpid(), started) for r in range(world_size)]  # type: ignore[arg-type]
        super().__init__(rank, secrets.token_bytes(records.NONCE_BYTES), members)
        own.close_fd()
        self._store, self._generation, self._token = store, generation, env.token()
        self._met = False
        self.set_state(State.READY)

    @property
    def peers(self) -> tuple[int, ...]:
        return ()

    def meet(self, agreed: int, timeout: float) -> int:
        """How many nodes the ranks are on; called by all of them. Raises `RendezvousError` where their options differ
        or some do not come."""
        mine = _FACTS.pack(self.nonce, process.node_id(), agreed)
        try:
            said = [_FACTS.unpack(answer) for answer in self.exchange(mine, "facts", timeout)]
        except (CollectiveMismatch, CollectiveTimeout, struct.error) as error:
            raise RendezvousError(str(error)) from error
        different = [r for r, (_, _, theirs) in enumerate(said) if theirs != agreed]
        if different:
            raise RendezvousError(
                f"rank(s) {different} have other options than rank {self.rank}: use the same tricomm, device kind and "
                "options on every rank"
            )
        self.nonce, self._met = said[0][0], True
        self.group = self.nonce[:4].hex()
        return len({node for _, node, _ in said})

    def _watch(self, rank: int) -> process.Watched:
        return _Unseen()

    def _gather(self, mine: Message, timeout: float, heed_faults: bool) -> list[bytes]:
        def late(said: Mapping[int, Record]) -> CollectiveTimeout:
            who = f"timeout after {timeout:g} s: rank(s) {missing(said, self.world_size)} did not come"
            return CollectiveTimeout(f"{self._prefix(mine.what)}: {who}")

        said = Said(mine.step, mine.what, mine.payload)
        record = Record(self.rank, self.world_size, self._generation, self.nonce, said)
        store, end = Bounded(self._store, timeout + _GRACE_SECONDS), time.monotonic() + timeout
        try:
            found = gather(
                store, record, self._token, lambda rank: self._key(mine.step, rank), end, late,
                lambda record: self._belongs(record, mine),
            )  # fmt: skip
        finally:
            store.close()
        return [said_of(record).payload for record in found]

    def _belongs(self, record: Record, mine: Message) -> None:
        said, what, rank = said_of(record), self._prefix(mine.what), record.rank
        if record.world_size != self.world_size or self._met and record.nonce != self.nonce or said.step != mine.step:
            raise RendezvousError(f"{what}: rank {rank} is in another group on this store")
        if said.what != mine.what.encode()[:64].decode(errors="ignore"):
            raise CollectiveMismatch(f"{what}: rank {rank} is at {said.what!r} instead")

    def _key(self, step: int, rank: int) -> str:
        return f"tricomm/apart/{self._generation}/{step}/{rank}"


def meet_apart(store: Store, rank: int, world_size: int, timeout: float, agreed: int) -> tuple[Apart, int]:
    """A control page over `store`, and the number of nodes; every rank calls it. `agreed` is the same on all ranks.

    Raises `RendezvousError` where the ranks' options differ, or where some do not come within `timeout` seconds.
    """
    bounded = Bounded(store, timeout + _GRACE_SECONDS)
    try:
        generation = next_generation(bounded, f"tricomm/apart/{rank}/generation")
    finally:
        bounded.close()
    control = Apart(store, rank, world_size, generation)
    try:
        return control, control.meet(agreed, timeout)
    except BaseException:
        control.close()
        raise


class _Blank:
    """Stands for the segment of a rank that cannot be seen: it says nothing."""

    def __init__(self) -> None:
        self.buffer, self.address = memoryview(mmap.mmap(-1, NBYTES)), 0
        Page(self.buffer, self.address).state = State.READY

    def close(self) -> None:
        pass


class _Unseen(process.Watched):
    """A process of which nothing is known."""

    def __init__(self) -> None:
        self._fds = []

    def alive(self) -> bool:
        return True
