"""The group's control pages: the ranks' shared state, read without a store, a socket or a collective.

Each rank has one segment that only it writes and all others map read-only (`tricomm.store.page`): its identity, its
state, its last calls, and the reason if it has aborted.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tricomm import errors
from tricomm.deadline import Deadline, poll
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, TricommError
from tricomm.store import process
from tricomm.store.host_words import HostWords
from tricomm.store.page import (
    MESSAGE_BYTES,
    RING,
    Descriptor,
    Fault,
    PackedDescriptor,
    Page,
    PageSlots,
    RankState,
    Slots,
)
from tricomm.store.records import ExchangeMessage
from tricomm.store.segments import Segment

__all__ = ["RING", "ControlPage", "Descriptor", "Fault", "Host", "PackedDescriptor", "RankSegment", "RankState"]

_LOOK_SECONDS = 0.02
_DIGEST_BYTES, _VALUE_BYTES = 32, 480
_KIND_BYTES = 32
_DONE, _FAILED = b"\0", b"\1"  # the first byte of a message in an exchange


@dataclass(frozen=True)
class RankSegment:
    """One rank: its control segment as mapped here, and its process as it has introduced itself. `watched` watches the
    process; None: the process is in this PID namespace, and `ControlPage` watches it."""

    segment: Segment
    pid: int
    start_time: int
    watched: process.Watched | None = None


class Host:
    """The environment of a control page, for ranks that are processes or threads of this machine; a simulation
    overrides it."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        time.sleep(seconds)

    def watch(self, rank: int, member: RankSegment) -> process.Watched:
        return member.watched or process.watch(member.pid, member.start_time)

    def changed(self) -> None:
        """Called when this rank's page has changed. Does nothing, because peers that share its memory see the
        change."""


class ControlPage:
    """All ranks' control pages. Takes over the segments of `members` (one per rank) and closes them with itself.

    `group` is a short name for messages. `host` is this machine by default. `slots`, for ranks that share no memory, is
    called with a limit in seconds and opens the slots of one exchange; `peers` is then empty. Methods raise
    `GroupAborted` after `close` and in a forked child, `InvalidArgument` for a rank outside the group.
    """

    def __init__(
        self,
        rank: int,
        nonce: bytes,
        members: Sequence[RankSegment],
        host: Host | None = None,
        slots: Callable[[float], AbstractContextManager[Slots]] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = len(members)
        self.nonce = nonce
        self.group = nonce[:4].hex()
        self._members = tuple(members)
        self._pages = tuple(Page(m.segment.buffer, m.segment.address) for m in members)
        self._host = host or Host()
        self._slots = slots
        self._watched = () if slots else tuple(self._host.watch(r, member) for r, member in enumerate(members))
        self._owner, self._forks = os.getpid(), process.forks()
        self._step = 0
        self._lock = threading.RLock()  # reentrant, because a signal handler may raise a fault while this thread does
        self._exchanging = threading.Lock()
        self.doing: Callable[[int], str] = _nothing  # why a rank may be late in an exchange, in words
        self.limit: Deadline | None = None  # limits all exchanges while the ranks set up a smaller group
        self.device_words = self._pages[rank].device_address
        self.host_words = HostWords(members[rank].segment.buffer, self.device_words)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks whose pages are visible here: all of them if memory is shared, else none."""
        return () if self._slots else tuple(r for r in range(self.world_size) if r != self.rank)

    def pid(self, rank: int) -> int:
        return self.member(rank).pid

    def stopped(self, rank: int) -> bool:
        """True if the rank's process is known to be stopped; False if it is in another PID namespace."""
        watched = self._watched
        self._check(rank)
        return bool(watched) and watched[rank].stopped()

    def cpu_ticks(self, rank: int) -> int:
        """`Watched.cpu_ticks` of the rank's process."""
        watched = self._watched
        self._check(rank)
        return watched[rank].cpu_ticks() if watched else 0

    def alive(self, rank: int) -> bool:
        """True while the rank's process runs or is stopped; a later process with its pid does not count. Without shared
        memory nothing is known of other processes, and they count as alive."""
        watched = self._watched  # read once: another thread may close meanwhile
        self._check(rank)
        return watched[rank].alive() if watched else True

    def beat(self) -> None:
        self.own().beat()

    def set_state(self, state: RankState) -> None:
        self.own().state = state
        self._host.changed()

    def announcer(self) -> Callable[[int, PackedDescriptor], None]:
        """A function announce(sequence, packed), which publishes this rank's call number `sequence`; the last 8 stay
        readable.

        It checks nothing, because every collective calls it: do not use it after `close` or in a forked child.
        """
        return self.own().announcer()

    def raise_fault(self, fault: Fault) -> None:
        """Publish why this rank aborts the group. A later fault does not replace the first; its text is cut to fit the
        page."""
        with self._lock:
            self.own().put_fault(fault)
            self._host.changed()

    def exchange(
        self,
        payload: bytes,
        what: str,
        timeout: float,
        abort_on_fault: bool = False,
        error: BaseException | None = None,
    ) -> list[bytes]:
        """Returns every rank's `payload` (at most 1024 bytes), in rank order, if no rank passed an `error`; otherwise
        raises the same error on every rank. All ranks call it in the same order.

        The class of that error is that of the lowest failed rank's error, or `TricommError` if tricomm does not define
        it; its text names the ranks that failed, and their reasons.

        Also raises within `timeout` seconds: `PeerDied` if a rank that is missing in this exchange has ended or closed
        the group (or its fault, if it has published one), `CollectiveTimeout` that names the missing ranks,
        `CollectiveMismatch` if a rank is at another exchange than `what`, `GroupAborted` if a rank has left the
        exchange without this rank. With `abort_on_fault` also `GroupAborted` if a missing rank has aborted the group,
        and `CollectiveMismatch` if it is in a call that this rank has not made.
        """
        if len(payload) > MESSAGE_BYTES:
            raise InvalidArgument(f"{what}: {len(payload)} bytes to exchange; at most {MESSAGE_BYTES} are possible")
        with self._exchanging:
            timeout = timeout if self.limit is None else min(timeout, self.limit.left)
            self._step += 1
            mine = ExchangeMessage(
                self._step, what, _DONE + payload if error is None else _FAILED + packed_error(error)
            )
            self.own()
            with self._slots(timeout) if self._slots else nullcontext(PageSlots(self.page, self.rank)) as slots:
                answers = self._gather(slots, mine, timeout, abort_on_fault)
        failed = {rank: answer[1:] for rank, answer in enumerate(answers) if answer[:1] == _FAILED}
        if failed:
            reasons = [f"rank {rank}: {text[_KIND_BYTES:].decode(errors='ignore')}" for rank, text in failed.items()]
            raise error_kind(next(iter(failed.values())))(f"{what}: {'; '.join(reasons)}") from error
        return [answer[1:] for answer in answers]

    def agree(self, error: BaseException | None, what: str, timeout: float, abort_on_fault: bool = False) -> None:
        """Return if every rank passed None as `error`; otherwise raises as `exchange` does."""
        self.exchange(b"", what, timeout, abort_on_fault, error)

    def require_equal(
        self, value: str, what: str, timeout: float, abort_on_fault: bool = False, error: BaseException | None = None
    ) -> None:
        """Return if every rank passed the same `value`; otherwise raise the same `InvalidArgument` on every rank.

        Its text has rank 0's value and the value of the lowest rank that differs. Also raises as `exchange` does.
        """
        text = value.encode(errors="replace")
        mine = hashlib.sha256(text).digest() + text[:_VALUE_BYTES]
        answers = self.exchange(mine, what, timeout, abort_on_fault, error)
        for rank, theirs in enumerate(answers):
            if theirs != answers[0]:
                first, other = (answer[_DIGEST_BYTES:].decode(errors="ignore") for answer in (answers[0], theirs))
                raise InvalidArgument(f"{what}: rank 0 has {first}, rank {rank} has {other}; give all ranks the same")

    def give_up_if_refused(self) -> None:
        """Called by a rank that waits inside a stage of a set-up: if another rank has already entered the exchange that
        ends the stage with an error, or has left, raise an error of the same class."""
        for rank, theirs in PageSlots(self.page, self.rank).posted(self.peers, self._step + 1):
            if theirs.step == self._step + 1 and theirs.payload[:1] == _FAILED:
                raise error_kind(theirs.payload[1:])(
                    f"rank {self.rank} stopped waiting, because rank {rank} has failed"
                )
        for rank in self.peers:
            if self.page(rank).state == RankState.CLOSED and (fault := self.page(rank).fault()) is not None:
                raise error_kind(fault.kind.encode())(fault.text)

    def take_place(self, before: ControlPage) -> None:
        """Map this rank's words at the address of the words of `before`, because captured graphs read that address.
        `before` then has the same words. Raises as `HostWords.follow`; it can be called again."""
        self.host_words = before.host_words.follow(self.device_words)
        self.device_words = self.host_words.address

    def close(self) -> None:
        """Tell the peers, and release all memory; a forked child only releases. Idempotent.

        No kernel of this rank may be running: its words are unregistered from the GPU before they are unmapped.
        """
        members, pages = self._members, self._pages
        if pages and os.getpid() == self._owner:
            pages[self.rank].state = RankState.CLOSED
            self._host.changed()
        # Only after the peers have been told: in one process this may wait for their kernels, which wait for this
        # rank's kernels.
        self.host_words.close()
        self._members, self._pages = (), ()
        self.doing = _nothing  # breaks the cycle of group and page, which would keep memory alive
        for member in members:
            member.segment.close()
        self.unwatch()

    def unwatch(self) -> None:
        """Drop only the peers' pidfds: for a failed handshake, which releases everything else."""
        self._watched = ()

    def _gather(self, slots: Slots, mine: ExchangeMessage, timeout: float, abort_on_fault: bool) -> list[bytes]:
        slots.post(mine)
        self._host.changed()
        arrived = {self.rank: mine.payload}
        next_look = self._host.monotonic() + _LOOK_SECONDS

        def missing() -> list[int]:
            return [rank for rank in range(self.world_size) if rank not in arrived]

        def complete() -> bool:
            nonlocal next_look
            now, gone = self._host.monotonic(), {}
            if now >= next_look:  # before the slots are read: what a rank posted before it ended counts
                gone, next_look = self._gone(arrived), now + _LOOK_SECONDS
            arrived.update(self._from(slots, missing(), mine))
            late = missing()
            if self._slots:
                self._refuse_lost()
            elif late and abort_on_fault:
                self._refuse_diverged(slots, late, mine)
            if lost := [rank for rank in late if rank in gone]:
                text = f"{self._prefix(mine.what)}: {'; '.join(gone[rank] for rank in lost)}"
                fault = self.page(lost[0]).fault()
                raise (PeerDied if fault is None else error_kind(fault.kind.encode()))(text)
            return not late

        if not poll(complete, timeout, *slots.pauses, clock=self._host):
            late = f"timeout after {timeout:g} s: rank(s) {missing()} did not come"
            late += "" if self._slots else " although their processes run"
            doing = [f"; rank {rank} is in {text}" for rank in missing() if (text := self.doing(rank))]
            raise CollectiveTimeout(f"{self._prefix(mine.what)}: {late}{''.join(doing)}")
        return [arrived[rank] for rank in range(self.world_size)]

    def _refuse_lost(self) -> None:
        """Raise this rank's fault, if it has one; faults of other ranks are not visible."""
        fault = self.page(self.rank).fault()
        if fault is not None:
            raise error_kind(fault.kind.encode())(fault.text)

    def _refuse_diverged(self, slots: Slots, missing: list[int], mine: ExchangeMessage) -> None:
        for rank in missing:
            fault, ahead = self.page(rank).fault(), self._ahead(rank)
            # Since its slot was read, it may have posted, seen every rank's message, and begun its next call.
            if not (ahead or fault is not None) or self._from(slots, [rank], mine):
                continue
            if fault is not None:
                raise GroupAborted(f"{self._prefix(mine.what)}: rank {rank} aborted the group: {fault.text}")
            raise CollectiveMismatch(f"{self._prefix(mine.what)}: rank {rank} is in {ahead} instead")

    def _ahead(self, rank: int) -> str:
        """The call of `rank` that this rank has not made; empty if there is none."""
        call = self.page(rank).last()
        return call.text() if call is not None and call.sequence > self.page(self.rank).sequence() else ""

    def _from(self, slots: Slots, ranks: list[int], mine: ExchangeMessage) -> dict[int, bytes]:
        """By rank, the payloads of the `ranks` that have posted."""
        came = {}
        for rank, theirs in slots.posted(ranks, mine.step):
            if theirs.step > mine.step:
                raise GroupAborted(f"{self._prefix(mine.what)}: rank {rank} has gone on without this rank")
            if theirs.step == mine.step:
                if theirs.what != mine.purpose():
                    raise CollectiveMismatch(f"{self._prefix(mine.what)}: rank {rank} is at {theirs.what!r} instead")
                came[rank] = theirs.payload
        return came

    def _gone(self, arrived: Iterable[int]) -> dict[int, str]:
        """The missing ranks that will never post, and why."""
        gone = {}
        for rank in set(range(self.world_size)) - set(arrived):
            if self.page(rank).state == RankState.CLOSED:
                fault = self.page(rank).fault()
                gone[rank] = f"rank {rank} has closed the group" + (f": {fault.text}" if fault else "")
            elif not self.alive(rank):
                gone[rank] = f"rank {rank} (pid {self.pid(rank)}) died"
        return gone

    def _prefix(self, what: str) -> str:
        return f"group {self.group}, rank {self.rank} of {self.world_size}: {what}"

    def member(self, rank: int) -> RankSegment:
        """`rank`'s process and its segment."""
        self._check(rank)
        return self._members[rank]

    def page(self, rank: int) -> Page:
        """`rank`'s page; only this rank's can be written."""
        pages = self._pages  # read once: another thread may close meanwhile
        self._check(rank)
        return pages[rank]

    def own(self) -> Page:
        """This rank's page. Raises `GroupAborted` in a forked child."""
        if process.forks() != self._forks:
            raise GroupAborted(f"group {self.group} was created in pid {self._owner}; create a new one in this process")
        return self.page(self.rank)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank {rank} is not in 0..{self.world_size - 1}")
        if not self._pages:
            raise GroupAborted(f"group {self.group} is closed")


def _nothing(rank: int) -> str:
    return ""


def packed_error(error: BaseException) -> bytes:
    kind = type(error).__name__ if isinstance(error, TricommError) else TricommError.__name__
    text = str(error) if isinstance(error, TricommError) else f"{type(error).__name__}: {error}"
    return kind.encode().ljust(_KIND_BYTES, b"\0") + text.encode(errors="replace")[: MESSAGE_BYTES - _KIND_BYTES]


def error_kind(answer: bytes) -> type[TricommError]:
    kind = getattr(errors, answer[:_KIND_BYTES].rstrip(b"\0").decode(errors="ignore"), None)
    return kind if isinstance(kind, type) and issubclass(kind, TricommError) else TricommError
