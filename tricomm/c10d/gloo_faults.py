"""What ends a wait on a c10d group's connections before its messages have come, and who is named for it.

One thread of the process looks at the waits under way: is their time over, has a process that they need ended or
been stopped, is a connection closed. It ends such a wait by shutting down connections; the thread that waited finds
out which messages are missing, and why. A rank that gives a group up writes the reason into the store before it
closes its connections, and the others look for it there. Without the store they still name who is missing.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tricomm import env, errors
from tricomm.errors import CollectiveTimeout, GroupAborted, PeerDied, PeerStalled, RendezvousError, TricommError
from tricomm.store import process
from tricomm.store.bounded_store import BoundedStore, first_line
from tricomm.store.records import MessageHeader

if TYPE_CHECKING:
    from tricomm.c10d.gloo_transport import Transport

_TICK = 0.05
_NEW = 0.1  # seconds of a wait in which no process is looked at
_GRACE = 0.5  # for a process to end after its connections have, and for a reason to come by the store
_HELD = 1.0  # after which the connection of an ended process is closed here: a child of it may hold the other end
_STORE_SECONDS = 1.0
_BACKSTOP = 5.0  # seconds after its deadline at which Gloo itself ends a wait that nobody has ended
_LONGEST_REASON = 2000
_SPARE = 2  # threads that are kept although they have nothing to do


class Waiting:
    """One wait for messages: `todo` are ranks and handles of Gloo's, each waited for once, by one thread; then `sends`.

    `any` says that it is for one message, of whatever rank; the rank in `todo` means nothing then.
    """

    def __init__(self, transport: Transport, deadline: float, what: Callable[[], str], any: bool = False) -> None:
        self.transport, self.deadline, self.what, self.any = transport, deadline, what, any
        self.todo: list[tuple[int, Any]] = []
        self.sends: list[tuple[int, Any]] = []  # Gloo forgets one whose connection closes
        self.closing = 0.0  # seconds for which a send has been waited for over a closed connection
        self.current = -1
        self.ended = threading.Event() if any else None
        self.began = time.monotonic()
        self.missing: list[int] = []  # in the order in which their connections failed
        self.cause: BaseException | None = None
        self.closed: list[int] = []  # whose connections were closed when the first one failed
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
            # Ranks that this wait does not need, too: one of them may be why another one closed its connections.
            closed = filter(lambda rank: not self.transport.connected(rank), self.transport.others)
            self.closed = sorted({*closed, *self.missing})
            self.cause = cause

    def run(self) -> None:
        """Wait for all of it. After a failure the rest is looked through, too: what has come is not missing."""
        if self.lost:
            self.transport.cut()
        while self.todo:
            self.current, handle = self.todo.pop(0)
            self._one(self.current, handle)
        self.current = -1
        if self.ended is not None:
            self.ended.set()

    def run_sends(self) -> None:
        """Wait for what is sent, or until connections are closed; on a thread that can be left behind."""
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
            self.transport.cut()

    def wake(self) -> None:
        """Its connections are shut down. A wait for any rank, or for a send, may not notice that: it is left behind."""
        if self.ended is not None and not self.ended.is_set():
            self.failed(self.current, RuntimeError("the connections were closed"))
            self.ended.set()

    # For the watcher

    def look(self, elapsed: float) -> None:
        """End this wait where that is due; `elapsed` seconds have passed since the last look."""
        transport, now = self.transport, time.monotonic()
        if self.lost or transport.error is not None:
            transport.cut()
        elif now > self.deadline:
            self.timed_out = True
            transport.cut()
        else:
            peers = self.peers()
            closed = [r for r in peers if not transport.connected(r)]
            if not self.any:
                for rank in closed:
                    self._try(rank)
                self.closing = self.closing + elapsed if self.ended is not None and self.current in closed else 0.0
                if self.closing > _GRACE:
                    transport.cut()
            elif len(closed) == len(peers):
                transport.cut()
            if now - self.began > _NEW:
                self._processes(peers, elapsed)

    def _try(self, rank: int) -> None:
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
            state = process.state(member.pid, member.started)
            if state == process.ENDED:
                self.gone[rank] = self.gone.get(rank, 0.0) + elapsed
                if self.gone[rank] > _HELD and transport.connected(rank):
                    transport.cut(rank)
            self.stopped[rank] = self.stopped.get(rank, 0.0) + elapsed if state == process.STOPPED else 0.0
            if self.stopped[rank] > transport.stall and not self.any:
                transport.cut(rank)

    # For the thread that waited

    def verdict(self) -> TricommError:
        """What to raise. The group is lost by it, and the others are told."""
        transport = self.transport
        if transport.error is None:
            found = self._diagnosed()
            if transport.lose(found):
                tell(transport, found)
                transport.cut()
        lost_by = transport.error
        assert lost_by is not None, "a transport is lost before its calls are judged"
        error = type(lost_by)(f"{self.what()}: {lost_by}. The group is lost; make a new one")
        error.__cause__ = self.cause
        return error

    def _diagnosed(self) -> TricommError:
        waited = time.monotonic() - self.began
        missing = sorted(set(self.missing)) or sorted(self.peers())
        stalled = [r for r, seconds in self.stopped.items() if seconds > self.transport.stall]
        if self.timed_out:
            stalled = [r for r in missing if self._state(r) == process.STOPPED]
            said = self._reasons()
            ended = [r for r in self._ended(missing) if r not in said]
            if ended:
                return self._died(ended)
        if stalled:
            who = ", ".join(f"rank {r} (pid {self.transport.members[r].pid})" for r in stalled)
            return PeerStalled(f"{who} is stopped; waited {waited:.1f} s")
        if self.timed_out or "imed out" in str(self.cause):
            limit = self.deadline - self.began
            return CollectiveTimeout(f"timed out: rank(s) {missing} have not come within the timeout of {limit:.1f} s")
        return self._closed(missing)

    def _closed(self, missing: list[int]) -> TricommError:
        """A connection was closed from outside. Its process may have lost it a moment before it counts as ended."""
        transport = self.transport
        closed = self.closed or missing
        # Of several, some closed theirs because of another one, and say so when their own grace is over.
        end = time.monotonic() + (_GRACE if len(closed) == 1 else 2 * _GRACE)
        reasons = _Reasons(transport)
        try:
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
        finally:
            reasons.close()
        ended = self._ended(sorted(transport.visible))
        if ended:
            return self._died(ended)
        if transport.visible.issuperset(closed):
            who = ", ".join(f"rank {r} (pid {transport.members[r].pid})" for r in closed)
            return PeerDied(
                f"{who} has left: its process runs, but it closed its connections of this group, as "
                "destroy_process_group does"
            )
        return GroupAborted(f"the connection to rank(s) {closed} failed: {first_line(self.cause or RuntimeError())}")

    def _reasons(self) -> dict[int, TricommError]:
        reasons = _Reasons(self.transport)
        try:
            return reasons.read()
        finally:
            reasons.close()

    def _died(self, ranks: list[int]) -> PeerDied:
        pids = [self.transport.members[r].pid for r in ranks]
        return PeerDied(f"the process of rank(s) {ranks} (pid {', '.join(map(str, pids))}) has ended")

    def _ended(self, ranks: list[int]) -> list[int]:
        return [r for r in ranks if self._state(r) == process.ENDED]

    def _state(self, rank: int) -> str | None:
        if rank not in self.transport.visible:
            return None
        return process.state(self.transport.members[rank].pid, self.transport.members[rank].started)


# Reasons

_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TricommError)
}


def tell(transport: Transport, error: TricommError) -> None:
    """Write into the store why this rank gives the group up; in vain if the store does not answer."""
    bounded = BoundedStore(transport.store, _STORE_SECONDS)
    try:
        text = f"{type(error).__name__}\n{error}".encode()[:_LONGEST_REASON]
        bounded.set(str(transport.rank), _header(transport, transport.rank).seal(text, env.token()))
    except RendezvousError:
        pass
    finally:
        bounded.close()


def _header(transport: Transport, rank: int) -> MessageHeader:
    return MessageHeader(rank, transport.world_size, 1, "lost")


class _Reasons:
    """What other ranks wrote about why they gave the group up. What is not theirs counts for nothing."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._token = transport, env.token()
        self._others = transport.others
        self._store: BoundedStore | None = BoundedStore(transport.store, _STORE_SECONDS)

    def read(self) -> dict[int, TricommError]:
        found: dict[int, TricommError] = {}
        if self._store is None:
            return found
        try:
            for rank in self._others:
                data = self._store.read(str(rank))
                if data is not None:
                    said = _header(self._transport, rank).open(data, self._token)
                    kind, _, text = said[:_LONGEST_REASON].decode(errors="replace").partition("\n")
                    found[rank] = _KINDS.get(kind, GroupAborted)(text)
        except RendezvousError:  # the store is gone as well, or somebody else writes to it
            self.close()
        return found

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


# Threads: one that watches, and as many that wait as the main thread and messages of any rank need at once

_waits: set[Waiting] = set()
_awake = threading.Event()
_starting = threading.Lock()
_watcher: threading.Thread | None = None
_helpers: list[queue.SimpleQueue[Job]] = []  # of those that have nothing to do


class Job:
    """An action that a helper thread runs; `wait` may be interrupted by a signal's handler, the action is not."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        try:
            jobs = _helpers.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            threading.Thread(target=_help, args=(jobs,), name="tricomm-gloo-wait", daemon=True).start()
        jobs.put(self)

    def run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        self._running.release()

    def wait(self, seconds: float = -1.0) -> bool:
        """Until it has run, for `seconds` at most; whether it has."""
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> None:
        """Raises what the action, which has run, raised."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def watch(waiting: Waiting) -> None:
    """Look at `waiting` from now on."""
    global _watcher
    _waits.add(waiting)
    if not _awake.is_set():
        _awake.set()
        with _starting:
            if _watcher is None:
                _watcher = threading.Thread(target=_watch, name="tricomm-gloo-watch", daemon=True)
                _watcher.start()


unwatch = _waits.discard


def wake(transport: Transport) -> None:
    """The connections of `transport` are shut down."""
    for waiting in list(_waits):
        if waiting.transport is transport:
            waiting.wake()


def _help(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        job = jobs.get()
        job.run()
        del job
        if len(_helpers) >= _SPARE:  # a moment that needed many threads does not keep them for good
            return
        _helpers.append(jobs)


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
        # A process that was stopped itself has seen nothing meanwhile.
        elapsed, last = min(now - last, 4 * _TICK), now
        for waiting in list(_waits):
            try:
                waiting.look(elapsed)
            except Exception as error:  # a wait that nobody watches might never end
                waiting.failed(-1, error)
                waiting.transport.cut()


def _child() -> None:
    global _awake, _starting, _watcher
    _waits.clear()
    _helpers.clear()
    _awake, _starting, _watcher = threading.Event(), threading.Lock(), None


os.register_at_fork(after_in_child=_child)
