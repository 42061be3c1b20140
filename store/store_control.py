"""The control page of ranks that share no memory, as on several nodes: their exchanges go through the Store.

    agree on a generation under tricomm/control (`generation.py`), with the node and the options of every rank
    set  tricomm/control/<generation>/slot/<step % 2>/<rank>     this rank's message of a step, as a record

If a rank of another node ends, stops or makes another call, this is noticed only at the timeout. The Store is used for
all later agreements of the ranks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from torch.distributed.distributed_c10d import Store

from tricomm import env
from tricomm.errors import RendezvousError
from tricomm.store import process, records
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.control import ControlPage, RankSegment, RankState
from tricomm.store.departures import Rules
from tricomm.store.generation import Generation
from tricomm.store.page import NBYTES, Page
from tricomm.store.records import Capabilities, ExchangeMessage, StoreRecord
from tricomm.store.segments import Segment

_GRACE_SECONDS = 0.25


def open_store_control(
    store: Store, rank: int, world_size: int, timeout: float, agreed: int
) -> tuple[ControlPage, list[bytes]]:
    """A control page over `store`, and the node of each rank; every rank calls it, with the same `agreed` (64 bits).

    Raises `RendezvousError` if the ranks' options differ, or if some do not come within `timeout` seconds.
    """
    pid = os.getpid()
    started = process.start_time(pid) or 0

    def own() -> Capabilities:
        return Capabilities(pid, started, process.pid_namespace(), process.node_id(), agreed, 0)

    def check(theirs: StoreRecord[Capabilities]) -> None:
        if theirs.body.switches != agreed:
            raise RendezvousError(
                f"rank {theirs.rank} has other options than rank {rank}: use the same tricomm, device kind, options "
                "and TRICOMM_* variables on every rank"
            )

    generation = Generation(store, "control", Capabilities, rank, world_size, timeout, rules=Rules(strict=True))
    members = generation.agree(own, check)
    try:
        generation.gather("agreement", b"")  # all ranks have agreed before keys of the agreement are deleted
    except BaseException as error:
        generation.give_up(error)
        raise
    generation.settle(shared=True)
    segment, blank = Segment.create("tricomm-control", NBYTES), _Blank()
    pages = [RankSegment(segment if r == rank else blank, pid, started) for r in range(world_size)]  # type: ignore[arg-type]
    nonce = bytes.fromhex(generation.name)

    @contextmanager
    def slots(seconds: float) -> Iterator[_StoreSlots]:
        with closing(BoundedStore(generation.store, seconds + _GRACE_SECONDS)) as calls:
            yield _StoreSlots(calls, rank, world_size, nonce)

    control = ControlPage(rank, nonce, pages, slots=slots)
    segment.close_fd()
    control.set_state(RankState.READY)
    return control, [member.node for member in members]


class _StoreSlots:
    """The slots of ranks that share no memory, in their generation's store. `nonce` is the group's."""

    pauses = 2e-4, 0.02

    def __init__(self, calls: BoundedStore, rank: int, world_size: int, nonce: bytes) -> None:
        self._calls, self._rank, self._world_size, self._nonce = calls, rank, world_size, nonce
        self._token = env.token()

    def post(self, message: ExchangeMessage) -> None:
        record = StoreRecord(self._rank, self._world_size, self._nonce, message)
        self._calls.set(f"slot/{message.step % 2}/{self._rank}", record.pack(self._token))

    def posted(self, ranks: Sequence[int], step: int) -> Iterable[tuple[int, ExchangeMessage]]:
        for rank, data in self._calls.present({rank: f"slot/{step % 2}/{rank}" for rank in ranks}):
            record = records.parse(data, ExchangeMessage, rank, self._token)
            if (record.world_size, record.nonce) != (self._world_size, self._nonce):
                raise RendezvousError(f"rank {rank} is in another group on this store")
            yield rank, record.body


class _Blank:
    """An empty segment, in place of the segment of a rank that is not visible."""

    def __init__(self) -> None:
        self.buffer, self.address = memoryview(mmap.mmap(-1, NBYTES)), 0
        Page(self.buffer, self.address).state = RankState.READY

    def close(self) -> None:
        pass
