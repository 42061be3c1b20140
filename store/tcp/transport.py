"""A c10d group's connections on the CPU: one TCP connection to each other rank.

The thread that waits for messages moves them itself: it *drives* the connections, so that a call costs no switch of
threads, and a signal's handler can run meanwhile. Of several threads that wait at once, one drives, also for the
others, which sleep; when it is done, another one takes over. `progress` moves messages without a waiting thread.

Collectives are exchanges of messages (`exchange`), with tags from `FIRST_OWN_TAG` on; users' messages have lower tags.

One lock guards the messages. No thread holds it while it waits, and it is taken by `with` alone, so that an interrupt
cannot leave it taken.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from tricomm import threads
from tricomm.errors import CollectiveMismatch, GroupAborted, ResourceError, TricommError
from tricomm.store import process
from tricomm.store.bounded_store import first_line
from tricomm.store.generation import Generation
from tricomm.store.records import Capabilities
from tricomm.store.tcp import progress, set_up, waits
from tricomm.store.tcp.matching import ANY, HANDSHAKE, Matching, Transfer
from tricomm.store.tcp.peer import STAGING_BYTES, Peer, poller_of
from tricomm.store.tcp.waits import Late, Loss, Wait, Waker, waker_of_thread
from tricomm.threads import refuse_handlers_call

_transports: weakref.WeakValueDictionary[int, Transport] = weakref.WeakValueDictionary()


class Transport:
    """The connections of one rank of one group; made by all its ranks together.

    Every method may be called from any thread. After `fail` and `close`, and after any wait that failed, every call
    raises the cause of the group's loss.
    """

    def __init__(self, generation: Generation[Capabilities], name: str, stall: float) -> None:
        """The ranks have agreed on `generation`; its deadline also limits the connections.

        Raises `ResourceError` if a rank has too few descriptors, and as `set_up.connect` and `exchange` do.
        """
        self.rank, self.world_size, self.name, self.stall = generation.rank, generation.world_size, name, stall
        self.members: Sequence[Capabilities] = [generation.members[r] for r in range(self.world_size)]
        self.others = [r for r in range(self.world_size) if r != self.rank]
        self.others_from_next = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        here = process.node_id(), process.pid_namespace()
        self.visible = {r for r in self.others if (self.members[r].node, self.members[r].pid_namespace) == here}
        self._loss, self.remedy = Loss(), "make a new one"
        self._errors: list[TricommError] = []  # the first one counts; no lock that an interrupt could leave taken
        self.store, self.generation = PrefixStore("lost", generation.store), generation.name
        self._lock: Any = threading.RLock()  # only to see that this thread has it (`_refuse_reentry`)
        self._matching = Matching()
        self._peers: dict[int, Peer] = {}
        self._driver: Waker | None = None
        self._sleepers: list[Wait] = []
        self.watched = False  # by `progress`
        connections = set_up.connect(generation, name)
        staging = memoryview(bytearray(STAGING_BYTES))
        self._peers = {rank: Peer(rank, one, self._matching, staging) for rank, one in sorted(connections.items())}
        self._by_fd = {peer.fd: peer for peer in self._peers.values()}
        _transports[id(self)] = self
        sends, receives = ([Transfer(r, HANDSHAKE, (memoryview(bytearray(1)),)) for r in self.others] for _ in "ab")
        end = time.monotonic() + generation.deadline.left
        try:
            self.exchange(sends, receives, end, lambda: f"{name}: first exchange")
        except BaseException:
            self.close()
            raise

    # Messages

    def exchange(
        self,
        sends: list[Transfer],
        receives: list[Transfer],
        deadline: float,
        what: Callable[[], str],
        late: Late = waits.not_come,
    ) -> None:
        """Send and receive, and return when all of it is done; `deadline` is of `time.monotonic()`. `late` makes the
        error if the time is over.

        Raises `PeerDied`, `PeerStalled`, `CollectiveTimeout`, `CollectiveMismatch` or `GroupAborted`, with the text of
        `what`; the group is then lost.
        """
        messages = receives + sends
        waiting = Wait(self, deadline, what, late)
        try:
            self._refuse_reentry()
            with self._lock:
                waiting.cause = self.error
                if waiting.cause is None:
                    for message in receives:
                        self._receive(message)
                    for message in sends:
                        self._peers[message.rank].send(message, eager=True)
                    waiting.add(messages)
            self._wait(waiting)
            for message in receives:
                if message.misfit is not None:
                    raise CollectiveMismatch(
                        f"{what()}: rank {message.rank} sent {message.misfit[0]} bytes and not {message.nbytes}; make "
                        "the same call, with the same shape and type, on every rank"
                    )
        except BaseException as error:
            self._interrupted(error)
            raise

    def send(self, message: Transfer) -> None:
        """Start to send `message`, for which `wait` waits. Raises as `exchange` does."""
        self._start(message, True)

    def recv(self, message: Transfer) -> None:
        """Start to receive `message`, for which `wait` waits. Raises as `exchange` does."""
        self._start(message, False)

    def wait(self, message: Transfer, deadline: float, what: Callable[[], str]) -> None:
        """Wait for a message that `send` or `recv` began. Raises as `exchange` does."""
        waiting = Wait(self, deadline, what)
        self._refuse_reentry()
        try:
            with self._lock:
                waiting.add([message])
            self._wait(waiting)
        except BaseException as error:
            self._interrupted(error)
            raise

    def advance(self) -> bool:
        """Move what can be moved at once, unless another thread drives; whether anything moved."""
        try:
            with self._lock:
                if self._driver is not None or self.error is not None:
                    return False
                events = poller_of(self._peers.values()).poll(0)
                self._handle(events)
        except Exception as error:  # no caller hears of it
            self._interrupted(error)
            return False
        return bool(events)

    @property
    def unfinished(self) -> bool:
        """Whether there are messages to be moved."""
        return self.error is None and any(peer.interest for peer in self._peers.values())

    def _start(self, message: Transfer, sent: bool) -> None:
        if self._errors:
            self.check_usable("send" if sent else "recv")
        self._refuse_reentry()
        try:
            with self._lock:
                if sent:
                    self._peers[message.rank].send(message, eager=False)
                else:
                    self._receive(message)
                driver = self._driver
            if driver is not None:
                driver.wake()
            if not (message.done or self.watched):
                with suppress(ResourceError):  # without another thread the message is moved by `wait`
                    progress.watch(self)
        except BaseException as error:
            self._interrupted(error)
            raise

    def _receive(self, message: Transfer) -> None:
        arrival = self._matching.receive(message, self.others if message.any else (message.rank,))
        if arrival is not None:
            self._peers[arrival.rank].take(arrival, message)
        elif not message.any:
            self._peers[message.rank].expect(message)
        elif all(peer.closed is not None for peer in self._peers.values()):
            self._end_receives_from_any()

    def _end_receives_from_any(self) -> None:
        for message in self._matching.withdraw(ANY):
            message.finish(ConnectionResetError("all connections are closed"))

    # Driving

    def _wait(self, waiting: Wait) -> None:
        """Return when `waiting` is over. Raises its error."""
        me = waker_of_thread()
        try:
            while waiting.left and waiting.cause is None and not self._errors:
                with self._lock:
                    if waiting.over or self._errors:
                        break
                    if self._driver is None:
                        self._driver = me
                    driver = self._driver
                    if driver is not me:
                        waiting.prepare_sleep()
                        if waiting not in self._sleepers:
                            self._sleepers.append(waiting)
                if driver is me:
                    self._drive(waiting, me)
                else:
                    driver.wake()  # it does not know of this wait's messages
                    waiting.sleep()
                    waiting.look()
        except BaseException as error:  # before another thread drives: a frame may be half read or written
            self._interrupted(error)
            raise
        finally:
            if self._driver is me or self._sleepers:
                self._leave(waiting, me)
        if waiting.left or waiting.cause is not None:
            failure = waiting.final_error()
            self._settle()
            raise failure

    def _drive(self, waiting: Wait, me: Waker) -> None:
        """Move messages until `waiting` is over."""
        while True:
            with self._lock:
                poller = poller_of(self._peers.values(), me.fd)
            events = poller.poll(me.tick)
            with self._lock:
                if self._errors:
                    return
                self._handle(events)
                if waiting.over:
                    self._hand_over()
                    return
            waiting.look()
            if waiting.over:
                return

    def _leave(self, waiting: Wait, me: Waker) -> None:
        with self._lock:
            if waiting in self._sleepers:
                self._sleepers.remove(waiting)
            if self._driver in (me, None):
                self._hand_over()

    def _hand_over(self) -> None:
        self._driver = None
        if self._sleepers:
            self._sleepers[0].wake()

    def _handle(self, events: Iterable[tuple[int, int]]) -> None:
        for fd, event in events:
            peer = self._by_fd.get(fd)
            if peer is None:
                waker_of_thread().clear()
                continue
            if event & select.POLLOUT:
                peer.write()
            if event & ~select.POLLOUT:
                peer.read()
            if peer.closed is not None and all(other.closed is not None for other in self._peers.values()):
                self._end_receives_from_any()

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
            text = f"{self.name}: {what} on a group that is lost; {self.remedy}. Lost by: {self.error}"
            raise self.of_loss(kind(text)) from self.error

    def of_loss(self, error: TricommError) -> TricommError:
        """`error`, marked as one that tells the caller the cause of this group's loss."""
        return self._loss.said_by(error)

    def check_connected(self, what: Callable[[], str]) -> None:
        """Raises as `exchange` does if the group is lost, or if the connection to a rank is closed."""
        closed = self.closed()
        if self.error is None and not closed:
            return
        waiting = Wait(self, time.monotonic(), what)
        for rank in closed:
            message = Transfer(rank, HANDSHAKE, ())
            message.finish(ConnectionResetError("the connection is closed"))
            waiting.add([message])
        raise waiting.final_error()

    def closed(self) -> list[int]:
        """The ranks whose connections are closed."""
        with self._lock:
            poller, open = select.poll(), {peer.fd: peer.rank for peer in self._peers.values() if peer.closed is None}
            for fd in open:
                poller.register(fd, select.POLLRDHUP)
            gone = {open[fd] for fd, _ in poller.poll(0)}
            return sorted(gone | {peer.rank for peer in self._peers.values() if peer.closed is not None})

    def fail(self, error: TricommError) -> None:
        """Give the group up: tell the others why, wake every blocked wait, close the connections. Any thread may call
        it, even an interrupted one; the first error counts."""
        if self.record_loss(error):
            waits.publish_reason(self, error)
        self.shut_down()

    def record_loss(self, error: TricommError) -> bool:
        """Take `error` as the cause of the group's loss, unless there is one; True if it is the first."""
        self._errors.append(error)
        return self._errors[0] is error

    def close(self) -> None:
        """Close the connections, which the other ranks see at once; idempotent."""
        self.record_loss(GroupAborted(f"{self.name} was destroyed here"))
        self.shut_down()
        # Another thread may be reading from a socket, for a moment. This thread may be in the middle of that itself.
        if not self._lock._is_owned() and self._lock.acquire(timeout=1.0):
            try:
                self._release()
            finally:
                self._lock.release()

    def shut_down(self, rank: int | None = None) -> None:
        """Shut down the connection to `rank`, or (None) all: waits for it end on both ranks."""
        for peer in list(self._peers.values()) if rank is None else [self._peers[rank]]:
            with suppress(OSError):  # the other side was first
                peer.socket.shutdown(socket.SHUT_RDWR)
        if rank is None:
            driver = self._driver
            if driver is not None:
                driver.wake()
            for waiting in list(self._sleepers):
                waiting.wake()

    def _interrupted(self, error: BaseException) -> None:
        """Give the group up because `error` ended a call, unless a wait has raised it and did so already."""
        if isinstance(error, ResourceError | CollectiveMismatch):
            self.fail(self.of_loss(error))
        elif not isinstance(error, TricommError):
            self.fail(GroupAborted(f"rank {self.rank} was stopped by {first_line(error)}"))
        else:
            return
        self._settle()

    def _settle(self) -> None:
        """Return after other threads have stopped to use the caller's tensors: the group is lost."""
        if self._lock.acquire(timeout=1.0):
            self._lock.release()

    def _refuse_reentry(self) -> None:
        if self._lock._is_owned():
            refuse_handlers_call(self.name)

    def _release(self) -> None:
        """Close the sockets. Unread data is read first; otherwise the kernel discards what is not yet sent."""
        for peer in self._peers.values():
            with suppress(OSError):
                while peer.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                    pass
            peer.close(ConnectionAbortedError("the group was destroyed here"))
            peer.socket.close()

    def _forked(self) -> None:
        """In a child: its copies of the sockets would keep the connections open when the parent closes them."""
        self._errors = [GroupAborted(f"{self.name} belongs to the parent of this process; make a new group here")]
        self._lock, self._driver, self._sleepers = threading.RLock(), None, []
        for peer in self._peers.values():
            peer.socket.close()
        self._peers = {}

    def __del__(self) -> None:
        for peer in getattr(self, "_peers", {}).values():
            peer.socket.close()


def _in_forked_child() -> None:
    for transport in threads.living(_transports):
        transport._forked()


@atexit.register
def _close_all() -> None:
    for transport in threads.living(_transports):
        transport.close()


os.register_at_fork(after_in_child=_in_forked_child)
