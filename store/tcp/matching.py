"""Which receive takes which message: by source and tag, in the order of the receives and of the messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")

FIRST_OWN_TAG = 1 << 30  # a user's tags are below
HANDSHAKE = FIRST_OWN_TAG + 1
ANY = -1  # the source of a receive that takes a message of any rank
BYTES = 0  # the code of data without a type


class Waiter(Protocol):
    """A wait for messages."""

    def finished(self, message: Transfer) -> None: ...


class Transfer:
    """One side of a message, which is sent or received, until `done`.

    rank    the peer, or `ANY`; once a message has come, its source
    parts   the caller's memory: of a receive, one part
    keep    owns that memory
    dtype   the code of its type
    loose   of a receive: a shorter message fits, too, and a longer one is cut off
    error   why the message did not arrive or was not sent
    misfit  bytes and type of the message that came, if it does not fit; it is consumed
    """

    __slots__ = (
        "any", "done", "dtype", "error", "keep", "loose", "misfit", "number", "parts", "rank", "tag", "waiters"
    )  # fmt: skip

    def __init__(
        self, rank: int, tag: int, parts: tuple[memoryview, ...], dtype: int = BYTES, loose: bool = False
    ) -> None:
        self.rank, self.tag, self.parts, self.dtype, self.loose = rank, tag, parts, dtype, loose
        self.any = rank == ANY
        self.keep: Any = None
        self.number = 0
        self.done = False
        self.error: Exception | None = None
        self.misfit: tuple[int, int] | None = None
        self.waiters: list[Waiter] = []

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts))

    def room(self, nbytes: int, dtype: int) -> memoryview | None:
        """The memory for a message of `nbytes`; None, and a `misfit`, if it does not fit."""
        room = self.parts[0]
        if self.loose:
            return room[:nbytes]
        if len(room) == nbytes and self.dtype == dtype:
            return room
        self.misfit = nbytes, dtype
        return None

    def finish(self, error: Exception | None = None) -> None:
        """It is done, or has failed with `error`; the first one counts."""
        if not self.done:
            self.done, self.error = True, error
            for waiter in self.waiters:
                waiter.finished(self)


class Arrival:
    """A message that arrives before its receive.

    data     its bytes; None if the sender waits for the receive
    message  the receive that takes it, if the last byte has not arrived
    """

    __slots__ = ("complete", "data", "dtype", "id", "message", "nbytes", "number", "rank")

    def __init__(self, rank: int, dtype: int, nbytes: int, id: int, data: bytearray | None, number: int) -> None:
        self.rank, self.dtype, self.nbytes, self.id, self.data, self.number = rank, dtype, nbytes, id, data, number
        self.complete = False
        self.message: Transfer | None = None

    def deliver(self, message: Transfer) -> None:
        """Give the bytes, all of which have come, to `message`."""
        assert self.data is not None, "the bytes have come"
        message.rank = self.rank
        room = message.room(self.nbytes, self.dtype)
        if room is not None:
            room[:] = self.data if len(room) == self.nbytes else self.data[: len(room)]
        message.finish()


class Matching:
    """The receives and the messages of one group that have not met. The caller holds the group's lock."""

    def __init__(self) -> None:
        self._receives: dict[tuple[int, int], deque[Transfer]] = {}
        self._arrivals: dict[tuple[int, int], deque[Arrival]] = {}
        self._number = 0
        self.from_any = 0  # receives from any rank

    def receive(self, message: Transfer, ranks: Iterable[int]) -> Arrival | None:
        """The message of one of `ranks` that the receive `message` takes; if there is none, the receive is kept."""
        self._number += 1
        message.number = self._number
        if self._arrivals:
            found = [queue[0] for rank in ranks if (queue := self._arrivals.get((rank, message.tag)))]
            if found:
                first = min(found, key=lambda arrival: arrival.number)
                return _pop(self._arrivals, (first.rank, message.tag))
        self._receives.setdefault((message.rank, message.tag), deque()).append(message)
        self.from_any += message.any
        return None

    def arrive(self, rank: int, tag: int) -> Transfer | None:
        """The receive that takes the next message of `rank` with `tag`."""
        key, of_any = (rank, tag), (ANY, tag)
        if self.from_any and of_any in self._receives:
            own = self._receives.get(key)
            if own is None or self._receives[of_any][0].number < own[0].number:
                self.from_any -= 1
                message = _pop(self._receives, of_any)
                message.rank = rank
                return message
        return _pop(self._receives, key) if key in self._receives else None

    def keep(self, rank: int, tag: int, dtype: int, nbytes: int, id: int, data: bytearray | None) -> Arrival:
        """Keep a message without a receive."""
        self._number += 1
        arrival = Arrival(rank, dtype, nbytes, id, data, self._number)
        self._arrivals.setdefault((rank, tag), deque()).append(arrival)
        return arrival

    def withdraw(self, rank: int) -> list[Transfer]:
        """The receives from `rank`, or `ANY`, which end: no message will come."""
        keys = [key for key in self._receives if key[0] == rank]
        if rank == ANY:
            self.from_any = 0
        return [message for key in keys for message in self._receives.pop(key)]


def _pop(queues: dict[tuple[int, int], deque[_T]], key: tuple[int, int]) -> _T:
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
