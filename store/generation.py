"""The generation of a group: a name that its ranks agree on over a Store, and that no earlier process can have written.

    set  tricomm/<name>/rank/<rank>       this rank's process, with a fresh nonce; empty once it has left
    set  tricomm/<name>/agreed/<rank>     a digest of the records of all ranks, as this rank has read them
    set  tricomm/<name>/left/<rank>       how the set-up of its last process ended, with the nonces that it knew
    set  tricomm/<name>/left/other        the same of a process without a valid rank, or whose rank another has taken
    set  tricomm/<name>/leaving           the nonce of the last process that left and stops others (`departures.py`)
    set  tricomm/<name>/generation        the generation that was set up last, so that its keys can be deleted
    ...  tricomm/<name>/<generation>/...  what the group writes

A process overwrites the record of an earlier process of its rank. A rank reads until the digests of all ranks equal
its own: a rank that wrote an equal digest has read this process's record. So the ranks meet whatever keys earlier
processes left, at whatever step those ended, and however often a rank has tried.

Until the ranks are connected, `look` tells a rank that a process has ended or that a rank has left.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import PeerDied, RendezvousError, ResourceError
from tricomm.store import departures, process, records
from tricomm.store.bounded_store import BoundedStore, server_is_gone
from tricomm.store.departures import NOBODY, USUAL, Departure, Ending, Rules
from tricomm.store.records import NONCE_BYTES, B, Capabilities, ExchangeMessage, MessageHeader, RankRecord, StoreRecord

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 0.02
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # for what an ended process wrote just before, and to tell the others of a failure
_END_SECONDS = 1.0
_GONE = (RendezvousError, ResourceError)  # the store does not answer, or no thread can ask it
_OTHER = "other"


M = TypeVar("M", bound=Capabilities | RankRecord)  # a record of a rank's process


class Generation(Generic[M]):
    """One rank's part in a generation. `name` separates its keys from other groups' keys.

    rank, world_size   this rank, and how many there are
    nonce, nonces      of this rank's record; once the ranks have agreed, of all ranks' records
    deadline           the end of the set-up, `timeout` seconds from now
    members            the ranks' processes, by rank; before the ranks have agreed, also the processes in `known`, so
                       that the end of one that has not written its record is noticed
    name, store        once the ranks have agreed: the generation's name, and the store for the group's own keys
    """

    name: str
    store: Store

    def __init__(
        self,
        store: Store,
        name: str,
        kind: type[M],
        rank: int,
        world_size: int,
        timeout: float,
        known: Mapping[int, M] | None = None,
        rules: Rules = USUAL,
    ) -> None:
        """`kind` is the class of the ranks' records."""
        self.rank, self.world_size = rank, world_size
        self.members: dict[int, M] = dict(known or {})
        self.deadline = Deadline(timeout)
        self.nonce, self.nonces = secrets.token_bytes(NONCE_BYTES), list[bytes]()
        self._kind, self._timeout, self._token = kind, timeout, env.token()
        self._prefix = f"rank {rank} of {world_size}: " if rules.prefix is None else rules.prefix
        self._rules, self._state = rules, rules.state
        self._others = [r for r in range(world_size) if r != rank]
        self._root = PrefixStore(f"tricomm/{name}", store)
        self._opened: BoundedStore | None = None
        self._seen: dict[int, StoreRecord[M]] = {}
        self._agreed: dict[int, bytes] = {}  # the digests that the others have written
        self._digest = b""
        self._gone: dict[int, float] = {}  # rank: when its process was seen to have ended
        self._noticed: dict[int, bytes] = {}  # the nonces of the ranks that were present then
        self._earlier: set[bytes] = set()  # nonces that an earlier process of this rank knew
        self._old: dict[bytes, str] = {}  # nonces of earlier groups that are still in the store: nonce -> whose it is
        self._before: Departure | None = None  # of this rank's last process
        self._successor = b""  # the nonce of a later process that has taken this rank
        # another rank's record is unreadable, so that rank cannot read this rank's reason either
        self._unreadable = False
        self._leaving: bytes | None = None
        self._next_look = 0.0
        self._timed_out = self._told = self._given_up = self._settled = self._left = False

    # Agreeing

    def agree(self, own: Callable[[], M], check: Callable[[StoreRecord[M]], None] = lambda record: None) -> list[M]:
        """Agree on the generation; each rank calls it. Returns the processes of all ranks, by rank.

        `own` makes this rank's record, and `check` is called for each record that is read. Their errors are raised
        here, and told to all ranks at once. Raises `RendezvousError` if a rank is late or is not of this group; also
        raises as `look` does.
        """
        self._check = check
        try:
            if not 0 <= self.rank < self.world_size:
                raise RendezvousError(
                    f"rank {self.rank} is not in 0..{self.world_size - 1}: give each rank its own number"
                )
            self._before = self._departure(self.rank)
            self._earlier.update(self._before.known if self._before else ())
            # If this rank had an earlier process, other processes that have ended were in that one's group, not in this
            # one.
            replaces = bool(self._calls.read(f"rank/{self.rank}"))
            found = self._read("rank", self._others, each=True)
            mine = self._seen[self.rank] = self._record(own())
            self._calls.set(f"rank/{self.rank}", mine.pack(self._token))
            self._take(found, lambda record: replaces or record.nonce in self._earlier)
            if not poll(self._complete, self.deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
                raise self._late()
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            del self._check  # it may refer to the owner of this object, and keep that alive
        self._release()
        self.name = self._digest[:NONCE_BYTES].hex()
        self.store = PrefixStore(self.name, self._root)
        self.members = {r: self._seen[r].body for r in range(self.world_size)}
        self.nonces = [self._seen[r].nonce for r in range(self.world_size)]
        return list(self.members.values())

    def _complete(self) -> bool:
        self._take(self._read("rank", [*self._unconfirmed(), self.rank]))
        if len(self._seen) == self.world_size:
            packed = b"".join(self._seen[r].pack(self._token) for r in range(self.world_size))
            digest = hashlib.sha256(packed).digest()
            if digest != self._digest:
                self._digest = digest
                said = self._record(ExchangeMessage(1, "generation", digest))
                self._calls.set(f"agreed/{self.rank}", said.pack(self._token))
            for rank, data in self._read("agreed", self._unconfirmed()):
                self._agreed[rank] = self._parse(data, ExchangeMessage, rank).body.payload
            if not self._unconfirmed():
                return True
        self.look()
        return False

    def _unconfirmed(self) -> list[int]:
        return [r for r in self._others if not self._digest or self._agreed.get(r) != self._digest]

    def _take(
        self, found: list[tuple[int, bytes]], old: Callable[[StoreRecord[M]], bool] = lambda record: False
    ) -> None:
        """Take these ranks' records; ignore a record for which `old` is true and whose process has ended."""
        for rank, data in found:
            self._unreadable = True
            record = self._parse(data, self._kind, rank)
            known = self._seen.get(rank)
            if record.nonce in self._old or known is not None and record.nonce == known.nonce:
                pass
            elif rank == self.rank:
                self._successor = record.nonce
                raise RendezvousError(
                    f"duplicate rank: pid {record.body.pid} says that it is rank {rank}, and so does this one, pid "
                    f"{os.getpid()}: give each process its own rank, and each group its own store"
                )
            elif old(record) and self._state(record.body) == process.ENDED:
                self._old[record.nonce] = f"pid {record.body.pid}, which was rank {rank} before, has ended"
            elif record.world_size != self.world_size:
                raise RendezvousError(
                    f"rank {rank} says that the world size is {record.world_size}, rank {self.rank} of "
                    f"{self.world_size} says {self.world_size}: give all ranks one size, each group its store"
                )
            else:
                self._unreadable = False
                self._check(record)
                self._seen[rank] = record
                self._gone.pop(rank, None)
            self._unreadable = False

    def _late(self) -> RendezvousError:
        self._timed_out = True
        seen = {r: self._seen[r].body for r in self._unconfirmed() if r in self._seen}
        missing = [r for r in self._others if r not in self._seen] or list(seen)
        words = [f"pid {m.pid}, rank {r}, is stopped" for r, m in seen.items() if self._state(m) == process.STOPPED]
        words += filter(None, self._old.values())
        taken = self._before if self._before and self._before.ending == Ending.CONNECTED else None
        if taken and taken.pid != os.getpid() and process.start_time(taken.pid):
            words.append(f"pid {taken.pid}, which was rank {self.rank} before, still runs: is the number taken?")
            if len(self._seen) == 1:  # no rank waits for this process, so the other group is not disturbed
                self._told, self._successor = True, taken.nonce
        return RendezvousError(
            f"{self._prefix}timeout after {self._timeout:g} s: rank(s) {missing} did not come to make the group"
            f"{''.join(f' ({word})' for word in words)}; do all ranks run, and make their groups in the same order?"
        )

    # For use until the ranks are connected

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Exchange `data` under the generation's name; each rank calls it. Returns the data of all ranks, by rank.

        Raises as `look` does, and `RendezvousError` that names the ranks whose data are late.
        """
        heard = {self.rank: data}
        prefix, purpose = f"{self.name}/{what}", f"{self.name} {what}"
        self._calls.set(f"{prefix}/{self.rank}", self._header(purpose, self.rank).seal(data, self._token))

        def complete() -> bool:
            for rank, sealed in self._read(prefix, [r for r in self._others if r not in heard]):
                heard[rank] = self._header(purpose, rank).open(sealed, self._token)
            if len(heard) < self.world_size:
                self.look()
            return len(heard) == self.world_size

        if not poll(complete, self.deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            raise self._over(f"the {what} of rank(s) {[r for r in self._others if r not in heard]} did not come")
        return [heard[rank] for rank in range(self.world_size)]

    def limit(self, seconds: float) -> None:
        """End the set-up `seconds` from now if its deadline is later."""
        if self.deadline.left > seconds:
            self._timeout, self.deadline = seconds, Deadline(seconds)

    def wait(self, done: Callable[[float], bool], what: str) -> None:
        """Return when `done(seconds)` returns true; it waits for `seconds` at most.

        Raises as `look` does, and `RendezvousError` that names `what` when the time is up.
        """
        while not done(min(_LOOK_SECONDS, self.deadline.left)):
            self.look()
            if self.deadline.passed:
                raise self._over(what)

    def _over(self, what: str) -> RendezvousError:
        return RendezvousError(f"{self._prefix}making the group: timeout after {self._timeout:g} s: {what}")

    def look(self) -> None:
        """Raises `PeerDied` if a rank's process has ended. If a rank that has left stops this one (`departures`),
        raises its reason."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        self._rules.on_look()
        self._raise_if_told()
        processes = self.members | {rank: record.body for rank, record in self._seen.items()}
        for rank in self._others:
            if rank in processes and self._state(processes[rank]) == process.ENDED and rank not in self._gone:
                self._gone[rank] = now
                self._noticed = {r: record.nonce for r, record in self._seen.items()}
        gone = sorted(rank for rank, since in self._gone.items() if now - since >= _GRACE_SECONDS)
        if gone:
            pids = ", ".join(str(processes[rank].pid) for rank in gone)
            raise PeerDied(f"{self._prefix}making the group: the process of rank(s) {gone} (pid {pids}) has ended")

    def explain(self) -> None:
        """Called after a failure: calls `look` for a second, because the cause may become visible a moment later."""

        def looked() -> bool:
            self.look()
            return False

        poll(looked, min(2 * _GRACE_SECONDS, self.deadline.left + _GRACE_SECONDS), _LOOK_SECONDS)

    def give_up(self, error: BaseException) -> None:
        """Leave the set-up, and tell the ranks that stop with this one (`departures`); idempotent."""
        if not self._given_up:
            self._given_up = True
            with suppress(*_GONE):  # the caller's own error matters more
                if self._calls.usable:
                    self._calls.extend(_GRACE_SECONDS)
                    self._leave(error)
        self._release()

    def _leave(self, error: BaseException) -> None:
        agreed = hasattr(self, "name")
        end = departures.ending(error, self._told, agreed, self._rules.strict)
        own = {self.rank: self._successor or self.nonce}
        known = {r: record.nonce for r, record in self._seen.items()} | own
        if end == Ending.TOLD_ALL:
            for rank, data in self._read("rank", [r for r in self._others if r not in known], each=True):
                with suppress(RendezvousError):
                    known[rank] = self._parse(data, self._kind, rank).nonce
            for rank in [r for r in self._others if self._timed_out and r not in known]:
                left = self._departure(rank)  # a rank that has joined and left need not be told on its next try
                if left is not None and left.ending != Ending.CONNECTED:
                    known[rank] = left.nonce
        told = self._noticed | own if isinstance(error, PeerDied) and not agreed else known
        by_rank = [told.get(r, NOBODY) for r in range(self.world_size)]
        others = {*known.values(), self.nonce, *self._old} - {*by_rank}
        self._put_departure(end, [*by_rank, *others], *departures.reason(error, self.rank))
        if end >= Ending.TOLD:
            self._calls.set("leaving", self.nonce)
        mine = self._seen.get(self.rank)
        # A rank that cannot read this rank's reason has to find the same reason when it reads this rank's record.
        if mine is not None and not self._unreadable:
            if self._calls.read(f"rank/{self.rank}") == mine.pack(self._token):
                self._calls.set(f"rank/{self.rank}", b"")

    def _put_departure(self, end: Ending, known: Sequence[bytes], kind: str = "", text: str = "") -> None:
        mine = Departure(end, self.rank, self.world_size, os.getpid(), self.nonce, tuple(known), kind, text)
        who = self.rank if self.rank in range(self.world_size) and not self._successor else _OTHER
        self._calls.set(f"left/{who}", mine.seal(self._left_header(who), self._token))

    def _departure(self, who: int | str) -> Departure | None:
        """The last departure of rank `who`, or of `_OTHER` processes, if this rank can read it."""
        data = self._calls.read(f"left/{who}")
        with suppress(RendezvousError):  # it is of a group with another token or world size
            return Departure.open(data, self._left_header(who), self._token) if data else None
        return None

    def _left_header(self, who: int | str) -> MessageHeader:
        return self._header("left", who) if isinstance(who, int) else MessageHeader(0, 1, 1, f"left {who}")

    def _raise_if_told(self) -> None:
        leaving = self._calls.read("leaving")
        if leaving == self._leaving:
            return
        everyone: list[int | str] = [*self._others, _OTHER]
        told = []
        for left in filter(None, map(self._departure, everyone)):
            if left.ending >= Ending.TOLD and left.nonce != self.nonce:
                self._old.setdefault(left.nonce, "")
                told += [left] * left.stops(self.rank, self.nonce, self._earlier)
        if told:
            self._told = True
            kind = next((kind for kind in self._rules.kinds if kind.__name__ == told[0].kind), RendezvousError)
            raise kind(
                f"{self._prefix}making the group was aborted by rank {told[0].rank} of {told[0].world_size} "
                f"(pid {told[0].pid}): {told[0].text}"
            )
        self._leaving = leaving

    # Afterwards

    def settle(self, shared: bool = False) -> None:
        """Delete the keys that only the set-up needs, and those of an earlier generation, unless other groups of this
        name use the store (`shared`). All ranks are connected, so none reads the keys any more."""
        self._settled = True
        with suppress(*_GONE):
            # A rank may die before it deletes its record; later generations must not take it for a record of theirs.
            self._put_departure(Ending.CONNECTED, self.nonces)
            for what in ("rank", "agreed"):
                self._calls.delete(f"{what}/{self.rank}")
            if self.rank == 0:
                self._calls.delete(f"left/{_OTHER}")
            if self.rank == 0 and not shared:
                before = self._calls.read("generation")
                if before and before != self.name.encode():
                    self._calls.delete_all(lambda first: first != self.name and len(first) == len(self.name))
                self._calls.set("generation", self.name.encode())
        self._release()

    def end(self) -> None:
        """End the group on this rank; the last rank deletes all its keys. Idempotent, takes a second at most."""
        if self._left:
            return
        self._left = True
        if server_is_gone(self._root):
            return
        with suppress(*_GONE), closing(BoundedStore(self._root, _END_SECONDS)) as calls:
            if calls.add(f"{self.name}/left", 1) == self.world_size:
                rest = (self.name, "left") if self._settled else (self.name, "left", "rank", "agreed")
                calls.delete_all(lambda first: first in rest)
                if calls.read("generation") == self.name.encode():
                    calls.delete("generation")

    # Keys and records

    @property
    def _calls(self) -> BoundedStore:
        if self._opened is None:
            self._opened = BoundedStore(self._root, self.deadline.left + _GRACE_SECONDS)
        return self._opened

    def _release(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _read(self, what: str, ranks: list[int], each: bool = False) -> list[tuple[int, bytes]]:
        return self._calls.present({rank: f"{what}/{rank}" for rank in ranks}, each or self.deadline.passed)

    def _record(self, body: B) -> StoreRecord[B]:
        return StoreRecord(self.rank, self.world_size, self.nonce, body)

    def _parse(self, data: bytes, kind: type[B], rank: int) -> StoreRecord[B]:
        return records.parse(data, kind, rank, self._token)

    def _header(self, what: str, rank: int) -> MessageHeader:
        return MessageHeader(rank, self.world_size, 1, what)
