"""What the nodes of a group tell each other through the Store while it lives: faults, heartbeats, and waiting calls.

    set  tricomm/nodes/<generation>/failed           why the group is aborted, as a record; the first one counts
    set  tricomm/nodes/<generation>/<what>/<node>    the latest record of that kind of a node

The methods block if the Store does, so they run on a thread that can be left behind. All raise `RendezvousError` for a
record of another group; a Store that is gone raises errors of its own.
"""

from __future__ import annotations

import os
from typing import cast

from torch.distributed.distributed_c10d import Store

from tricomm import env
from tricomm.errors import RendezvousError
from tricomm.store import records
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.gather import Gathering
from tricomm.store.records import B, ExchangeMessage, Failure, StoreRecord

_NAME = "nodes"


class NodeReports:
    """One rank's reports. All ranks create theirs in the same order; `nonce` is the group's. `timeout` (seconds) limits
    the constructor only."""

    def __init__(self, store: Store, rank: int, world_size: int, nonce: bytes, timeout: float) -> None:
        bounded = BoundedStore(store, timeout)
        try:
            gathering = Gathering(bounded, _NAME, rank, world_size, nonce)
            gathering.begin()
        finally:
            bounded.close()
        self._store, self._rank, self._world_size, self._nonce = store, rank, world_size, nonce
        self._generation, self._token = gathering.generation, env.token()
        self._keys = f"tricomm/{_NAME}/{self._generation}"

    def fail(self, culprit: int, kind: str, text: str) -> None:
        """Publish why the group is aborted, unless a reason is there already; `kind` is the name of an error class."""
        key = f"{self._keys}/failed"
        if not self._store.check([key]):
            self._set(key, culprit, Failure(os.getpid(), kind, text))

    def failure(self) -> tuple[int, str, str] | None:
        """The rank at fault, the name of the error class, and the text; None if there is no fault."""
        record = self._get(f"{self._keys}/failed", Failure)
        return None if record is None else (record.rank, record.body.kind, record.body.text)

    def write(self, what: str, node: int, number: int, text: bytes = b"") -> None:
        """Publish the latest `what` of a node."""
        self._set(f"{self._keys}/{what}/{node}", self._rank, ExchangeMessage(number, what, text))

    def read(self, what: str, node: int) -> ExchangeMessage | None:
        """The latest `what` of a node; None before its first."""
        record = self._get(f"{self._keys}/{what}/{node}", ExchangeMessage)
        return None if record is None else record.body

    def _set(self, key: str, rank: int, body: ExchangeMessage | Failure) -> None:
        record = StoreRecord(rank, self._world_size, self._generation, self._nonce, body)
        self._store.set(key, cast(str, record.pack(self._token)))

    def _get(self, key: str, kind: type[B]) -> StoreRecord[B] | None:
        if not self._store.check([key]):
            return None
        record = records.parse(bytes(self._store.get(key)), kind, self._generation, None, self._token)
        if record.nonce != self._nonce or not 0 <= record.rank < self._world_size:
            raise RendezvousError(f"the store's {key!r} is of another group; does something else use this store?")
        return record
