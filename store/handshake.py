"""How the ranks of a group connect: once, through a Store that is not needed afterwards.

    add  tricomm/handshake/<rank>/generation             which handshake on this store is this rank's next one
    set  tricomm/handshake/<generation>/rank/<rank>      this rank's process, and the name of its socket
    ...  the records of all other ranks are read and checked
    ...  each rank sends every other one its control segment and its pidfd, over their sockets, and maps what it gets
    set  tricomm/handshake/<rank>/done                   this rank no longer needs the store for this generation
    confirm through the segments                         every rank has mapped every other, and all are of one group

A rank that aborts publishes the reason under tricomm/handshake/<generation>/failed, so that no rank waits for it, now
or later.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

from torch.distributed.distributed_c10d import Store

from tricomm.deadline import Deadline
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.store import descriptors, process
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.control import ControlPage, Fault, RankSegment, RankState
from tricomm.store.descriptors import DescriptorSocket, OwnedDescriptors, Sender
from tricomm.store.gather import Arrived, Gathering, missing
from tricomm.store.page import NBYTES, Page
from tricomm.store.records import MAX_WORLD_SIZE, RankRecord, StoreRecord
from tricomm.store.segments import Segment

_GRACE_SECONDS = 0.25  # to publish a failure, after the deadline
_LOOK_SECONDS = 0.05
_WHAT = "rank"


class SpansNodes(RendezvousError):
    """The ranks of a group are on several nodes."""


def handshake(
    store: Store,
    rank: int,
    world_size: int,
    timeout: float,
    layout_hash: int,
    check_interrupt: Callable[[], None] = lambda: None,
) -> ControlPage:
    """Connect to the other ranks over `store`, which is never used again afterwards; all ranks call it.

    `layout_hash` (64 bits) must be the same on all ranks. Ends within `timeout` + 1 seconds. If one rank raises, all
    do: `RendezvousError` (`SpansNodes` if they are on several nodes) or `ResourceError`, with the rank at fault and its
    reason. Then nothing is left open, and the ranks may try again on the same store. Raises `InvalidArgument` for a bad
    argument. `check_interrupt` is called periodically while this rank waits; its errors end the handshake on all ranks.
    """
    _check_arguments(rank, world_size, timeout)
    bounded = BoundedStore(store, timeout + _GRACE_SECONDS)
    with ExitStack() as undo:
        undo.callback(bounded.close)
        gathering = Gathering(bounded, "handshake", rank, world_size)
        attempt = _Handshake(gathering, timeout, layout_hash & (1 << 64) - 1, check_interrupt)
        undo.callback(attempt.release)
        try:
            return attempt.run()
        except BaseException as error:
            attempt.abort(error)
            if isinstance(error, TricommError):
                raise type(error)(f"rank {rank} of {world_size} (pid {os.getpid()}): {error}") from error
            raise


def refuse(store: Store, rank: int, world_size: int, timeout: float, error: TricommError) -> None:
    """Tell the ranks that wait in a handshake over `store` why this one does not come; -1 for a `rank` that is unknown.

    Does nothing if the store does not answer within `timeout` seconds."""
    with suppress(TricommError), closing(BoundedStore(store, timeout)) as bounded:
        attempt = _Handshake(Gathering(bounded, "handshake", rank, world_size), timeout, 0, lambda: None)
        with suppress(RendezvousError):  # an impossible rank makes the handshake fail that is under way
            attempt._begin()
        attempt.abort(error)


def _check_arguments(rank: int, world_size: int, timeout: float) -> None:
    """Raises `InvalidArgument` for values that are impossible in any group."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31:
            raise InvalidArgument(f"{name}={value!r}: an integer is needed")
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size}: 1 to {MAX_WORLD_SIZE} ranks are possible")
    if not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r}: a positive number of seconds is needed")


class _Handshake:
    """One rank's part in one handshake."""

    def __init__(
        self, gathering: Gathering, timeout: float, layout_hash: int, check_interrupt: Callable[[], None]
    ) -> None:
        self._gathering, self._store = gathering, gathering.store
        self._rank, self._world_size = gathering.rank, gathering.world_size
        self._layout_hash, self._check_interrupt = layout_hash, check_interrupt
        self._timeout, self._deadline = timeout, Deadline(timeout)
        self._segments: list[Segment] = []
        self._socket = DescriptorSocket()
        self._page: Page | None = None
        self._control: ControlPage | None = None
        self._connected = False
        self._retracted = 0
        self._next_look = time.monotonic() + _LOOK_SECONDS

    def run(self) -> ControlPage:
        self._begin()
        records = self._gathering.exchange(
            _WHAT, self._introduce(), self._deadline, self._late, self._check, self._look
        )
        members = self._meet(records)
        self._store.set(self._done_key(self._rank), str(self._gathering.generation).encode())
        control = ControlPage(self._rank, records[0].nonce, members)
        self._control = control
        control.beat()
        control.set_state(RankState.READY)  # before the confirmation, so that all are ready on return
        self._confirm(control)
        self._segments.clear()
        self._control, self._connected = None, True
        return control

    def release(self) -> None:
        """Release what has not become part of a control page."""
        if self._control is not None:
            self._control.unwatch()
        if self._connected:
            self._socket.close()
        else:
            self._socket.abandon()
        for segment in self._segments:
            segment.close()

    def abort(self, error: BaseException) -> None:
        """Publish the reason through the store and through this rank's page, as far as they still work."""
        kind = type(error).__name__ if isinstance(error, TricommError) else RendezvousError.__name__
        ours = isinstance(error, TricommError)
        text = str(error) if ours else f"rank {self._rank} was stopped by {type(error).__name__}: {error}"
        if self._store.usable:
            self._store.extend(_GRACE_SECONDS)
            with suppress(TricommError):  # the store is gone; the error that brought us here matters more
                # An interrupt before the first record, or no thread for the store.
                if not self._gathering.generation and not isinstance(error, RendezvousError):
                    self._gathering.aborted()  # waits for a store call that may still be under way
                    if not self._gathering.generation:
                        self._begin()
                self._publish(kind, text)
        if self._page is not None:
            self._page.put_fault(Fault(kind if ours else GroupAborted.__name__, self._rank, 0, text))
            self._page.state = RankState.CLOSED

    def _publish(self, kind: str, text: str) -> None:
        if self._retracted:  # first, so that a rank that reads the failure and tries again can take the generation
            self._store.set(self._gathering.key(_WHAT, self._rank, self._retracted), b"")
            self._store.add(self._gathering.counter(self._rank), -1)
        if self._gathering.generation:
            self._gathering.abort(kind, text)

    def _begin(self) -> None:
        if not 0 <= self._rank < self._world_size:
            self._gathering.generation = self._current_generation()
            raise RendezvousError(
                f"rank {self._rank} is not in 0..{self._world_size - 1}: give each rank its own number"
            )
        self._gathering.begin()
        while self._is_over():
            self._gathering.begin()

    def _is_over(self) -> bool:
        """Whether this generation belongs to processes that have ended, an earlier process of this rank among them.

        It does if a process of this rank ended before this one began: then the ranks have begun a different number of
        times, and would never be in the same generation again.
        """
        generation = self._gathering.generation
        if generation == 1 or self._claimant(generation - 1) is not None:
            return False
        return any(self._has_ended(rank) for rank in range(self._world_size) if rank != self._rank)

    def _has_ended(self, rank: int) -> bool:
        record = self._gathering.earlier(_WHAT, RankRecord, self._gathering.generation, rank)
        return record is not None and not _runs(record.body)

    def _current_generation(self) -> int:
        """The handshake that rank 0 is in or will enter next; a process with an impossible rank makes that one fail."""
        count = self._number(self._gathering.counter(0))
        return max(count + 1 if self._number(self._done_key(0)) >= count else count, 1)

    def _number(self, key: str) -> int:
        text = self._store.read(key) or b"0"
        if not text.isdigit() or len(text) > 18:
            raise RendezvousError(f"the store's {key!r} is not a number; does something else use this store?")
        return int(text)

    def _introduce(self) -> RankRecord:
        """Fill in this rank's control segment. Raises `ResourceError` if /proc is not mounted."""
        self._raise_if_aborted()
        segment = Segment.create("tricomm-control", NBYTES, shared=False)
        self._segments.append(segment)
        if self._world_size > 1:
            self._socket.bind()
        pid = os.getpid()
        started = process.start_time(pid)
        if started is None:
            raise ResourceError(f"/proc/{pid}/stat cannot be read: mount /proc in this container")
        page = Page(segment.buffer, segment.address)
        page.identify(self._rank, self._world_size, self._gathering.nonce, pid, started)
        page.state = RankState.CONNECTING
        self._page = page
        place = (process.pid_namespace(), process.user_namespace(), process.node_id(), os.geteuid())
        memory = (segment.nbytes, self._layout_hash, RankState.CONNECTING)
        return RankRecord(pid, started, *place, *memory, self._socket.name, socket.gethostname())

    def _look(self, arrived: Arrived[RankRecord]) -> None:
        self._raise_if_aborted()
        self._look_for_duplicate()
        if time.monotonic() >= self._next_look:
            self._check_interrupt()
            for record in arrived.values():
                if record.rank != self._rank and not _runs(record.body):
                    raise _died(record)
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def _check(self, record: StoreRecord[RankRecord]) -> None:
        check(record, self._rank, self._world_size, self._layout_hash)
        self._socket.peers.append(record.body.socket)

    def _meet(self, records: list[StoreRecord[RankRecord]]) -> list[RankSegment]:
        """Pass this rank's segment and pidfd to all others, and map what they pass."""
        own = self._segments[0]
        members = {self._rank: RankSegment(own, os.getpid(), records[self._rank].body.start_time)}
        arrived = {record.rank: record for record in records}

        def take(rank: int, held: list[int]) -> None:
            members[rank] = self._attach(records[rank], held)

        def look() -> None:
            self._next_look = 0.0
            self._look(arrived)

        sender = Sender(self._rank, self._world_size, records[0].nonce, "handshake", self._gathering.generation)
        mine = OwnedDescriptors()
        try:
            _open_pidfd(mine)
            passed = [own.fd, mine[0] if mine else own.fd]
            names = [record.body.socket for record in records]
            self._socket.exchange(sender, names, passed, take, self._deadline, look)
        finally:
            while mine:
                os.close(mine.pop())
        self._socket.close()
        own.close_fd()
        return [members[rank] for rank in range(self._world_size)]

    def _attach(self, record: StoreRecord[RankRecord], held: list[int]) -> RankSegment:
        """The rank of `record`, with the pidfd and the segment taken from the end of `held`."""
        rank, theirs = record.rank, record.body
        watched = self._watch(record, held)
        try:
            segment = Segment.attach(held, theirs.nbytes, readonly=True)
        except ResourceError as error:
            raise ResourceError(f"rank {rank}'s control page: {error}") from error
        self._segments.append(segment)
        page = Page(segment.buffer, segment.address)
        page.check(rank, self._world_size, record.nonce, theirs.pid, theirs.start_time)
        return RankSegment(segment, theirs.pid, theirs.start_time, watched)

    def _watch(self, record: StoreRecord[RankRecord], held: list[int]) -> process.Watched:
        theirs, pidfd = record.body, OwnedDescriptors()
        pidfd.append(held.pop())
        try:
            known = process.is_pidfd(pidfd[0])
            if not known and theirs.pid_namespace != process.pid_namespace():
                raise ResourceError(
                    f"rank {record.rank} has no pidfd of itself and lives in another PID namespace, so its end would "
                    "not be seen: allow pidfd_open (Linux 5.3; seccomp), or share the namespace (docker: --pid=host)"
                )
            return process.watch(theirs.pid, theirs.start_time, theirs.pid_namespace, pidfd if known else None)
        finally:
            while pidfd:
                os.close(pidfd.pop())

    def _confirm(self, control: ControlPage) -> None:
        group = hashlib.sha256(control.nonce).hexdigest()  # not the nonce: it is a secret
        try:
            control.require_equal(f"group {group}", "handshake", self._deadline.left)
        except TricommError as error:
            with suppress(RendezvousError):  # this rank's own error says more than a published one
                self._raise_if_aborted()
            raise RendezvousError(f"not confirmed: {error}") from error

    def _raise_if_aborted(self) -> None:
        self._gathering.raise_if_aborted("handshake", (ResourceError, SpansNodes, InvalidArgument))

    def _look_for_duplicate(self) -> None:
        """Raises `RendezvousError` if another process with this rank's number is still connecting."""
        before = self._gathering.generation - 1
        if before == 0 or self._number(self._done_key(self._rank)) >= before:
            return
        other = self._claimant(before)
        if other is not None and not self._gathering.aborted(before):
            # Fail the handshake that is under way, and retract this process's claim to the number.
            self._gathering.generation, self._retracted = before, self._gathering.generation
            raise RendezvousError(
                f"duplicate rank: pid {os.getpid()} and pid {other.pid} both say that they are rank {self._rank} "
                f"(world size {self._world_size} here); give each process its own rank"
            )

    def _claimant(self, generation: int) -> RankRecord | None:
        """The process that was this rank in `generation`, if it still runs."""
        record = self._gathering.earlier(_WHAT, RankRecord, generation) if generation > 0 else None
        if record is None:
            return None
        return record.body if _runs(record.body) else None

    def _late(self, arrived: Arrived[RankRecord]) -> RendezvousError:
        came = ", ".join(
            f"rank {rank} (pid {record.body.pid}, world size {record.world_size})" for rank, record in arrived.items()
        )
        late = f"rank(s) {missing(arrived, self._world_size)} did not come; there were {came}"
        text = f"timeout after {self._timeout:g} s: {late}"
        other = self._claimant(self._gathering.generation - 1)
        if len(arrived) == 1 and other is not None and other.pid != os.getpid():
            # No rank waits for this process: retract, so that the one that had the number stays in step.
            self._gathering.generation, self._retracted = 0, self._gathering.generation
            text += f"; pid {other.pid}, which connected as rank {self._rank} before, still runs: is the number taken?"
        return RendezvousError(text)

    def _done_key(self, rank: int) -> str:
        return f"tricomm/handshake/{rank}/done"


def check(record: StoreRecord[RankRecord], rank: int, world_size: int, layout_hash: int) -> None:
    """Raises `RendezvousError` if `record` cannot be in the same group as this process, which is rank `rank`."""
    theirs = record.body
    who = f"rank {record.rank} (pid {theirs.pid} on {theirs.hostname})"
    if record.world_size != world_size:
        raise RendezvousError(
            f"{who} says that the world size is {record.world_size}, rank {rank} (pid {os.getpid()}) says {world_size}"
        )
    if theirs.boot_id != process.node_id():
        here = socket.gethostname()
        raise SpansNodes(f"{who} is on another host than rank {rank} (on {here}): they share no memory")
    if theirs.uid != os.geteuid() and theirs.user_namespace == process.user_namespace():
        raise RendezvousError(f"{who} runs as uid {theirs.uid}, rank {rank} as uid {os.geteuid()}: use one user")
    if theirs.layout_hash != layout_hash or theirs.nbytes != NBYTES:
        raise RendezvousError(
            f"{who} has other options than rank {rank} (memory layout {theirs.layout_hash:x}, here {layout_hash:x}): "
            "use the same tricomm, device kind, options and TRICOMM_* variables on every rank"
        )


def _open_pidfd(held: list[int]) -> None:
    """Add a pidfd of this process, by which others see that it ends, unless the system has none."""
    with suppress(OSError):
        held.append(os.pidfd_open(os.getpid()))


def _runs(theirs: RankRecord) -> bool:
    """Whether the process of a record still runs, as far as it can be told.

    The socket of a killed process refuses connections, until another process of this machine removes it. Its pid tells
    as well if it is in this PID namespace.
    """
    near = (theirs.boot_id, theirs.pid_namespace) == (process.node_id(), process.pid_namespace())
    return not descriptors.died(theirs.socket) and (not near or process.alive(theirs.pid, theirs.start_time))


def _died(record: StoreRecord[RankRecord]) -> RendezvousError:
    return RendezvousError(f"rank {record.rank} (pid {record.body.pid}) died during the handshake")
