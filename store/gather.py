"""Records that ranks exchange through the Store: their keys, their generation, and how one of them aborts.

    add  tricomm/<name>/<rank>/generation              which gathering of that name is this rank's next one
    set  tricomm/<name>/<generation>/<what>/<rank>     a record of this rank
    set  tricomm/<name>/<generation>/failed            why a rank has aborted this generation

The only place where ranks read each other's bytes from the Store. It polls, because a blocking `get` could not watch
for anything else meanwhile.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import RendezvousError, TricommError
from tricomm.store import records
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.records import B, Failure, StoreRecord

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 0.02
_EACH_SECONDS = 0.05  # between reads of single records: some may exist before all do

Arrived = Mapping[int, StoreRecord[B]]  # the records that exist, by rank


class Gathering:
    """One rank's part in one generation of a gathering. `name` keeps its keys apart from those of others.

    Methods raise `RendezvousError` if the store fails, if `records.parse` refuses a record, and if the
    generation is impossible, for example because something else writes to this store.
    """

    def __init__(
        self, store: BoundedStore, name: str, rank: int, world_size: int, nonce: bytes = b"", generation: int = 0
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.generation = generation  # 0: none yet, see `begin`
        self.nonce = nonce or secrets.token_bytes(records.NONCE_BYTES)
        self._keys, self._token = f"tricomm/{name}", env.token()

    def begin(self) -> None:
        """Take this rank's next generation, and record it even if an interrupt precedes the store's answer."""
        key = self.counter(self.rank)
        self.store.add(key, 1, self._begun)
        generation = self.generation
        if not 0 < generation <= records.MAX_GENERATION:
            self.generation = 0
            raise RendezvousError(f"the store's {key!r} is {generation}; does something else use this store?")

    def _begun(self, generation: int) -> None:
        self.generation = generation

    def exchange(
        self,
        what: str,
        body: B,
        deadline: Deadline,
        late: Callable[[Arrived[B]], TricommError],
        check: Callable[[StoreRecord[B]], None],
        look: Callable[[Arrived[B]], None] = lambda arrived: None,
    ) -> list[StoreRecord[B]]:
        """Write a record with `body` and return the records of all ranks, by rank; each rank calls it.

        `check` raises for a well-formed record that cannot be of this group. `look` is called before each round of
        reading, with the records so far, and raises if waiting is useless. When `deadline` has passed, raises what
        `late` returns for the records so far. An empty value counts as no record.
        """
        mine = self.record(body)
        self.store.set(self.key(what, self.rank), mine.pack(self._token))
        arrived = {self.rank: mine}  # never read back: another process may have overwritten it
        each = time.monotonic() + _EACH_SECONDS

        def complete() -> bool:
            nonlocal each
            look(arrived)
            keys = {rank: self.key(what, rank) for rank in missing(arrived, self.world_size)}
            now = time.monotonic()
            answers: Iterable[tuple[int, bytes | None]] = ()
            if now >= each or deadline.passed:
                each = now + _EACH_SECONDS
                answers = ((rank, self.store.read(key)) for rank, key in keys.items())
            elif keys and self.store.check(*keys.values()):
                answers = zip(keys, self.store.get_all(list(keys.values())), strict=True)
            for rank, data in answers:
                if data:
                    record = records.parse(data, type(body), self.generation, rank, self._token)
                    check(record)
                    arrived[rank] = record
            return len(arrived) == self.world_size

        if not poll(complete, deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            raise late(arrived)
        return [arrived[rank] for rank in range(self.world_size)]

    def abort(self, kind: str, text: str) -> None:
        """Publish why this rank aborts the generation, for the ranks that wait for it. The first failure stays."""
        if not self.aborted():
            failure = self.record(Failure(os.getpid(), kind, text))
            self.store.set(self.failed_key(), failure.pack(self._token))

    def aborted(self, generation: int = 0) -> bool:
        """Whether a rank has aborted `generation` (0: this one)."""
        return self.store.check(self.failed_key(generation))

    def raise_if_aborted(self, name: str, kinds: Sequence[type[TricommError]] = ()) -> None:
        """Raises the failure of the rank that has aborted this generation of `name`.

        Its class is the one that the failure names, if that is among `kinds`, otherwise `RendezvousError`.
        """
        data = self.store.read(self.failed_key())
        if data is not None:
            failed = records.parse(data, Failure, self.generation, None, self._token)
            kind = next((kind for kind in kinds if kind.__name__ == failed.body.kind), RendezvousError)
            raise kind(
                f"{name} {self.generation} was aborted by rank {failed.rank} of {failed.world_size} "
                f"(pid {failed.body.pid}): {failed.body.text}"
            )

    def record(self, body: B) -> StoreRecord[B]:
        """A record of this rank in this generation."""
        return StoreRecord(self.rank, self.world_size, self.generation, self.nonce, body)

    def earlier(self, what: str, kind: type[B], generation: int, rank: int | None = None) -> StoreRecord[B] | None:
        """The record that a process of `rank` (None: this one) has written in `generation`, if there is one."""
        rank = self.rank if rank is None else rank
        data = self.store.read(self.key(what, rank, generation))
        return records.parse(data, kind, generation, rank, self._token) if data else None

    def counter(self, rank: int) -> str:
        return f"{self._keys}/{rank}/generation"

    def key(self, what: str, rank: int, generation: int = 0) -> str:
        return f"{self._keys}/{generation or self.generation}/{what}/{rank}"

    def failed_key(self, generation: int = 0) -> str:
        return f"{self._keys}/{generation or self.generation}/failed"


def missing(arrived: Mapping[int, object], world_size: int) -> list[int]:
    """Ranks whose record does not exist."""
    return [rank for rank in range(world_size) if rank not in arrived]
