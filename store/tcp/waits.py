"""Faults of a wait for messages: how it ends, and which rank the error names.

The waiting thread looks at its own wait from time to time: whether its time is over, and whether a process that it
needs has ended or is stopped. A rank that gives a group up writes the reason into the store before it closes its
connections, and the other ranks read it. Without the store they still name the missing ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tricomm import env, errors, threads
from tricomm.errors import CollectiveTimeout, GroupAborted, PeerDied, PeerStalled, RendezvousError, TricommError
from tricomm.store import process
from tricomm.store.bounded_store import BoundedStore, first_line
from tricomm.store.records import Capabilities, MessageHeader
from tricomm.store.tcp.matching import Transfer

TICK = 0.05  # seconds between two looks at a wait
_NEW = 0.1  # seconds of a wait before the first look at processes
_GRACE = 0.5  # seconds for a process to end after its connections, and for a reason to arrive over the store
_HELD = 1.0  # after which the connection of an ended process is closed here: a child of it may hold the other end
_STORE_SECONDS = 1.0
_LONGEST_REASON = 2000
_LOSS = "tricomm_loss"  # attribute of an error that caused the loss of a group


class Connections(Protocol):
    """The part of a `Transport` that a wait uses.

    `visible` are the ranks whose processes this one can look at; `stall` is in seconds; `generation` is the name of the
    group's; `remedy` says how the ranks go on once the group is lost.
    """

    rank: int
    world_size: int
    others: list[int]
    members: Sequence[Capabilities]
    visible: set[int]
    generation: str
    stall: float
    store: Any
    remedy: str

    @property
    def error(self) -> TricommError | None: ...
    def closed(self) -> list[int]: ...
    def shut_down(self, rank: int | None = None) -> None: ...
    def record_loss(self, error: TricommError) -> bool: ...
    def of_loss(self, error: TricommError) -> TricommError: ...


Late = Callable[[list[int], float], TricommError]  # of the missing ranks and the limit in seconds


def not_come(missing: list[int], limit: float) -> TricommError:
    """The error of a wait for the ranks `missing`, for `limit` seconds."""
    return CollectiveTimeout(f"timed out: rank(s) {missing} have not come within the timeout of {limit:.1f} s")


class Wait:
    """A thread's wait for messages; `what` describes the call, `late` makes the error if its time is over.

    left   messages that are not done
    cause  why the wait ends although some are left
    """

    def __init__(self, transport: Connections, deadline: float, what: Callable[[], str], late: Late = not_come) -> None:
        self.transport, self.deadline, self.what, self._late = transport, deadline, what, late
        self.messages: list[Transfer] = []
        self.left = 0
        self.cause: BaseException | None = None
        self.began = self._looked = time.monotonic()
        self._timed_out = False
        self._stopped: dict[int, float] = {}  # rank: seconds
        self._gone: dict[int, float] = {}  # rank: seconds since its process was seen to have ended
        self._latch: threading.Lock | None = None

    @property
    def over(self) -> bool:
        return not self.left or self.cause is not None

    def add(self, messages: list[Transfer]) -> None:
        """Add `messages` to the wait."""
        self.messages += messages
        for message in messages:
            if not message.done:
                self.left += 1
                message.waiters.append(self)
            elif message.error is not None and self.cause is None:
                self.cause = message.error

    def finished(self, message: Transfer) -> None:
        self.left -= 1
        if message.error is not None and self.cause is None:
            self.cause = message.error
        if self._latch is not None and self.over:
            self.wake()

    # While another thread moves the messages

    def prepare_sleep(self) -> None:
        if self._latch is None:
            self._latch = threading.Lock()
        self._latch.acquire(blocking=False)

    def sleep(self) -> None:
        """Return once `wake` was called after `prepare_sleep`, or it is time to look."""
        assert self._latch is not None, "prepared"
        self._latch.acquire(timeout=TICK)

    def wake(self) -> None:
        if self._latch is not None:
            with suppress(RuntimeError):  # it is open
                self._latch.release()

    # Looking

    def look(self) -> None:
        """End this wait if it cannot succeed any more."""
        if self.over:
            return
        now = time.monotonic()
        # If this process itself was stopped, it has seen nothing meanwhile.
        elapsed = min(now - self._looked, 4 * TICK)
        if now - self._looked < TICK:
            return
        self._looked = now
        if now > self.deadline:
            self._timed_out = True
            self.cause = TimeoutError("the time is over")
        elif now - self.began > _NEW:
            self._look_at_processes(elapsed)

    def _look_at_processes(self, elapsed: float) -> None:
        transport = self.transport
        from_any = any(message.any for message in self.messages)
        for rank in self.peers() & transport.visible:
            member = transport.members[rank]
            state = process.state(member.pid, member.start_time)
            if state == process.ENDED:
                self._gone[rank] = self._gone.get(rank, 0.0) + elapsed
                if self._gone[rank] > _HELD:
                    transport.shut_down(rank)
            self._stopped[rank] = self._stopped.get(rank, 0.0) + elapsed if state == process.STOPPED else 0.0
            if self._stopped[rank] > transport.stall and not from_any:
                self.cause = TimeoutError(f"rank {rank} is stopped")

    def peers(self) -> set[int]:
        """The ranks that it may still need."""
        missing = [message for message in self.messages if not message.done or message.error is not None]
        if any(message.any for message in missing):
            return set(self.transport.others)
        return {message.rank for message in missing}

    # The error

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
        error = transport.of_loss(type(lost_by)(f"{self.what()}: {lost_by}. The group is lost; {transport.remedy}"))
        error.__cause__ = self.cause
        return error

    def _diagnose(self) -> TricommError:
        waited = time.monotonic() - self.began
        missing = sorted(self.peers())
        stalled = [r for r, seconds in self._stopped.items() if seconds > self.transport.stall]
        if self._timed_out:
            stalled = [r for r in missing if self._state(r) == process.STOPPED]
            with closing(_PublishedReasons(self.transport)) as reasons:
                said = reasons.read()
            ended = [r for r in self._ended(missing) if r not in said]
            if ended:
                return self._died(ended)
        if stalled:
            named = ", ".join(f"rank {r} (pid {self.transport.members[r].pid})" for r in stalled)
            return PeerStalled(f"{named} is stopped; waited {waited:.1f} s")
        if self._timed_out:
            return self._late(missing, self.deadline - self.began)
        return self._closed(missing)

    def _closed(self, missing: list[int]) -> TricommError:
        """The error for a connection that a peer closed. A process loses its connections a moment before it counts as
        ended."""
        transport = self.transport
        # Include ranks that this wait does not need: one may be the reason why another closed its connections.
        closed = transport.closed() or missing
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


# The loss of a group


@dataclass
class Loss:
    """The loss of a group. `told`: an error that names the cause has been raised to the caller."""

    told: bool = False

    def said_by(self, error: TricommError) -> TricommError:
        """`error`, marked as one that tells the caller the cause of the loss."""
        setattr(error, _LOSS, self)
        return error


def told(error: BaseException) -> None:
    """Record that `error` is raised to the caller, by a call or by a wait for one."""
    loss = getattr(error, _LOSS, None)
    if loss is not None:
        loss.told = True


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


# Wake-ups


class Waker:
    """Ends one thread's waits. `tick` is in milliseconds: without a descriptor the thread looks more often."""

    def __init__(self) -> None:
        self.tick, self.fd = TICK * 1000.0, -1
        try:
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self.tick = 2.0

    def wake(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(OSError):
            os.eventfd_read(self.fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at the interpreter's end
        if self.fd >= 0:
            close(self.fd)


def waker_of_thread() -> Waker:
    """This thread's waker."""
    kept: Waker | None = getattr(threads.kept, "waker", None)
    if kept is None:
        kept = threads.kept.waker = Waker()
    return kept
