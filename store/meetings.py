"""How the ranks of a group and new ranks, which take the places of lost ones, find each other in a store.

    set  tricomm-replace/number        of the present attempt of the group's ranks, and the places of new ones; empty
                                       between attempts
    ...  tricomm-replace/<number>/...  its handshake

Each attempt has its own keys, so keys that an earlier attempt has left do not disturb it. When it is over, the rank
that has announced it deletes those of the earlier ones, which nobody reads any more.
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
        self._said = b""  # the number of the attempt, and its places
        self._earlier: set[str] = set()

    def call(self, nonce: bytes, places: list[int], announces: bool, seconds: float) -> Store:
        """The store for an attempt of ranks that have agreed on the secret `nonce`; one of them announces it. `places`
        are those of its new ranks."""
        number = hashlib.sha256(nonce).hexdigest()
        self._said = " ".join((number, *map(str, places))).encode()
        if announces:
            with closing(BoundedStore(self._store, seconds)) as calls:
                self._earlier = {key.partition("/")[0] for key in calls.keys()} - {_KEY}
                calls.set(_KEY, self._said)
        return PrefixStore(number, self._store)

    def end(self) -> None:
        """End the attempt. Idempotent; takes a second at most."""
        if self._said:
            with suppress(RendezvousError), closing(BoundedStore(self._store, _END_SECONDS)) as calls:
                if calls.read(_KEY) == self._said:
                    calls.set(_KEY, b"")
                if self._earlier:
                    calls.delete_all(self._earlier.__contains__)

    def come(self, rank: int, meet: Callable[[Store, float, Callable[[], None]], T], seconds: float) -> T:
        """Join an attempt: the result of `meet`, which gets the attempt's store, the seconds that are left, and a
        function to call periodically. Raises the errors of `meet`, and `RendezvousError` if there is no attempt with a
        place for `rank` that no other process has taken before."""
        deadline, why = Deadline(seconds), ""
        with closing(BoundedStore(self._store, seconds + _END_SECONDS)) as calls:

            def begun() -> bool:
                self._said = calls.read(_KEY) or b""
                return bool(self._said)

            def over() -> bool:
                return calls.read(_KEY) != self._said

            while poll(begun, deadline.left, *_PAUSES):
                number, *places = self._said.decode(errors="ignore").split()
                if str(rank) not in places:
                    why = f" for rank {rank}; they made the group again with new rank(s) [{', '.join(places)}]"
                elif calls.add(f"{number}/taken/{rank}", 1) > 1:
                    why = f" again after another process had come for rank {rank}"
                else:
                    with suppress(MeetingOver):
                        place = PrefixStore(number, self._store)
                        return meet(place, max(deadline.left, 1e-3), _Look(calls, self._said))
                if not poll(over, deadline.left, *_PAUSES):
                    break
        raise RendezvousError(f"timeout after {seconds:g} s: the ranks of the group did not call replace{why}")


class _Look:
    """Raises `MeetingOver` once the attempt is over, but only at the second look, so that the reason is read first."""

    def __init__(self, calls: BoundedStore, said: bytes) -> None:
        self._calls, self._said, self._over = calls, said, False

    def __call__(self) -> None:
        if self._over:
            raise MeetingOver("the attempt is over")
        self._over = self._calls.read(_KEY) != self._said
