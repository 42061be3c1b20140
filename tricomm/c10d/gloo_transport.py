"""A c10d group's connections on the CPU: one Gloo context with a connection to each other rank, and no thread.

All groups of a process share one Gloo device, and with it one thread that moves the data. Only the connections are a
group's own: world size - 1 descriptors. Collectives are exchanges of messages (`exchange`), with tags from
`FIRST_OWN_TAG` on; users' messages have lower tags.

A wait inside Gloo cannot be cancelled, and if one ends by Gloo's own time limit, Gloo closes all connections. So a
blocked wait is ended by shutting down its sockets, which also tells the other side at once. For that, each group knows
which descriptor leads to which rank. A wait of the main thread runs on a helper thread, so that a signal's handler can
run meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from tricomm import sockets, threads
from tricomm.c10d import gloo_faults
from tricomm.c10d.call_futures import Loss
from tricomm.c10d.gloo_faults import Wait
from tricomm.c10d.torch_names import c10d
from tricomm.errors import GroupAborted, InvalidArgument, RendezvousError, ResourceError, TricommError
from tricomm.sockets import Address, inode, tcp_sockets
from tricomm.store import process
from tricomm.store.bounded_store import first_line
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities
from tricomm.threads import HelperTask

FIRST_OWN_TAG = 1 << 30  # a user's tags are below
COLLECTIVE, _HANDSHAKE = FIRST_OWN_TAG, FIRST_OWN_TAG + 1
FIRST_LINE_TAG = FIRST_OWN_TAG + 16  # from here on, tags of the calls that callbacks make
LINE_TAGS = (1 << 31) - FIRST_LINE_TAG
_SPARE = 16  # descriptors that a group leaves for files and the store
_CONNECT_SECONDS = 30.0  # the ranks have just met over the store

Part = tuple[int, torch.Tensor]  # a rank, and the contiguous tensor that goes there or comes from there

_connecting = threading.Lock()  # two groups that connect at once would take each other's connections for theirs
_making_device = threading.Lock()
_device: Any = None
_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


class Transport:
    """The connections of one rank of one group; made by all its ranks together.

    Every method may be called from any thread. After `fail` and `close`, and after any wait that failed, every call
    raises the cause of the group's loss.
    """

    def __init__(self, generation: Generation, name: str, stall: float) -> None:
        """The ranks have agreed on `generation`; its deadline also limits the connections.

        Raises `ResourceError` if a rank has too few descriptors, and as `Generation.look` and `exchange` do;
        `RendezvousError` if the ranks cannot connect.
        """
        self.rank, self.world_size, self.name, self.stall = generation.rank, generation.world_size, name, stall
        self.members: Sequence[Capabilities] = [generation.members[r] for r in range(self.world_size)]
        self.others = [r for r in range(self.world_size) if r != self.rank]
        here = process.node_id(), process.pid_namespace()
        self.visible = {r for r in self.others if (self.members[r].node, self.members[r].pid_namespace) == here}
        self._loss = Loss()
        self._errors: list[TricommError] = []  # the first one counts; no lock that an interrupt could leave taken
        self.store, self.generation = PrefixStore("lost", generation.store), generation.name
        self._sockets: dict[int, tuple[int, int]] = {}  # by rank: descriptor, inode
        _check_descriptors(self.members, name)
        self._native = self._connect(generation)

    # Messages

    def exchange(
        self, sends: Sequence[Part], receives: Sequence[Part], deadline: float, what: Callable[[], str],
        tag: int = COLLECTIVE,
    ) -> None:  # fmt: skip
        """Send and receive, and return when all of it is done; `deadline` is of `time.monotonic()`.

        Parts with no bytes are left out, on both sides alike. Raises `PeerDied`, `PeerStalled`, `CollectiveTimeout` or
        `GroupAborted`, with the text of `what`; the group is then lost.
        """
        waiting = Wait(self, deadline, what, in_callback=tag >= FIRST_LINE_TAG)
        self.interruptible(lambda: self._exchange(sends, receives, waiting, tag))

    def _exchange(self, sends: Sequence[Part], receives: Sequence[Part], waiting: Wait, tag: int) -> None:
        try:
            for rank, x in receives:
                if x.numel():
                    waiting.todo.append((rank, self._native.recv([x], rank, tag)))
            for rank, x in sends:
                if x.numel():
                    waiting.sends.append((rank, self._native.send([x], rank, tag)))
        except (RuntimeError, AttributeError) as error:  # a connection is closed already; or `close` came first
            waiting.failed(rank, error)
        self._wait(waiting)

    def interruptible(self, action: Callable[[], None]) -> None:
        """Run `action`, which uses the connections, so that signals are handled meanwhile; in any thread.

        If a signal's handler raises, the group is given up, and the others are told.
        """
        if threading.current_thread() is not threading.main_thread():
            action()
            return
        try:
            job = HelperTask(action)
        except ResourceError as error:
            self.fail(self.of_loss(error))
            raise
        try:
            job.wait()
        except BaseException as error:
            self.fail(GroupAborted(f"rank {self.rank} was interrupted by {first_line(error)}"))
            job.wait(1.0)  # so that nothing writes into the caller's tensors any more
            raise
        job.result()

    def send(self, x: torch.Tensor, dst: int, tag: int) -> Any:
        """Start to send contiguous `x`; the handle goes to `wait`. Raises as `exchange` does."""
        return self._start(lambda: self._native.send([x], dst, _user_tag(tag)), dst, "send")

    def recv(self, x: torch.Tensor, src: int | None, tag: int) -> Any:
        """Start to receive into contiguous `x`, from `src` or (None) from any rank; the handle goes to `wait`."""
        if src is None:
            return self._start(lambda: self._native.recv_anysource([x], _user_tag(tag)), -1, "recv")
        return self._start(lambda: self._native.recv([x], src, _user_tag(tag)), src, "recv")

    def wait(self, handle: Any, peer: int | None, deadline: float, what: Callable[[], str], sent: bool = False) -> None:
        """Wait for what `send` (`sent`) or `recv` began, with rank `peer` or (None) with any.

        Raises as `exchange` does.
        """
        waiting = Wait(self, deadline, what, any=peer is None)
        (waiting.sends if sent else waiting.todo).append((-1 if peer is None else peer, handle))
        self.interruptible(lambda: self._wait(waiting))

    def _start(self, begin: Callable[[], Any], peer: int, what: str) -> Any:
        self.check_usable(what)
        try:
            return begin()
        except RuntimeError as error:
            waiting = Wait(self, time.monotonic(), lambda: f"{self.name}: {what}")
            waiting.failed(peer, error)
            raise waiting.final_error() from error

    def _wait(self, waiting: Wait) -> None:
        if self.error is None:
            try:
                gloo_faults.watch(waiting)
                if waiting.ended is None:
                    waiting.run()
                    if waiting.sends and not waiting.lost:  # Gloo forgets a send whose connection closes
                        waiting.ended = threading.Event()
                        HelperTask(waiting.run_sends)
                        waiting.ended.wait()
                else:  # closed connections do not end a wait for any rank: it is then left behind
                    HelperTask(waiting.run)
                    waiting.ended.wait()
            except ResourceError as error:  # no thread can start, and the other ranks wait for this one
                self.fail(self.of_loss(error))
                raise
            finally:
                gloo_faults.unwatch(waiting)
            if not waiting.lost:
                return
        raise waiting.final_error()

    # Life

    @property
    def error(self) -> TricommError | None:
        """The cause of the group's loss."""
        return self._errors[0] if self._errors else None

    def check_usable(self, what: str) -> None:
        """Raises an error with the cause if the group is lost or closed: of the cause's class until the caller has been
        told of the loss, then `GroupAborted`."""
        if self.error is not None:
            kind = GroupAborted if self._loss.told else type(self.error)
            text = f"{self.name}: {what} on a group that is lost; make a new one. Lost by: {self.error}"
            raise self.of_loss(kind(text)) from self.error

    def of_loss(self, error: TricommError) -> TricommError:
        """`error`, marked as one that tells the caller the cause of this group's loss."""
        return self._loss.said_by(error)

    def check_connected(self, what: Callable[[], str]) -> None:
        """Raises as `exchange` does if the group is lost, or if the connection to a rank is closed."""
        waiting = Wait(self, time.monotonic(), what)
        for rank in self.others:
            if not self.connected(rank):
                waiting.failed(rank, RuntimeError("the connection is closed"))
        if self.error is not None or waiting.lost:
            raise waiting.final_error()

    def fail(self, error: TricommError) -> None:
        """Give the group up: tell the others why, wake every blocked wait, close the connections. Any thread may call
        it, even an interrupted one; the first error counts."""
        if self.record_loss(error):
            gloo_faults.publish_reason(self, error)
        self.shut_down()

    def record_loss(self, error: TricommError) -> bool:
        """Take `error` as the cause of the group's loss, unless there is one; True if it is the first."""
        self._errors.append(error)
        return self._errors[0] is error

    def close(self) -> None:
        """Close the connections, which the other ranks see at once; idempotent."""
        self.record_loss(GroupAborted(f"{self.name} was destroyed here"))
        self.shut_down()
        self._native = None

    def shut_down(self, rank: int | None = None) -> None:
        """Shut down the connection to `rank`, or (None) all: every wait for it ends, here and there."""
        for peer in range(self.world_size) if rank is None else (rank,):
            entry = self._sockets.get(peer)
            if entry is not None:
                sockets.shut_down(*entry)
        if rank is None:
            gloo_faults.wake(self)

    def connected(self, rank: int) -> bool:
        """False once Gloo has closed the connection to `rank`."""
        entry = self._sockets.get(rank)
        return entry is None or inode(entry[0]) == entry[1]

    # Connecting

    def _connect(self, generation: Generation) -> Any:
        """The connections. Gloo's constructor exceeds its limit and cannot be interrupted: it runs on a thread that can
        be abandoned, and gets the addresses of the other ranks from here."""
        global _device
        generation.limit(_CONNECT_SECONDS)
        rank, world_size, seconds = self.rank, self.world_size, generation.deadline.left
        book, made = sockets.AddressBook(seconds), []
        try:
            job = HelperTask(lambda: made.append(_context(book, rank, world_size, seconds)))
            generation.wait(lambda tick: book.asked.wait(tick) or job.wait(0.0), "Gloo has no address")
            if job.wait(0.0):
                job.result()  # the constructor may have failed before it asked
            here, page = book.page()
            listeners = book.read(generation.gather("addresses", page))
            # The rank that initiates a connection does not wait for the other one's turn. So groups that connect in a
            # different order on each rank do not wait for each other.
            generation.wait(lambda tick: _connecting.acquire(timeout=tick), "other groups of this process connect")
            try:
                book.filled.set()
                generation.wait(job.wait, "the ranks do not connect")
                job.result()
                self._find_initiated(listeners)
            finally:
                _connecting.release()
        except BaseException as error:
            book.filled.set()
            _device = None  # an abandoned constructor may still connect over it
            if not isinstance(error, RuntimeError):
                raise
            generation.explain()
            raise RendezvousError(
                f"{self.name}, rank {rank} of {world_size}: the ranks could not connect: {first_line(error)}; "
                "set GLOO_SOCKET_IFNAME to the network interface if it is not that of the host name"
            ) from error
        self._native = made.pop()
        self._find_accepted(here, time.monotonic() + generation.deadline.left)
        return self._native

    def _find_initiated(self, listeners: Sequence[Address | None]) -> None:
        """Of each pair of ranks one initiates the connection: to the address at which the other's Gloo listens."""
        taken = {entry for other in threads.living(_transports) for entry in other._sockets.values()}
        for one in tcp_sockets():
            if one.there is not None and (one.fd, one.inode) not in taken:
                for rank in self.others:
                    if one.there == listeners[rank]:
                        self._sockets[rank] = (one.fd, one.inode)
        _transports[id(self)] = self

    def _find_accepted(self, here: Address | None, deadline: float) -> None:
        """For each pair, the rank that initiated the connection tells the other one the address of its end."""
        ends = {(one.fd, one.inode): one.here for one in tcp_sockets()}
        said = {rank: sockets.pack(ends.get(self._sockets.get(rank, (-1, 0)))) for rank in self.others}
        sends = [(rank, torch.frombuffer(bytearray(end), dtype=torch.uint8)) for rank, end in said.items()]
        heard = [(rank, torch.empty_like(end)) for rank, end in sends]
        self.exchange(sends, heard, deadline, lambda: f"{self.name}: first exchange", _HANDSHAKE)
        accepted = {one.there: (one.fd, one.inode) for one in tcp_sockets() if one.here == here}
        for rank, text in heard:
            end = sockets.unpack(text.numpy().tobytes())
            if end is not None and end in accepted:
                self._sockets[rank] = accepted[end]

    def _forked(self) -> None:
        """In a child: its copies of the sockets would keep the connections open when the parent closes them, and
        Gloo's destructors would wait for a thread that the child does not have."""
        _leak(self._native)
        self._errors = [GroupAborted(f"{self.name} belongs to the parent of this process; make a new group here")]
        for fd, number in self._sockets.values():
            if inode(fd) == number:
                os.close(fd)
        self._sockets = {}


def _check_descriptors(members: Sequence[Capabilities], name: str) -> None:
    """Raises `ResourceError`, on all ranks alike, if any of them has too few descriptors for its connections."""
    needed = len(members) - 1 + _SPARE
    short = {rank: member.descriptors for rank, member in enumerate(members) if member.descriptors < needed}
    if short:
        named = "; ".join(f"rank {rank} (pid {members[rank].pid}) has {left} left" for rank, left in short.items())
        raise ResourceError(
            f"{name}: the group needs {len(members) - 1} descriptors on each rank, and {_SPARE} to spare: {named} "
            "of its limit of open files (RLIMIT_NOFILE). Raise the limit (ulimit -n), or destroy groups that are not "
            "needed"
        )


def _context(store: Any, rank: int, world_size: int, seconds: float) -> Any:
    global _device
    with _making_device:
        device = _device
        if device is None:
            device = _device = _new_device()
    options = c10d.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], 0, timedelta(seconds=seconds)
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


def _new_device() -> Any:
    """ProcessGroupGloo's own default: the first interface of GLOO_SOCKET_IFNAME, else the host name's address."""
    interface = (os.environ.get("GLOO_SOCKET_IFNAME") or "").split(",")[0]
    if interface:
        return c10d.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return c10d.ProcessGroupGloo.create_default_device(lazy_init=False)


def _user_tag(tag: int) -> int:
    if not 0 <= tag < FIRST_OWN_TAG:
        raise InvalidArgument(f"tag={tag}: a tag from 0 to 2**30 - 1 is needed; those above are tricomm's own")
    return tag


def _leak(thing: Any) -> None:
    """Keep `thing` from ever being destroyed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _in_forked_child() -> None:
    global _device, _connecting, _making_device
    for transport in threads.living(_transports):
        transport._forked()
    if _device is not None:
        _leak(_device)
        _device = None
    _connecting, _making_device = threading.Lock(), threading.Lock()


@atexit.register
def _close_all() -> None:
    # After the calls under way had a moment to end: a thread in Gloo must not outlive what Gloo destroys at exit.
    for transport in threads.living(_transports):
        transport.close()


os.register_at_fork(after_in_child=_in_forked_child)
