"""Faults of a wait for messages on a c10d group's connections: how it is ended, and which rank the error names.

The watcher thread looks at the waits under way: whether their time is over, whether a process that
they need has ended or is stopped, whether a connection is closed. It ends such a wait by shutting down connections; the
thread that waited finds out which messages are missing, and why. A rank that gives a group up writes the reason into
the store before it closes its connections, and the others look for it there. Without the store they still name the
ranks that are missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Protocol

from tricomm import env, errors, threads
from tricomm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    PeerDied,
    PeerStalled,
    RendezvousError,
    TricommError,
)
from tricomm.store import process
from tricomm.store.bounded_store import BoundedStore, first_line
from tricomm.store.records import Capabilities, MessageHeader

_NEW = 0.1  # seconds of a wait before processes are looked at
_GRACE = 0.5  # seconds for a process to end after its connections, and for a reason to come through the store
_HELD = 1.0  # after which the connection of an ended process is closed here: a child of it may hold the other end
_STORE_SECONDS = 1.0
_BACKSTOP = 5.0  # seconds after its deadline at which Gloo itself ends a wait that the watcher has not ended
_LONGEST_REASON = 2000
_TICK = 0.05  # seconds between two looks at the waits in flight

_waits: set[Wait] = set()
_awake = threading.Event()
_starting = threading.Lock()
_watcher: threading.Thread | None = None


class Connections(Protocol):
    """The part of a `Transport` that a wait uses.

    `visible` are the ranks whose processes this one can look at; `stall` is in seconds; `generation` is the name of the
    group's.
    """

    rank: int
    world_size: int
    others: list[int]
    members: Sequence[Capabilities]
    visible: set[int]
    generation: str
    stall: float
    store: Any

    @property
    def error(self) -> TricommError | None: ...
    def connected(self, rank: int) -> bool: ...
    def shut_down(self, rank: int | None = None) -> None: ...
    def record_loss(self, error: TricommError) -> bool: ...
    def of_loss(self, error: TricommError) -> TricommError: ...


class Wait:
    """One wait for messages: one thread waits for each (rank, handle of Gloo) in `todo`, and then for `sends`.

    `in_callback`: a callback makes the call. `any`: the wait is for one message from any rank, and the rank in `todo`
    has no meaning.
    """

    def __init__(
        self, transport: Connections, deadline: float, what: Callable[[], str], any: bool = False,
        in_callback: bool = False,
    ) -> None:  # fmt: skip
        self.transport, self.deadline, self.what, self.any = transport, deadline, what, any
        self.in_callback = in_callback
        self.todo: list[tuple[int, Any]] = []
        self.sends: list[tuple[int, Any]] = []  # Gloo forgets one whose connection closes
        self.closing = 0.0  # seconds of waiting for a send over a closed connection
        self.current = -1
        self.ended = threading.Event() if any else None
        self.began = time.monotonic()
        self.missing: list[int] = []  # in the order in which their connections failed
        self.cause: BaseException | None = None
        self.closed: list[int] = []  # ranks whose connections were closed when the first one failed
        self.timed_out = False
        self.stopped: dict[int, float] = {}  # rank: seconds
        self.gone: dict[int, float] = {}  # rank: seconds since its process was seen to have ended

    @property
    def lost(self) -> bool:
        return self.cause is not None

    def peers(self) -> set[int]:
        """The ranks that it may still need."""
        if self.any:
            return set(self.transport.others)
        return ({rank for rank, _ in self.todo + self.sends} | {self.current}) - {-1}

    def failed(self, rank: int, cause: BaseException) -> None:
        if rank >= 0 and not self.any:
            self.missing.append(rank)
        if self.cause is None:
            # Include ranks that this wait does not need: one may be the reason why another closed its connections.
            closed = filter(lambda rank: not self.transport.connected(rank), self.transport.others)
            self.closed = sorted({*closed, *self.missing})
            self.cause = cause

    def run(self) -> None:
        """Wait for all of `todo`. After a failure still look at the rest: messages that have come are not missing."""
        if self.lost:
            self.transport.shut_down()
        while self.todo:
            self.current, handle = self.todo.pop(0)
            self._one(self.current, handle)
        self.current = -1
        if self.ended is not None:
            self.ended.set()

    def run_sends(self) -> None:
        """Wait until the messages are sent or connections are closed; on a thread that can be left behind."""
        while self.sends and not self.lost:
            self.current, handle = self.sends.pop(0)
            self._one(self.current, handle)
        self.current = -1
        if self.ended is not None:
            self.ended.set()

    def _one(self, rank: int, handle: Any, seconds: float | None = None) -> None:
        limit = max(self.deadline - time.monotonic(), 0.0) + _BACKSTOP if seconds is None else seconds
        try:
            handle.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            self.failed(rank, error)
            self.transport.shut_down()

    def wake(self) -> None:
        """Its connections are shut down. A wait for any rank, or for a send, may not notice that: leave it behind."""
        if self.ended is not None and not self.ended.is_set():
            self.failed(self.current, RuntimeError("the connections were closed"))
            self.ended.set()

    # For the watcher

    def look(self, elapsed: float) -> None:
        """End this wait if it cannot succeed any more; `elapsed` seconds have passed since the last look."""
        transport, now = self.transport, time.monotonic()
        if self.lost or transport.error is not None:
            transport.shut_down()
        elif now > self.deadline:
            self.timed_out = True
            transport.shut_down()
        else:
            peers = self.peers()
            closed = [r for r in peers if not transport.connected(r)]
            if not self.any:
                for rank in closed:
                    self._collect(rank)
                self.closing = self.closing + elapsed if self.ended is not None and self.current in closed else 0.0
                if self.closing > _GRACE:
                    transport.shut_down()
            elif len(closed) == len(peers):
                transport.shut_down()
            if now - self.began > _NEW:
                self._processes(peers, elapsed)

    def _collect(self, rank: int) -> None:
        """The connection to `rank` is closed: each of its messages has come, or never will."""
        for entry in [entry for entry in self.todo if entry[0] == rank]:
            try:
                self.todo.remove(entry)
            except ValueError:  # the waiting thread has it
                continue
            self._one(*entry, seconds=1.0)

    def _processes(self, peers: set[int], elapsed: float) -> None:
        transport = self.transport
        for rank in peers & transport.visible:
            member = transport.members[rank]
            state = process.state(member.pid, member.start_time)
            if state == process.ENDED:
                self.gone[rank] = self.gone.get(rank, 0.0) + elapsed
                if self.gone[rank] > _HELD and transport.connected(rank):
                    transport.shut_down(rank)
            self.stopped[rank] = self.stopped.get(rank, 0.0) + elapsed if state == process.STOPPED else 0.0
            if self.stopped[rank] > transport.stall and not self.any:
                transport.shut_down(rank)

    # For the thread that waited

    def final_error(self) -> TricommError:
        """The error to raise. Marks the group as lost, and tells the other ranks."""
        transport = self.transport
        if transport.error is None:
            error = self._diagnose()
            if transport.record_loss(error):
                publish_reason(transport, error)
                transport.shut_down()
        lost_by = transport.error
        assert lost_by is not None, "a transport is lost before its calls are judged"
        error = transport.of_loss(type(lost_by)(f"{self.what()}: {lost_by}. The group is lost; make a new one"))
        error.__cause__ = self.cause
        return error

    def _diagnose(self) -> TricommError:
        waited = time.monotonic() - self.began
        missing = sorted(set(self.missing)) or sorted(self.peers())
        stalled = [r for r, seconds in self.stopped.items() if seconds > self.transport.stall]
        if self.timed_out:
            stalled = [r for r in missing if self._state(r) == process.STOPPED]
            with closing(_PublishedReasons(self.transport)) as reasons:
                said = reasons.read()
            ended = [r for r in self._ended(missing) if r not in said]
            if ended:
                return self._died(ended)
        if stalled:
            named = ", ".join(f"rank {r} (pid {self.transport.members[r].pid})" for r in stalled)
            return PeerStalled(f"{named} is stopped; waited {waited:.1f} s")
        if self.timed_out or "imed out" in str(self.cause):
            limit = self.deadline - self.began
            if self.in_callback:
                return CollectiveMismatch(
                    f"rank(s) {missing} have not made this call within the timeout of {limit:.1f} s: a callback makes "
                    "it, which every rank must attach to the same call's future, in the same place"
                )
            return CollectiveTimeout(f"timed out: rank(s) {missing} have not come within the timeout of {limit:.1f} s")
        return self._closed(missing)

    def _closed(self, missing: list[int]) -> TricommError:
        """The error for a connection that a peer closed. A process loses its connections a moment before it counts as
        ended."""
        transport = self.transport
        closed = self.closed or missing
        # If several closed theirs, some did so because of another one, and say so once their own grace is over.
        end = time.monotonic() + (_GRACE if len(closed) == 1 else 2 * _GRACE)
        with closing(_PublishedReasons(transport)) as reasons:
            while True:
                said = reasons.read()
                ended = [r for r in self._ended(missing) if r not in said]
                if said:
                    rank, told = next(iter(said.items()))
                    return type(told)(f"rank {rank} gave the group up: {told}")
                if ended:
                    return self._died(ended)
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
        ended = self._ended(sorted(transport.visible))
        if ended:
            return self._died(ended)
        if transport.visible.issuperset(closed):
            named = ", ".join(f"rank {r} (pid {transport.members[r].pid})" for r in closed)
            return PeerDied(
                f"{named} has left: its process runs, but it closed its connections of this group, as "
                "destroy_process_group does"
            )
        return GroupAborted(f"the connection to rank(s) {closed} failed: {first_line(self.cause or RuntimeError())}")

    def _died(self, ranks: list[int]) -> PeerDied:
        pids = [self.transport.members[r].pid for r in ranks]
        return PeerDied(f"the process of rank(s) {ranks} (pid {', '.join(map(str, pids))}) has ended")

    def _ended(self, ranks: list[int]) -> list[int]:
        return [r for r in ranks if self._state(r) == process.ENDED]

    def _state(self, rank: int) -> str | None:
        if rank not in self.transport.visible:
            return None
        return process.state(self.transport.members[rank].pid, self.transport.members[rank].start_time)


# The watcher, one for all groups of a process


def watch(waiting: Wait) -> None:
    """Look at `waiting` from now on. Raises `ResourceError` if no thread can start."""
    global _watcher
    if _watcher is None:
        with _starting:
            if _watcher is None:
                _watcher = threads.start("tricomm-gloo-watch", _watch)
    _waits.add(waiting)
    if not _awake.is_set():
        _awake.set()


unwatch = _waits.discard


def wake(transport: Connections) -> None:
    """Tell the waits on `transport` that its connections are shut down."""
    for waiting in list(_waits):
        if waiting.transport is transport:
            waiting.wake()


def _watch() -> None:
    last = time.monotonic()
    while True:
        if not _waits:
            _awake.clear()
            if not _waits:
                _awake.wait()
                last = time.monotonic()
        time.sleep(_TICK)
        now = time.monotonic()
        # If this process itself was stopped, it has seen nothing meanwhile.
        elapsed, last = min(now - last, 4 * _TICK), now
        for waiting in list(_waits):
            try:
                waiting.look(elapsed)
            except Exception as error:  # a wait that is not watched might never end
                waiting.failed(-1, error)
                waiting.transport.shut_down()


def _in_forked_child() -> None:
    global _awake, _starting, _watcher
    _waits.clear()
    _awake, _starting, _watcher = threading.Event(), threading.Lock(), None


os.register_at_fork(after_in_child=_in_forked_child)


# Reasons

_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TricommError)
}


def publish_reason(transport: Connections, error: TricommError) -> None:
    """Write into the store why this rank gives the group up; does nothing if the store does not answer."""
    text = f"{type(error).__name__}\n{error}".encode(errors="replace")[:_LONGEST_REASON]
    with suppress(TricommError), closing(BoundedStore(transport.store, _STORE_SECONDS)) as bounded:
        bounded.set(str(transport.rank), _header(transport, transport.rank).seal(text, env.token()))


def _header(transport: Connections, rank: int) -> MessageHeader:
    return MessageHeader(rank, transport.world_size, 1, f"lost {transport.generation}")


class _PublishedReasons:
    """The reasons in the store why other ranks gave the group up. A record that is not theirs, or of another generation
    of the group, is ignored."""

    def __init__(self, transport: Connections) -> None:
        self._transport, self._token = transport, env.token()
        self._others = transport.others
        self._store: BoundedStore | None = BoundedStore(transport.store, _STORE_SECONDS)

    def read(self) -> dict[int, TricommError]:
        reasons: dict[int, TricommError] = {}
        if self._store is None:
            return reasons
        try:
            for rank in self._others:
                data = self._store.read(str(rank))
                with suppress(RendezvousError):
                    said = _header(self._transport, rank).open(data or b"", self._token)
                    kind, _, text = said[:_LONGEST_REASON].decode(errors="replace").partition("\n")
                    reasons[rank] = _KINDS.get(kind, GroupAborted)(text)
        except TricommError:  # the store is gone as well, or no thread can start
            self.close()
        return reasons

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
