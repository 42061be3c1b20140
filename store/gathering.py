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

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _ROUND_SECONDS = 2e-4, 0.02, 0.05

Arrived = Mapping[int, Record]  # those that are there, by rank


def next_generation(store: Bounded, key: str, took: Callable[[int], None] = lambda number: None) -> int:
    """Which meeting on this store is this rank's next one, counted in `key`; `took` is told by the store's worker.

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
    pause, next_round = _PAUSE_SECONDS, time.monotonic() + _ROUND_SECONDS
    while True:
        look(said)
        keys = {rank: key(rank) for rank in missing(said, mine.world_size)}
        now = time.monotonic()
        round_due = now >= min(next_round, deadline)
        # One question for all keys most of the time; each key by itself now and then, to know who is there.
        for rank in keys if keys and (round_due or store.check(*keys.values())) else ():
            if data := store.read(keys[rank]):
                record = records.parse(data, kind, mine.generation, rank, token)
                check(record)
                said[rank] = record
        if len(said) == mine.world_size:
            return [said[rank] for rank in range(mine.world_size)]
        if now >= deadline:
            raise late(said)
        next_round = now + _ROUND_SECONDS if round_due else next_round
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE_SECONDS)


def missing(said: Arrived, world_size: int) -> list[int]:
    """Ranks whose record is not there."""
    return [rank for rank in range(world_size) if rank not in said]
