"""How the ranks of a group and new ranks, which take the places of lost ones, find each other in a store.

    set  tricomm-replace/number        of the present attempt of the group's ranks; empty between attempts
    ...  tricomm-replace/<number>/...  its handshake

Each attempt has its own keys, so keys that an earlier attempt has left do not disturb it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from tricomm.deadline import Deadline, poll
from tricomm.errors import RendezvousError
from tricomm.store.bounded_store import BoundedStore

_KEY = "number"
_PAUSES = 2e-3, 0.05
_END_SECONDS = 1.0
T = TypeVar("T")


class MeetingOver(RendezvousError):
    """The attempt is over, and this process does not know why: it may join the next one."""


class Meetings:
    """The attempts of one group over `store`."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("tricomm-replace", store)
        self._number = ""

    def call(self, nonce: bytes, announces: bool, seconds: float) -> Store:
        """The store for an attempt of ranks that have agreed on the secret `nonce`; one of them announces it."""
        self._number = hashlib.sha256(nonce).hexdigest()
        if announces:
            with closing(BoundedStore(self._store, seconds)) as calls:
                calls.set(_KEY, self._number.encode())
        return PrefixStore(self._number, self._store)

    def end(self) -> None:
        """End the attempt. Idempotent; takes a second at most."""
        if self._number:
            with suppress(RendezvousError), closing(BoundedStore(self._store, _END_SECONDS)) as calls:
                if calls.read(_KEY) == self._number.encode():
                    calls.set(_KEY, b"")

    def come(self, rank: int, meet: Callable[[Store, float, Callable[[], None]], T], seconds: float) -> T:
        """Join an attempt: the result of `meet`, which gets the attempt's store, the seconds that are left, and a
        function to call periodically. Raises the errors of `meet`, and `RendezvousError` if there is no attempt in
        which no other process has joined as `rank` before."""
        deadline, taken = Deadline(seconds), ""
        with closing(BoundedStore(self._store, seconds + _END_SECONDS)) as calls:

            def begun() -> bool:
                self._number = (calls.read(_KEY) or b"").decode(errors="ignore")
                return bool(self._number)

            def over() -> bool:
                return calls.read(_KEY) != self._number.encode()

            while poll(begun, deadline.left, *_PAUSES):
                if calls.add(f"{self._number}/taken/{rank}", 1) > 1:
                    taken = f" again after another process had come for rank {rank}"
                    if poll(over, deadline.left, *_PAUSES):
                        continue
                    break
                with suppress(MeetingOver):
                    place = PrefixStore(self._number, self._store)
                    return meet(place, max(deadline.left, 1e-3), _Look(calls, self._number))
        raise RendezvousError(f"timeout after {seconds:g} s: the ranks of the group did not call replace{taken}")


class _Look:
    """Raises `MeetingOver` once the attempt is over, but only at the second look, so that the reason is read first."""

    def __init__(self, calls: BoundedStore, number: str) -> None:
        self._calls, self._number, self._over = calls, number.encode(), False

    def __call__(self) -> None:
        if self._over:
            raise MeetingOver("the attempt is over")
        self._over = self._calls.read(_KEY) != self._number
