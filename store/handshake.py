"""Connects the ranks of a group that share memory, once, through a Store that is not needed afterwards.

    agree on a generation (`generation.py`): this rank's process, and the name of its socket; all others' are checked
    each rank sends its control segment and its pidfd to every other rank's socket, and maps the segments that it gets
    confirm through the segments: every rank has mapped every other one delete the keys of the set-up

A rank that fails tells the others through the store, and through its segment, so that no rank waits for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

from torch.distributed.distributed_c10d import Store

from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.store import departures, descriptors, process
from tricomm.store.control import ControlPage, Fault, RankSegment, RankState
from tricomm.store.departures import Rules
from tricomm.store.descriptors import DescriptorSocket, OwnedDescriptors, Sender, Unreachable
from tricomm.store.generation import Generation
from tricomm.store.page import NBYTES, Page
from tricomm.store.records import RankRecord, StoreRecord
from tricomm.store.rendezvous import check_integers
from tricomm.store.segments import Segment


class SpansNodes(RendezvousError):
    """The ranks of a group are on several nodes."""


_KINDS = (ResourceError, SpansNodes, InvalidArgument, RendezvousError)  # all others are a `RendezvousError`


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
    generation = _generation(store, rank, world_size, timeout, check_interrupt)
    with ExitStack() as undo:
        attempt = _Handshake(generation, layout_hash & (1 << 64) - 1)
        undo.callback(attempt.release)
        try:
            control = attempt.run()
            attempt.release()  # here, because an interrupt in it is told as well
            return control
        except BaseException as error:
            generation.give_up(error)
            attempt.abort(error)
            if isinstance(error, TricommError):
                kind = type(error) if isinstance(error, _KINDS) else RendezvousError
                raise kind(f"rank {rank} of {world_size} (pid {os.getpid()}): {error}") from error
            raise


def refuse(store: Store, rank: int, world_size: int, timeout: float, error: TricommError) -> None:
    """Tell the ranks that wait in a handshake over `store` why this rank does not join; `rank` is -1 if it is unknown.

    Does nothing if the store does not answer within `timeout` seconds."""
    with suppress(TricommError):
        _generation(store, rank, world_size, timeout).give_up(error)


def _generation(
    store: Store, rank: int, world_size: int, timeout: float, on_look: Callable[[], None] = lambda: None
) -> Generation[RankRecord]:
    rules = Rules(strict=True, kinds=_KINDS, prefix="", state=_state, on_look=on_look)
    return Generation(store, "handshake", RankRecord, rank, world_size, timeout, rules=rules)


def _state(theirs: RankRecord) -> str | None:
    """As `process.state_of`. A process of another PID namespace counts as ended if its socket refuses connections,
    until another process of this machine removes the socket."""
    return process.ENDED if descriptors.died(theirs.socket) else process.state_of(theirs)


def _check_arguments(rank: int, world_size: int, timeout: float) -> None:
    """Raises `InvalidArgument` for values that are impossible in any group."""
    check_integers(rank, world_size)
    if not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r}: a positive number of seconds is needed")


class _Handshake:
    """One rank's part in one handshake."""

    def __init__(self, generation: Generation[RankRecord], layout_hash: int) -> None:
        self._generation, self._layout_hash = generation, layout_hash
        self._rank, self._world_size = generation.rank, generation.world_size
        self._segments: list[Segment] = []
        self._socket = DescriptorSocket()
        self._page: Page | None = None
        self._control: ControlPage | None = None
        self._connected = False

    def run(self) -> ControlPage:
        members = self._meet(self._generation.agree(self._introduce, self._check))
        control = ControlPage(self._rank, bytes.fromhex(self._generation.name), members)
        self._control = control
        control.beat()
        control.set_state(RankState.READY)  # before the confirmation, so that all are ready on return
        control.agree(None, "handshake", self._generation.deadline.left)
        self._generation.settle(shared=True)
        self._segments.clear()
        self._control, self._connected = None, True
        return control

    def release(self) -> None:
        """Release everything that has not become part of a control page."""
        if self._control is not None:
            self._control.unwatch()
        if self._connected:
            self._socket.close()
        else:
            self._socket.abandon()
        for segment in self._segments:
            segment.close()

    def abort(self, error: BaseException) -> None:
        """Publish the reason through this rank's page."""
        if self._page is not None:
            kind, text = departures.reason(error, self._rank)
            kind = kind if isinstance(error, TricommError) else GroupAborted.__name__
            self._page.put_fault(Fault(kind, self._rank, 0, text))
            self._page.state = RankState.CLOSED

    def _introduce(self) -> RankRecord:
        """Fill in this rank's control segment. Raises `ResourceError` if /proc is not mounted."""
        segment = Segment.create("tricomm-control", NBYTES, shared=False)
        self._segments.append(segment)
        if self._world_size > 1:
            self._socket.bind()
        pid = os.getpid()
        started = process.start_time(pid)
        if started is None:
            raise ResourceError(f"/proc/{pid}/stat cannot be read: mount /proc in this container")
        page = Page(segment.buffer, segment.address)
        page.identify(self._rank, self._world_size, self._generation.nonce, pid, started)
        page.state = RankState.CONNECTING
        self._page = page
        place = (process.pid_namespace(), process.user_namespace(), process.node_id(), os.geteuid())
        memory = (segment.nbytes, self._layout_hash, RankState.CONNECTING)
        return RankRecord(pid, started, *place, *memory, self._socket.name, socket.gethostname())

    def _check(self, record: StoreRecord[RankRecord]) -> None:
        check(record, self._rank, self._layout_hash)
        self._socket.peers.append(record.body.socket)

    def _meet(self, ranks: list[RankRecord]) -> list[RankSegment]:
        """Pass this rank's segment and pidfd to all other ranks, and map their segments."""
        own, generation = self._segments[0], self._generation
        members = {self._rank: RankSegment(own, os.getpid(), ranks[self._rank].start_time)}

        def take(rank: int, held: list[int]) -> None:
            members[rank] = self._attach(rank, ranks[rank], held)

        sender = Sender(self._rank, self._world_size, bytes.fromhex(generation.name), "handshake")
        mine = OwnedDescriptors()
        try:
            _open_pidfd(mine)
            passed = [own.fd, mine[0] if mine else own.fd]
            names = [theirs.socket for theirs in ranks]
            self._socket.exchange(sender, names, passed, take, generation.deadline, generation.look)
        except Unreachable as error:
            generation.explain()  # the other rank may have ended, or have told its reason
            raise ResourceError(str(error)) from error
        finally:
            while mine:
                os.close(mine.pop())
        self._socket.close()
        own.close_fd()
        return [members[rank] for rank in range(self._world_size)]

    def _attach(self, rank: int, theirs: RankRecord, held: list[int]) -> RankSegment:
        """The `RankSegment` of `rank`, made of the pidfd and the segment at the end of `held`."""
        watched = self._watch(rank, theirs, held)
        try:
            segment = Segment.attach(held, theirs.nbytes, readonly=True)
        except ResourceError as error:
            raise ResourceError(f"rank {rank}'s control page: {error}") from error
        self._segments.append(segment)
        page = Page(segment.buffer, segment.address)
        page.check(rank, self._world_size, self._generation.nonces[rank], theirs.pid, theirs.start_time)
        return RankSegment(segment, theirs.pid, theirs.start_time, watched)

    def _watch(self, rank: int, theirs: RankRecord, held: list[int]) -> process.Watched:
        pidfd = OwnedDescriptors()
        pidfd.append(held.pop())
        try:
            known = process.is_pidfd(pidfd[0])
            if not known and theirs.pid_namespace != process.pid_namespace():
                raise ResourceError(
                    f"rank {rank} has no pidfd of itself and lives in another PID namespace, so its end would "
                    "not be seen: allow pidfd_open (Linux 5.3; seccomp), or share the namespace (docker: --pid=host)"
                )
            return process.watch(theirs.pid, theirs.start_time, theirs.pid_namespace, pidfd if known else None)
        finally:
            while pidfd:
                os.close(pidfd.pop())


def check(record: StoreRecord[RankRecord], rank: int, layout_hash: int) -> None:
    """Raises `RendezvousError` if `record` cannot be in the same group as this process, which is rank `rank`."""
    theirs = record.body
    who = f"rank {record.rank} (pid {theirs.pid} on {theirs.hostname})"
    if theirs.node != process.node_id():
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
    """Add a pidfd of this process to `held`, by which other ranks see its end, unless the system has no pidfds."""
    with suppress(OSError):
        held.append(os.pidfd_open(os.getpid()))
