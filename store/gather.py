"""One round of records through the Store: each rank writes its own and reads, and checks, those of all others.

The only place where ranks read each other's bytes from the Store. Waiting is polling, because a `get` that blocks
cannot look for anything else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tricomm.errors import RendezvousError, TricommError
from tricomm.store import records
from tricomm.store.deadline import Bounded
from tricomm.store.records import Record

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 0.02
_EACH_SECONDS = 0.05  # after which the records are asked for one by one: some may be there

Arrived = Mapping[int, Record]  # those that are there, by rank


def next_generation(store: Bounded, key: str, took: Callable[[int], None] = lambda count: None) -> int:
    """Which meeting on this store is this rank's next one, counted in `key`; an interrupt does not keep it from `took`.

    Raises `RendezvousError` if what is counted there is impossible: something else writes to this store.
    """
    found = store.add(key, 1, took)
    if not 0 < found <= records.MAX_GENERATION:
        raise RendezvousError(f"the store's {key!r} counts {found} meetings; does something else use this store?")
    return found


def gather(
    store: Bounded, mine: Record, token: bytes | None, key: Callable[[int], str], deadline: float,
    late: Callable[[Arrived], TricommError], check: Callable[[Record], None],
    look: Callable[[Arrived], None] = lambda said: None,
) -> list[Record]:  # fmt: skip
    """Write `mine` under `key(rank)`, and return the records of all ranks, by rank; each rank calls it.

    `check` raises for a record that is well formed and still cannot be of this group. `look` is called before each
    round of reading, with those that are there, and raises if there is no use in waiting. Past `deadline`
    (`time.monotonic`), raises what `late` gives for those that are there. Raises `RendezvousError` for a record that
    `records.parse` refuses, and if the store fails. An empty value counts as none.
    """
    kind = records.kind_of(mine.body)
    store.set(key(mine.rank), mine.pack(token))
    said = {mine.rank: mine}  # never read back: another's word for this rank counts for nothing
    pause, each = _PAUSE_SECONDS, time.monotonic() + _EACH_SECONDS
    while True:
        look(said)
        now = time.monotonic()
        keys = {rank: key(rank) for rank in missing(said, mine.world_size)}
        if now >= min(each, deadline) or not keys or store.check(*keys.values()):  # one question for all, mostly
            each = now + _EACH_SECONDS
            for rank, there in keys.items():
                if data := store.read(there):
                    record = records.parse(data, kind, mine.generation, rank, token)
                    check(record)
                    said[rank] = record
        if len(said) == mine.world_size:
            return [said[rank] for rank in range(mine.world_size)]
        if now >= deadline:
            raise late(said)
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE_SECONDS)


def missing(said: Arrived, world_size: int) -> list[int]:
    """Ranks whose record is not there."""
    return [rank for rank in range(world_size) if rank not in said]
