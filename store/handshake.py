"""How the ranks of a group find each other: once, through a Store that is not needed afterwards.

    add  tricomm/<rank>/generation           which meeting on this store is this rank's next one
    set  tricomm/<rank>/hello/<generation>   who I am, and the control segment where I speak from now on
    ...  everybody else's hello is read, checked, and its segment mapped
    set  tricomm/<rank>/met                  this rank needs the store no more for this generation
    confirm through the segments             every rank has mapped every other, and all mean the same group

A rank that gives up says so under tricomm/failed/<generation>, so that nobody waits for it, now or later. Waiting is
polling, for a `get` that blocks cannot look for a failure.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack

from torch.distributed.distributed_c10d import Store

from tricomm import env
from tricomm.errors import GroupAborted, RendezvousError, ResourceError, TricommError
from tricomm.store import process, rank_record, records
from tricomm.store.control import ControlPage, Fault, Member, State
from tricomm.store.deadline import Bounded
from tricomm.store.gather import Arrived, gather, next_generation
from tricomm.store.page import NBYTES, Page, check_page
from tricomm.store.rank_record import SpansNodes, hello_of
from tricomm.store.records import Failure, Hello, Kind, Record
from tricomm.store.segments import Segment

_GRACE_SECONDS = 0.25  # for the last words to the store, behind the deadline
_LOOK_SECONDS = 0.05
_KINDS: dict[str, type[TricommError]] = {kind.__name__: kind for kind in (ResourceError, SpansNodes)}
_DYING_SECONDS = 0.5


def meet(
    store: Store, rank: int, world_size: int, timeout: float, layout_hash: int,
    look: Callable[[], None] = lambda: None,
) -> ControlPage:  # fmt: skip
    """Meet the other ranks over `store`, which is never used again afterwards; all ranks call it.

    `layout_hash` (64 bits) must be the same on all ranks. Ends within `timeout` + 1 seconds. Where one rank raises,
    all do, `RendezvousError` (`SpansNodes` where they are on several nodes) or `ResourceError`, naming the rank at
    fault and what it said. Then nothing is left open, and the ranks may meet again on the same store.
    `InvalidArgument` for arguments of a wrong kind. `look` is called now and then while this rank waits; what it raises
    ends the meeting on all ranks.
    """
    rank_record.check_arguments(rank, world_size, timeout)
    bounded = Bounded(store, timeout + _GRACE_SECONDS)
    with ExitStack() as undo:
        undo.callback(bounded.close)
        meeting = _Meeting(bounded, rank, world_size, timeout, layout_hash & (1 << 64) - 1, look)
        undo.callback(meeting.release)
        try:
            return meeting.run()
        except BaseException as error:
            meeting.give_up(error)
            if isinstance(error, TricommError):
                raise type(error)(f"rank {rank} of {world_size} (pid {os.getpid()}): {error}") from error
            raise


class _Meeting:
    """One rank's part in one meeting."""

    def __init__(
        self, store: Bounded, rank: int, world_size: int, timeout: float, layout_hash: int, look: Callable[[], None]
    ) -> None:
        self._look_outside = look
        self._store, self._rank, self._world_size, self._layout_hash = store, rank, world_size, layout_hash
        self._began, self._timeout = time.monotonic(), timeout
        self._token = env.token()
        self._nonce = secrets.token_bytes(records.NONCE_BYTES)
        self._generation = 0
        self._segments: list[Segment] = []
        self._page: Page | None = None
        self._control: ControlPage | None = None
        self._withdrawn = 0
        self._next_look = self._began + _LOOK_SECONDS

    def run(self) -> ControlPage:
        self._take_generation()
        said = self._gather(self._hello())
        members = [self._attach(r, said[r]) for r in range(self._world_size)]
        self._store.set(f"tricomm/{self._rank}/met", str(self._generation).encode())
        control = ControlPage(self._rank, said[0].nonce, members)
        self._control = control
        control.beat()
        control.set_state(State.READY)  # before the confirmation, so that all are ready on return
        self._confirm(control)
        members[self._rank].segment.close_fd()  # all who may attach have attached
        self._segments.clear()
        self._control = None
        return control

    def release(self) -> None:
        """Let go of what has not become part of a control page."""
        if self._control is not None:
            self._control.unwatch()
        for segment in self._segments:
            segment.close()

    def give_up(self, error: BaseException) -> None:
        """Tell whoever waits for this rank, through the store and through its page, as far as they still work."""
        kind = type(error).__name__ if isinstance(error, TricommError) else RendezvousError.__name__
        ours = isinstance(error, TricommError)
        text = str(error) if ours else f"rank {self._rank} was stopped by {type(error).__name__}: {error}"
        if self._store.usable:
            self._store.extend(_GRACE_SECONDS)
            try:
                if not ours and not self._generation:  # an interrupt before the first word: the others wait for it
                    self._store.check(self._failed_key())  # behind what the worker may still be doing
                    if not self._generation:
                        self._take_generation()
                self._publish(Failure(os.getpid(), kind, text))
            except RendezvousError:
                pass  # the store is gone; the error that brought us here matters more
        if self._page is not None:
            self._page.put_fault(Fault(kind if ours else GroupAborted.__name__, self._rank, 0, text))
            self._page.state = State.CLOSED

    def _publish(self, failure: Failure) -> None:
        if self._withdrawn:  # first, so that whoever hears of the failure and tries again finds the number free
            self._store.set(self._hello_key(self._rank, self._withdrawn), b"")
            self._store.add(f"tricomm/{self._rank}/generation", -1)
        if self._generation and not self._store.check(self._failed_key()):  # who failed first knows best why
            self._store.set(self._failed_key(), self._record(failure).pack(self._token))

    def _take_generation(self) -> None:
        if not 0 <= self._rank < self._world_size:
            self._generation = self._current_generation()
            raise RendezvousError(
                f"rank {self._rank} is not in 0..{self._world_size - 1}: give each rank its own number"
            )
        # Kept by the worker: whatever interrupts this thread meanwhile, the number is known, and is given up under it.
        next_generation(self._store, f"tricomm/{self._rank}/generation", self._took)

    def _took(self, generation: int) -> None:
        self._generation = generation

    def _current_generation(self) -> int:
        """The meeting that rank 0 is in, or will be in next: where a rank that is none of its ranks complains."""
        count = self._number("tricomm/0/generation")
        return max(count + 1 if self._number("tricomm/0/met") >= count else count, 1)

    def _number(self, key: str) -> int:
        text = self._store.read(key) or b"0"
        if not text.isdigit() or len(text) > 18:
            raise RendezvousError(f"the store's {key!r} is not a number; does something else use this store?")
        return int(text)

    def _hello(self) -> Hello:
        self._look_for_failure()
        segment = Segment.create("tricomm-control", NBYTES)
        self._segments.append(segment)
        mine = rank_record.introduce(segment, self._rank, self._world_size, self._nonce, self._layout_hash)
        self._page = Page(segment.buffer, segment.address)
        return mine

    def _gather(self, mine: Hello) -> list[Record]:
        """Everybody's hello; an empty one was withdrawn."""
        return gather(
            self._store, self._record(mine), self._token, lambda r: self._hello_key(r, self._generation),
            self._began + self._timeout, self._late, self._check, self._look,
        )  # fmt: skip

    def _look(self, said: Arrived) -> None:
        self._look_for_failure()
        self._look_for_duplicate()
        if time.monotonic() >= self._next_look:
            self._look_outside()
            self._look_for_dead(said)
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def _check(self, found: Record) -> None:
        rank_record.check(found, self._rank, self._world_size, self._layout_hash)

    def _attach(self, rank: int, said: Record) -> Member:
        theirs = hello_of(said)
        if rank == self._rank:
            segment = self._segments[0]
        else:
            try:
                segment = Segment.attach(theirs.pid, theirs.start_time, theirs.fd, theirs.nbytes, readonly=True)
            except ResourceError as error:
                self._look_for_failure()  # it may have given up since, and said why
                self._look_for_dying(rank, said)
                raise ResourceError(f"rank {rank}'s control page: {error}") from error
            self._segments.append(segment)
        page = Page(segment.buffer, segment.address)
        check_page(page, rank, self._world_size, said.nonce, theirs.pid, theirs.start_time)
        return Member(segment, theirs.pid, theirs.start_time)

    def _confirm(self, control: ControlPage) -> None:
        try:
            nonces = control.exchange(control.nonce, "meeting", max(self._left(), 0.0))
        except TricommError as error:
            raise RendezvousError(f"not confirmed: {error}") from error
        for rank, nonce in enumerate(nonces):
            if nonce != control.nonce:
                raise RendezvousError(f"rank {rank} met another group than rank {self._rank} on this store")

    def _look_for_failure(self) -> None:
        data = self._store.read(self._failed_key())
        if data is None:
            return
        found = records.parse(data, Kind.FAILURE, self._generation, None, self._token)
        assert isinstance(failure := found.body, Failure), "parse gives the kind that it was asked for"
        kind = _KINDS.get(failure.kind, RendezvousError)
        raise kind(
            f"meeting {self._generation} was given up by rank {found.rank} of {found.world_size} "
            f"(pid {failure.pid}): {failure.text}"
        )

    def _look_for_duplicate(self) -> None:
        """Whoever takes a rank's number while the one before is still meeting is one too many."""
        before = self._generation - 1
        if before == 0 or self._number(f"tricomm/{self._rank}/met") >= before:
            return
        other = self._claimant(before)
        if other is not None and not self._store.check(self._failed_key(before)):
            # The complaint belongs to the meeting that is under way, and this claim to the number never counted.
            self._generation, self._withdrawn = before, self._generation
            raise RendezvousError(
                f"duplicate rank: pid {os.getpid()} and pid {other.pid} both say that they are rank {self._rank} "
                f"(world size {self._world_size} here); give each process its own rank"
            )

    def _claimant(self, generation: int) -> Hello | None:
        """The process that was this rank in `generation`, if it still runs."""
        data = self._store.read(self._hello_key(self._rank, generation)) if generation > 0 else None
        if not data:
            return None
        other = hello_of(records.parse(data, Kind.HELLO, generation, self._rank, self._token))
        gone = other.boot_id == process.node_id() and not process.alive(other.pid, other.start_time)
        return None if gone else other

    def _late(self, said: Arrived) -> RendezvousError:
        text = f"timeout after {self._timeout:g} s: {rank_record.who_came(said, self._world_size)}"
        other = self._claimant(self._generation - 1)
        if len(said) == 1 and other is not None and other.pid != os.getpid():
            # Nobody was waiting for this process: withdraw, so that the one who had the number stays in step.
            self._generation, self._withdrawn = 0, self._generation
            text += f"; pid {other.pid}, which met as rank {self._rank} before, still runs: is the number taken?"
        return RendezvousError(text)

    def _look_for_dead(self, said: Arrived) -> None:
        for rank, record in said.items():
            theirs = hello_of(record)
            if not process.alive(theirs.pid, theirs.start_time):
                raise RendezvousError(f"rank {rank} (pid {theirs.pid}) died during the meeting")

    def _look_for_dying(self, rank: int, said: Record) -> None:
        """A process that was killed lets go of its files before it counts as ended."""
        end = time.monotonic() + min(_DYING_SECONDS, max(0.0, self._left()))
        while time.monotonic() < end:
            self._look_for_dead({rank: said})
            time.sleep(0.01)
        self._look_for_dead({rank: said})

    def _left(self) -> float:
        return self._timeout - (time.monotonic() - self._began)

    def _record(self, body: Hello | Failure) -> Record:
        return Record(self._rank, self._world_size, self._generation, self._nonce, body)

    def _failed_key(self, generation: int | None = None) -> str:
        return f"tricomm/failed/{generation or self._generation}"

    def _hello_key(self, rank: int, generation: int) -> str:
        return f"tricomm/{rank}/hello/{generation}"
