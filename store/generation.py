"""The generation of a group: a name that its ranks agree on over a Store, and that no earlier process can have written.

    set  tricomm/<name>/rank/<rank>       this rank's process, with a fresh nonce; empty once it has given up
    set  tricomm/<name>/agreed/<rank>     a digest of the records of all ranks, as this rank has read them
    set  tricomm/<name>/met/<rank>        the nonces that this rank knew when it gave up, or was connected
    set  tricomm/<name>/failed/<rank>     why it gave up, if the others cannot find out
    set  tricomm/<name>/failing           the nonce of the last rank that wrote such a reason
    set  tricomm/<name>/generation        the generation that was set up last, so that its keys can be deleted
    ...  tricomm/<name>/<generation>/...  what the group writes

A process overwrites the record of an earlier process of its rank. A rank reads until the digests of all ranks equal
its own: a rank that wrote an equal digest has read this process's record. How often a rank has tried before does not
matter, so the ranks meet whatever keys earlier processes left, and at whatever step those ended.

Until the ranks are connected, `look` tells a rank that a process has ended or that a rank has given up.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

from torch._C._distributed_c10d import PrefixStore, Store

from tricomm import env
from tricomm.deadline import Deadline, poll
from tricomm.errors import CollectiveTimeout, GroupAborted, PeerDied, PeerStalled, RendezvousError, ResourceError
from tricomm.store import process, records
from tricomm.store.bounded_store import BoundedStore, server_is_gone
from tricomm.store.records import NONCE_BYTES, B, Capabilities, ExchangeMessage, Failure, MessageHeader, StoreRecord

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 2e-4, 0.02
_EACH_SECONDS = 0.05  # between reads of single keys: some may exist before all do
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 0.5  # for what an ended process wrote just before, and to tell the others of a failure
_END_SECONDS = 1.0
_NOBODY = bytes(NONCE_BYTES)
_GONE = (RendezvousError, ResourceError)  # the store does not answer, or no thread can ask it
# Errors that all ranks of a group see; any other error concerns one rank alone.
_COMMON = (RendezvousError, PeerDied, PeerStalled, CollectiveTimeout, GroupAborted)


class Generation:
    """One rank's part in a generation. `name` keeps its keys apart from those of others.

    rank, world_size   this rank, and how many there are
    deadline           the end of the set-up, `timeout` seconds from now
    members            the ranks' processes, by rank; until the ranks have agreed, those in `known`, so that
                       a process is noticed that ends before it has written its record
    name, store        once the ranks have agreed: the generation's name, and the store for the group's own keys
    """

    name: str
    store: Store

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world_size: int,
        timeout: float,
        known: Mapping[int, Capabilities] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.members: dict[int, Capabilities] = dict(known or {})
        self.deadline = Deadline(timeout)
        self._timeout, self._token, self._nonce = timeout, env.token(), secrets.token_bytes(NONCE_BYTES)
        self._who = f"rank {rank} of {world_size}: making the group"
        self._others = [r for r in range(world_size) if r != rank]
        self._root = PrefixStore(f"tricomm/{name}", store)
        self._opened: BoundedStore | None = None
        self._seen: dict[int, StoreRecord[Capabilities]] = {}
        self._agreed: dict[int, bytes] = {}  # the digests that the others have written
        self._digest = b""
        self._gone: dict[int, float] = {}  # rank: when its process was seen to have ended
        self._noticed: dict[int, bytes] = {}  # the nonces of the ranks that were there then
        self._earlier: set[bytes] = set()  # nonces that an earlier process of this rank knew
        self._old: dict[bytes, str] = {}  # nonces of earlier groups that are still in the store: nonce -> whose it is
        self._failing: bytes | None = None
        self._each = self._next_look = 0.0
        self._given_up = self._settled = self._left = False

    # Agreeing

    def agree(self, own: Callable[[], Capabilities]) -> list[Capabilities]:
        """The processes of all ranks, by rank, once they agree on the generation; each rank calls it.

        An error of `own` is raised here, and told to all ranks at once. Raises `RendezvousError` if a rank is late or
        is not of this group; also raises as `look` does.
        """
        try:
            self._earlier.update(self._met(self.rank)[1])
            # If this rank had an earlier process, others that have ended were in its group and not in this one.
            replaces = bool(self._calls.read(self._key("rank", self.rank)))
            self._read_records(self._others, lambda record: replaces or record.nonce in self._earlier)
            mine = self._seen[self.rank] = self._record(own())
            self._calls.set(self._key("rank", self.rank), mine.pack(self._token))
            if not poll(self._complete, self.deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
                raise self._late()
        except BaseException as error:
            self.give_up(error)
            raise
        self._release()
        self.name = self._digest[:16].hex()
        self.store = PrefixStore(self.name, self._root)
        self.members = {r: self._seen[r].body for r in range(self.world_size)}
        return list(self.members.values())

    def _complete(self) -> bool:
        self._read_records([*self._unconfirmed(), self.rank])
        if len(self._seen) == self.world_size:
            packed = b"".join(self._seen[r].pack(self._token) for r in range(self.world_size))
            digest = hashlib.sha256(packed).digest()
            if digest != self._digest:
                self._digest = digest
                said = self._record(ExchangeMessage(1, "generation", digest))
                self._calls.set(self._key("agreed", self.rank), said.pack(self._token))
            for rank, data in self._read("agreed", self._unconfirmed()):
                self._agreed[rank] = self._parse(data, ExchangeMessage, rank).body.payload
            if not self._unconfirmed():
                return True
        self.look()
        return False

    def _unconfirmed(self) -> list[int]:
        return [r for r in self._others if not self._digest or self._agreed.get(r) != self._digest]

    def _read_records(
        self, ranks: list[int], old: Callable[[StoreRecord[Capabilities]], bool] = lambda record: False
    ) -> None:
        """Read the records of `ranks`; ignore a record for which `old` is true and whose process has ended."""
        for rank, data in self._read("rank", ranks):
            record = self._parse(data, Capabilities, rank)
            pid = record.body.pid
            if rank == self.rank:
                if record.nonce != self._nonce:
                    raise RendezvousError(
                        f"{self._who}: pid {pid} says that it is rank {rank}, and so does this one, pid {os.getpid()}: "
                        "give each process its own rank, and each group its own store"
                    )
            elif record.nonce not in self._old and (rank not in self._seen or record.nonce != self._seen[rank].nonce):
                if old(record) and self._state(record.body) == process.ENDED:
                    self._old[record.nonce] = f"pid {pid}, which was rank {rank} before, has ended"
                    continue
                if record.world_size != self.world_size:
                    raise RendezvousError(
                        f"rank {rank} says that the world size is {record.world_size}, rank {self.rank} of "
                        f"{self.world_size} says {self.world_size}: give all ranks one size, each group its store"
                    )
                self._seen[rank] = record
                self._gone.pop(rank, None)

    def _late(self) -> RendezvousError:
        seen = {r: self._seen[r].body for r in self._unconfirmed() if r in self._seen}
        missing = [r for r in self._others if r not in self._seen] or list(seen)
        words = [f"pid {m.pid}, rank {r}, is stopped" for r, m in seen.items() if self._state(m) == process.STOPPED]
        words += filter(None, self._old.values())
        return RendezvousError(
            f"rank {self.rank} of {self.world_size}: timeout after {self._timeout:g} s: rank(s) {missing} did not come "
            f"to make the group{''.join(f' ({word})' for word in words)}; do all of its ranks "
            "run, and make their groups in the same order?"
        )

    # Until the ranks are connected

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """The `data` of all ranks, by rank, under the generation; each rank calls it.

        Raises as `look` does, and `RendezvousError` that names the ranks whose data is late.
        """
        heard = {self.rank: data}
        prefix, purpose = f"{self.name}/{what}", f"{self.name} {what}"
        self._calls.set(self._key(prefix, self.rank), self._header(purpose, self.rank).seal(data, self._token))

        def complete() -> bool:
            for rank, sealed in self._read(prefix, [r for r in self._others if r not in heard]):
                heard[rank] = self._header(purpose, rank).open(sealed, self._token)
            if len(heard) < self.world_size:
                self.look()
            return len(heard) == self.world_size

        if not poll(complete, self.deadline.left, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS):
            raise RendezvousError(
                f"{self._who}: timeout after {self._timeout:g} s: the {what} of rank(s) "
                f"{[r for r in self._others if r not in heard]} did not come"
            )
        return [heard[rank] for rank in range(self.world_size)]

    def limit(self, seconds: float) -> None:
        """End the set-up `seconds` from now if its deadline is later."""
        if self.deadline.left > seconds:
            self._timeout, self.deadline = seconds, Deadline(seconds)

    def wait(self, done: Callable[[float], bool], what: str) -> None:
        """Return when `done(seconds)`, which waits for `seconds` at most, is true.

        Raises as `look` does, and `RendezvousError` that names `what` when the time is up.
        """
        while not done(min(_LOOK_SECONDS, self.deadline.left)):
            self.look()
            if self.deadline.passed:
                raise RendezvousError(f"{self._who}: timeout after {self._timeout:g} s: {what}")

    def look(self) -> None:
        """Raises `PeerDied` if a rank's process has ended. If a rank has given up, raises its reason: `PeerDied` if
        it was one there, else `RendezvousError`."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        self._raise_if_failed()
        processes = self.members | {rank: record.body for rank, record in self._seen.items()}
        for rank in self._others:
            if rank in processes and self._state(processes[rank]) == process.ENDED and rank not in self._gone:
                self._gone[rank] = now
                self._noticed = {r: record.nonce for r, record in self._seen.items()}
        gone = sorted(rank for rank, since in self._gone.items() if now - since >= _GRACE_SECONDS)
        if gone:
            pids = ", ".join(str(processes[rank].pid) for rank in gone)
            raise PeerDied(f"{self._who}: the process of rank(s) {gone} (pid {pids}) has ended")

    def explain(self) -> None:
        """After a failure: calls `look` for a second, because the cause may show a moment later."""

        def looked() -> bool:
            self.look()
            return False

        poll(looked, 2 * _GRACE_SECONDS, _LOOK_SECONDS)

    @staticmethod
    def _state(one: Capabilities) -> str | None:
        near = (one.node, one.pid_namespace) == (process.node_id(), process.pid_namespace())
        return process.state(one.pid, one.start_time) if near else None

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this rank gives up, if they cannot find out themselves; idempotent.

        If a rank is late before the ranks have agreed, the others are not told: each has its own limit, and may try
        again. A rank that was itself told the reason does not repeat it.
        """
        if self._given_up or not self._calls.usable:
            return
        self._given_up = True
        alone, agreed = not isinstance(error, _COMMON), hasattr(self, "name")
        with suppress(*_GONE):  # the caller's own error matters more
            self._calls.extend(_GRACE_SECONDS)
            known = {r: record.nonce for r, record in self._seen.items()} | {self.rank: self._nonce}
            if alone and not agreed:
                with suppress(RendezvousError):
                    for rank, data in self._read("rank", [r for r in self._others if r not in known]):
                        known[rank] = self._parse(data, Capabilities, rank).nonce
            told = self._noticed | {self.rank: self._nonce} if isinstance(error, PeerDied) and not agreed else known
            met = [told.get(r, _NOBODY) for r in range(self.world_size)]
            met += {*known.values(), *self._old} - {*met}
            self._write_met(alone, met)
            if alone or agreed or isinstance(error, PeerDied):
                failure = Failure(os.getpid(), type(error).__name__, f"{type(error).__name__}: {error}")
                self._calls.set(self._key("failed", self.rank), self._record(failure).pack(self._token))
                self._calls.set("failing", self._nonce)
            mine = self._seen.get(self.rank)
            if mine is not None and self._calls.read(self._key("rank", self.rank)) == mine.pack(self._token):
                self._calls.set(self._key("rank", self.rank), b"")
        self._release()

    def _write_met(self, alone: bool, nonces: list[bytes]) -> None:
        sealed = self._header("met", self.rank).seal(bytes([alone]) + b"".join(nonces), self._token)
        self._calls.set(self._key("met", self.rank), sealed)

    def _raise_if_failed(self) -> None:
        failing = self._calls.read("failing")
        if failing == self._failing:
            return
        for rank in self._others:
            data = self._calls.read(self._key("failed", rank))
            if data:
                with suppress(RendezvousError):  # it is of a group with another token
                    failed = self._parse(data, Failure, rank)
                    if self._concerns(failed):
                        kind = PeerDied if failed.body.kind == PeerDied.__name__ else RendezvousError
                        told = kind(
                            f"{self._who} was aborted by rank {rank} of {self.world_size} (pid {failed.body.pid}): "
                            f"{failed.body.text}"
                        )
                        break
        else:
            self._failing = failing
            return
        raise told

    def _concerns(self, failed: StoreRecord[Failure]) -> bool:
        """Whether this failure ends this process's set-up: the rank that gave up had read this process's record, or its
        reason concerns that rank alone and it had read no record of this rank."""
        alone, met = self._met(failed.rank)
        if failed.world_size != self.world_size or len(met) < self.world_size or met[failed.rank] != failed.nonce:
            return False
        mine = met[self.rank]
        if mine == self._nonce:
            return True
        self._old.setdefault(failed.nonce, "")
        return alone and mine == _NOBODY and failed.nonce not in self._earlier

    def _met(self, rank: int) -> tuple[bool, list[bytes]]:
        """For the last process of `rank` that gave up: whether its reason concerned that rank alone, and the nonces
        that it knew. First one for each rank of its group, by rank, and then those of earlier groups."""
        with suppress(RendezvousError):  # of a group with another token or world size
            data = self._header("met", rank).open(self._calls.read(self._key("met", rank)) or b"", self._token)
            return data[:1] != b"\0", [data[i : i + NONCE_BYTES] for i in range(1, len(data), NONCE_BYTES)]
        return False, []

    # Afterwards

    def settle(self) -> None:
        """Delete the keys that only the set-up needs, and those of an earlier generation; all ranks are connected, so
        none reads them any more."""
        self._settled = True
        with suppress(*_GONE):
            # A rank may die before it deletes its record: later generations must not take that for one of theirs.
            self._write_met(False, [self._seen[r].nonce for r in range(self.world_size)])
            for what in ("rank", "agreed", "failed"):
                self._calls.delete(self._key(what, self.rank))
            if self.rank == 0:
                before = self._calls.read("generation")
                if before and before != self.name.encode():
                    self._delete(self._calls, lambda first: first != self.name and len(first) == len(self.name))
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
                rest = (self.name, "met") if self._settled else (self.name, "met", "rank", "agreed")
                self._delete(calls, lambda first: first in rest)
                if calls.read("generation") == self.name.encode():
                    calls.delete("generation")

    @staticmethod
    def _delete(calls: BoundedStore, which: Callable[[str], bool]) -> None:
        for key in calls.keys():
            if which(key.partition("/")[0]):
                calls.delete(key)

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

    def _read(self, what: str, ranks: list[int]) -> list[tuple[int, bytes]]:
        """The keys of `ranks` that exist and are not empty."""
        keys = {rank: self._key(what, rank) for rank in ranks}
        now = time.monotonic()
        found: list[tuple[int, bytes | None]] = []
        if now >= self._each or self.deadline.passed:
            self._each = now + _EACH_SECONDS
            found = [(rank, self._calls.read(key)) for rank, key in keys.items()]
        elif keys and self._calls.check(*keys.values()):
            found = list(zip(keys, self._calls.get_all(list(keys.values())), strict=True))
        return [(rank, data) for rank, data in found if data]

    @staticmethod
    def _key(what: str, rank: int) -> str:
        return f"{what}/{rank}"

    def _record(self, body: B) -> StoreRecord[B]:
        return StoreRecord(self.rank, self.world_size, 1, self._nonce, body)

    def _parse(self, data: bytes, kind: type[B], rank: int) -> StoreRecord[B]:
        return records.parse(data, kind, 1, rank, self._token)

    def _header(self, what: str, rank: int) -> MessageHeader:
        return MessageHeader(rank, self.world_size, 1, what)
