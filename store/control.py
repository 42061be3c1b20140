"""The group's control page: how ranks see each other without a store, a socket or a collective.

Each rank has one segment that it alone writes and all others map read-only (`tricomm.store.page`): who it is, where
it stands, what it called, why it gave up. It works for as long as memory does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tricomm import errors
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, InvalidArgument, PeerDied, TricommError
from tricomm.store import process
from tricomm.store.cuda_driver import Driver
from tricomm.store.host_words import HostWords
from tricomm.store.page import MESSAGE_BYTES, RING, Descriptor, Fault, Message, Page, Record, State
from tricomm.store.segments import Segment

__all__ = ["RING", "ControlPage", "Descriptor", "Fault", "Member", "Record", "State"]

_LOOK_SECONDS = 0.02
_KIND_BYTES = 32


@dataclass(frozen=True)
class Member:
    """One rank: its control segment as mapped here, and its process."""

    segment: Segment
    pid: int
    start_time: int


class ControlPage:
    """All ranks' control pages. Takes over the segments of `members` (one per rank) and closes them with itself.

    `group` is a short name for messages. Methods raise `GroupAborted` after `close` and in a forked child,
    `InvalidArgument` for a rank outside the group.
    """

    def __init__(self, rank: int, nonce: bytes, members: Sequence[Member]) -> None:
        self.rank = rank
        self.world_size = len(members)
        self.nonce = nonce
        self.group = nonce[:4].hex()
        self._members = tuple(members)
        self._pages = tuple(Page(m.segment.buffer, m.segment.address) for m in members)
        self._watched = tuple(map(self._watch, range(len(members))))
        self._owner, self._forks = os.getpid(), process.forks()
        self._step = 0
        self._lock = threading.RLock()  # a signal handler may say something while this thread does
        self._exchanging = threading.Lock()
        self.device_words = self._pages[rank].device_address
        self.host_words = HostWords(members[rank].segment.buffer, self.device_words)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks whose pages can be seen from here: all of them, where memory is shared."""
        return tuple(r for r in range(self.world_size) if r != self.rank)

    def words(self) -> NDArray[np.int64]:
        """This rank's 512 words; valid also after `close`."""
        return self._own().device_words()

    def words_on_device(self, driver: Driver, ordinal: int) -> int:
        """Address of `words` for kernels of GPU `ordinal`, good until `close`; raises `ResourceError` if refused."""
        return self.host_words.on_device(driver, ordinal)

    def peer_words(self, rank: int) -> NDArray[np.int64]:
        """`rank`'s words, not writable unless they are this rank's own."""
        return self._page(rank).device_words()

    def pid(self, rank: int) -> int:
        return self._member(rank).pid

    def start_time(self, rank: int) -> int:
        """In clock ticks since boot."""
        return self._member(rank).start_time

    def alive(self, rank: int) -> bool:
        """True while the rank's process runs or is stopped; a later process with its pid does not count."""
        watched = self._watched  # one look: another thread may close meanwhile
        self._check(rank)
        return watched[rank].alive()

    def beat(self) -> None:
        self._own().heartbeat = time.monotonic_ns()

    def heartbeat(self, rank: int) -> int:
        """CLOCK_MONOTONIC of the rank's last beat, in nanoseconds; 0 before the first."""
        return self._page(rank).heartbeat

    def heartbeat_age(self, rank: int) -> float:
        """Seconds since the rank's last beat."""
        return max(0.0, (time.monotonic_ns() - self.heartbeat(rank)) / 1e9)

    def set_state(self, state: State) -> None:
        self._own().state = state
        self._said()

    def state(self, rank: int) -> State:
        return State(self._page(rank).state)

    def announcer(self) -> Callable[[int, Record], None]:
        """announce(sequence, record) says what this rank calls as its call number `sequence`; the last 8 stay readable.

        For use in this process, and before `close`: it asks no questions, for every collective calls it.
        """
        return self._own().announce

    def announce_message(self, message: Descriptor) -> None:
        """Say what this rank sends or receives as its message number `message.sequence`."""
        self._own().announce_message(message)

    def messages(self, rank: int) -> list[Descriptor]:
        """The rank's last 8 messages, in order."""
        return self._page(rank).messages()

    def last(self, rank: int) -> Descriptor | None:
        """The rank's latest call; None where it has made none."""
        return self._page(rank).last()

    def called(self, rank: int, sequence: int) -> Descriptor | None:
        """The rank's call number `sequence`; None where it has not made it, or it is more than 8 calls ago."""
        return self._page(rank).called(sequence)

    def sequence(self, rank: int) -> int:
        """Number of the rank's latest call; 0 before the first."""
        return self._page(rank).sequence

    def raise_fault(self, fault: Fault) -> None:
        """Say why this rank gives the group up. The first fault stays; its text is cut to what fits."""
        with self._lock:
            self._own().put_fault(fault)
            self._said()

    def fault(self, rank: int) -> Fault | None:
        return self._page(rank).fault()

    def exchange(self, payload: bytes, what: str, timeout: float, heed_faults: bool = False) -> list[bytes]:
        """Every rank's `payload` (at most 1024 bytes), in rank order. All ranks call it in the same order.

        Raises within `timeout` seconds: `PeerDied` where a rank that has not come to this exchange has ended or
        closed the group (`GroupAborted` where it says that it was stopped), `CollectiveTimeout` that names the missing
        ranks, `CollectiveMismatch` where a rank is at another exchange than `what`, `GroupAborted` where a rank has
        gone on without this one. With `heed_faults` also `GroupAborted` where a missing rank has given the group up,
        and `CollectiveMismatch` where it is in a call that this rank has not made.
        """
        if len(payload) > MESSAGE_BYTES:
            raise InvalidArgument(f"{what}: {len(payload)} bytes to exchange; at most {MESSAGE_BYTES} are possible")
        with self._exchanging:
            # Two slots are enough: a peer writes step s + 2 only after it has seen everybody's step s + 1, and this
            # rank posts that only after it has left step s.
            self._step += 1
            mine = Message(self._step, what, payload)
            self._own().post(mine)
            self._said()
            return self._gather(mine, timeout, heed_faults)

    def agree(self, error: BaseException | None, what: str, timeout: float, heed_faults: bool = False) -> None:
        """Return where every rank brought None; otherwise raise the same error on every rank.

        Its class is that of the lowest failed rank's error where that is tricomm's own, else `TricommError`; its
        text names the ranks that failed and what they said. Raises as `exchange` does, too.
        """
        answers = self.exchange(_pack_error(error), what, timeout, heed_faults)
        failed = {rank: answer for rank, answer in enumerate(answers) if answer}
        if failed:
            said = [f"rank {rank}: {_words(answer)}" for rank, answer in failed.items()]
            raise _kind(next(iter(failed.values())))(f"{what}: {'; '.join(said)}") from error

    def close(self) -> None:
        """Tell the peers, and let go of all memory. Idempotent. In a forked child only lets go.

        No kernel of this rank may be running: its words are taken from the device before they go.
        """
        members, pages = self._members, self._pages
        if pages and os.getpid() == self._owner:
            pages[self.rank].state = State.CLOSED
            self._said()
        # After the peers have been told: in one process this may wait for their kernels, which wait for this rank's.
        self.host_words.close()
        self._members, self._pages = (), ()
        for member in members:
            member.segment.close()
        self.unwatch()

    def unwatch(self) -> None:
        """Let go of the peers' pidfds, and of nothing else: for a page that its meeting takes apart again."""
        self._watched = ()

    def _watch(self, rank: int) -> process.Watched:
        member = self._members[rank]
        return process.watch(member.pid, member.start_time)

    def _now(self) -> float:
        return time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Let the other ranks get on."""
        time.sleep(seconds)

    def _said(self) -> None:
        """This rank's page has changed; in shared memory the peers see that by themselves."""

    def _gather(self, mine: Message, timeout: float, heed_faults: bool) -> list[bytes]:
        began = self._now()
        found = {self.rank: mine.payload}
        next_look, pause = began + _LOOK_SECONDS, 0.0
        while True:
            now = self._now()
            # Looked at before the slots: what a rank posted with its last breath counts.
            gone = self._gone(found) if now >= next_look else {}
            next_look = now + _LOOK_SECONDS if now >= next_look else next_look
            for rank in range(self.world_size):
                if rank not in found:
                    found.update(self._from(rank, mine))
            missing = [r for r in range(self.world_size) if r not in found]
            if not missing:
                return [found[r] for r in range(self.world_size)]
            if heed_faults:
                self._refuse_apart(missing, mine)
            if lost := [r for r in missing if r in gone]:
                text = f"{self._prefix(mine.what)}: {'; '.join(gone[r] for r in lost)}"
                fault = self.fault(lost[0])
                stopped = fault is not None and fault.kind == GroupAborted.__name__
                raise GroupAborted(text) if stopped else PeerDied(text)
            if now - began >= timeout:
                late = f"timeout after {timeout:g} s: rank(s) {missing} did not come"
                raise CollectiveTimeout(f"{self._prefix(mine.what)}: {late} although their processes run")
            self._pause(pause)
            pause = min(pause + 5e-5, 2e-3)

    def _refuse_apart(self, missing: list[int], mine: Message) -> None:
        for rank in missing:
            fault, call = self.fault(rank), self.last(rank)
            ahead = call is not None and call.sequence > self.sequence(self.rank)
            # It may have come since its slot was looked at, seen everybody there, and be in its next call by now.
            if not (ahead or fault is not None) or self._from(rank, mine):
                continue
            if fault is not None:
                raise GroupAborted(f"{self._prefix(mine.what)}: rank {rank} gave the group up: {fault.text}")
            if call is not None:
                raise CollectiveMismatch(f"{self._prefix(mine.what)}: rank {rank} is in {call.text()} instead")

    def _from(self, rank: int, mine: Message) -> dict[int, bytes]:
        theirs = self._page(rank).posted(mine.step)
        if theirs is None or theirs.step < mine.step:
            return {}
        if theirs.step > mine.step:
            raise GroupAborted(f"{self._prefix(mine.what)}: rank {rank} has gone on without this rank")
        if theirs.what != mine.what.encode()[:64].decode(errors="ignore"):
            raise CollectiveMismatch(f"{self._prefix(mine.what)}: rank {rank} is at {theirs.what!r} instead")
        return {rank: theirs.payload}

    def _gone(self, found: Iterable[int]) -> dict[int, str]:
        """For each rank that will not come any more, what became of it."""
        gone = {}
        for rank in set(range(self.world_size)) - set(found):
            if self.state(rank) == State.CLOSED:
                fault = self.fault(rank)
                gone[rank] = f"rank {rank} has closed the group" + (f": {fault.text}" if fault else "")
            elif not self.alive(rank):
                gone[rank] = f"rank {rank} (pid {self.pid(rank)}) died"
        return gone

    def _prefix(self, what: str) -> str:
        return f"group {self.group}, rank {self.rank} of {self.world_size}: {what}"

    def _member(self, rank: int) -> Member:
        self._check(rank)
        return self._members[rank]

    def _page(self, rank: int) -> Page:
        pages = self._pages  # one look: another thread may close meanwhile
        self._check(rank)
        return pages[rank]

    def _own(self) -> Page:
        if process.forks() != self._forks:
            raise GroupAborted(f"group {self.group} was created in pid {self._owner}; create a new one in this process")
        return self._page(self.rank)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank {rank} is not in 0..{self.world_size - 1}")
        if not self._pages:
            raise GroupAborted(f"group {self.group} is closed")


def _pack_error(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    kind = type(error).__name__ if isinstance(error, TricommError) else TricommError.__name__
    text = str(error) if isinstance(error, TricommError) else f"{type(error).__name__}: {error}"
    return kind.encode().ljust(_KIND_BYTES, b"\0") + text.encode(errors="replace")[: MESSAGE_BYTES - _KIND_BYTES]


def _words(answer: bytes) -> str:
    return answer[_KIND_BYTES:].decode(errors="ignore")


def _kind(answer: bytes) -> type[TricommError]:
    found = getattr(errors, answer[:_KIND_BYTES].rstrip(b"\0").decode(errors="ignore"), None)
    return found if isinstance(found, type) and issubclass(found, TricommError) else TricommError
