"""The control page of ranks that share no memory, as on several nodes: their exchanges go through the Store.

    add  tricomm/control/<rank>/generation                   which group on this store is this rank's next one
    set  tricomm/control/<generation>/<step>/<rank>          this rank's message of a step, as a record

Ranks cannot see each other here: that a rank has ended, stopped or made another call shows only when the time is up.
The Store stays in use for everything that the ranks have to agree on.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from tricomm.deadline import Deadline
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, RendezvousError
from tricomm.store import process, records
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.control import ControlPage, RankSegment, RankState
from tricomm.store.gather import Arrived, Gathering, missing
from tricomm.store.page import NBYTES, Page
from tricomm.store.records import ExchangeMessage, StoreRecord
from tricomm.store.segments import Segment

_GRACE_SECONDS = 0.25
_NAME = "control"
_FACTS = struct.Struct(f"<{records.NONCE_BYTES}s16sQ")  # nonce, node, options


def open_store_control(
    store: Store, rank: int, world_size: int, timeout: float, agreed: int
) -> tuple[ControlPage, list[bytes]]:
    """A control page over `store`, and the node of each rank; every rank calls it, with the same `agreed`.

    Raises `RendezvousError` if the ranks' options differ, or if some do not come within `timeout` seconds.
    """
    bounded = BoundedStore(store, timeout + _GRACE_SECONDS)
    try:
        gathering = Gathering(bounded, _NAME, rank, world_size)
        gathering.begin()
    finally:
        bounded.close()
    exchanges = _Exchanges(store, gathering)
    facts = _FACTS.pack(gathering.nonce, process.node_id(), agreed)
    try:
        said = exchanges.gather(ExchangeMessage(0, "facts", facts), timeout)
        answers = [_FACTS.unpack(answer) for answer in said]
    except (CollectiveMismatch, CollectiveTimeout, struct.error) as error:
        raise RendezvousError(str(error)) from error
    different = [r for r, (_, _, theirs) in enumerate(answers) if theirs != agreed]
    if different:
        raise RendezvousError(
            f"rank(s) {different} have other options than rank {rank}: use the same tricomm, device kind, options and "
            "TRICOMM_* variables on every rank"
        )
    # A digest of all ranks' facts: a rank that has read an old record, or another one, is in another group from now on.
    exchanges.nonce = hashlib.sha256(b"".join(said)).digest()[: records.NONCE_BYTES]
    return _page(rank, world_size, exchanges), [node for _, node, _ in answers]


def _page(rank: int, world_size: int, exchanges: _Exchanges) -> ControlPage:
    own, blank = Segment.create("tricomm-control", NBYTES), _Blank()
    pid = os.getpid()
    started = process.start_time(pid) or 0
    members = [RankSegment(own if r == rank else blank, pid, started) for r in range(world_size)]  # type: ignore[arg-type]
    control = ControlPage(rank, exchanges.nonce, members, gather=exchanges.gather)
    own.close_fd()
    control.set_state(RankState.READY)
    return control


class _Exchanges:
    """One rank's part in the exchanges of a group. `nonce` is this rank's own in step 0, and then the group's."""

    def __init__(self, store: Store, gathering: Gathering) -> None:
        self._store, self._rank, self._world_size = store, gathering.rank, gathering.world_size
        self._generation = gathering.generation
        self.nonce = gathering.nonce

    def gather(self, mine: ExchangeMessage, timeout: float, look: Callable[[], None] = lambda: None) -> list[bytes]:
        prefix = f"group {self.nonce[:4].hex()}, rank {self._rank} of {self._world_size}: {mine.what}"

        def late(arrived: Arrived[ExchangeMessage]) -> CollectiveTimeout:
            ranks = missing(arrived, self._world_size)
            return CollectiveTimeout(f"{prefix}: timeout after {timeout:g} s: rank(s) {ranks} did not come")

        def check(record: StoreRecord[ExchangeMessage]) -> None:
            theirs, rank = record.body, record.rank
            other = mine.step > 0 and record.nonce != self.nonce  # in step 0 each rank has another nonce
            if record.world_size != self._world_size or other or theirs.step != mine.step:
                raise RendezvousError(f"{prefix}: rank {rank} is in another group on this store")
            if theirs.what != mine.purpose():
                raise CollectiveMismatch(f"{prefix}: rank {rank} is at {theirs.what!r} instead")

        bounded = BoundedStore(self._store, timeout + _GRACE_SECONDS)
        gathering = Gathering(bounded, _NAME, self._rank, self._world_size, self.nonce, self._generation)
        try:
            answers = gathering.exchange(str(mine.step), mine, Deadline(timeout), late, check, lambda arrived: look())
        finally:
            bounded.close()
        return [record.body.payload for record in answers]


class _Blank:
    """Stands for the segment of a rank that cannot be seen: it is empty."""

    def __init__(self) -> None:
        self.buffer, self.address = memoryview(mmap.mmap(-1, NBYTES)), 0
        Page(self.buffer, self.address).state = RankState.READY

    def close(self) -> None:
        pass
