"""The order of a group's calls on the CPU, and the threads that run them.

A *line* is a sequence of calls that run one after another: the main line of a group, for the calls that the program
makes, and one line for each callback of a future, for the calls that the callback makes. Lines are independent: none
waits for another, so it does not matter when a callback is attached, on which thread it runs, or how long it takes.

    main line of a group          1   2   3   4 ...
    first callback of call 2          2/1/1   2/1/2 ...
    second callback of call 2         2/2/1 ...

The name of a call ("2/1/1") depends only on the program, and ranks match calls by it: each line has its own tag for
messages, and each record carries line and number. `docs/torch-distributed.md` states the rule,
`devtools.call_order_model` explores every order of events for small programs.

A thread runs the calls of a line until none is queued. If a call has callbacks, another thread takes over the line,
because a callback may wait for a later call. The queue uses no lock, because an interrupt in the caller's thread could
leave it locked.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Imported first, so that at exit calls end before communicators and connections.
import tricomm.communicator  # noqa: F401
import tricomm.store.tcp.transport  # noqa: F401
from tricomm import threads
from tricomm.c10d.call_futures import NAMELESS, CallFuture, CallId, Origin, busy, current_origin
from tricomm.c10d.work_handles import PendingWork
from tricomm.errors import GroupAborted, InvalidArgument, ResourceError
from tricomm.metrics.flight_document import CREATED, ENDED, NUMBER, STARTED, Entry
from tricomm.metrics.flight_recorder import FlightRecorder, off
from tricomm.threads import refuse_handlers_call, run_in_helper

_DRAIN_SECONDS = 2.0
_CALLBACK_SECONDS = 60.0  # at exit: a callback's thread that outlived Python would abort the process
_queues: weakref.WeakValueDictionary[int, CallQueue] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Turn:
    """Names a running call: call `number` of `line`, counted from 1."""

    line: Line
    number: int

    def __str__(self) -> str:
        return f"{self.line.name}{self.number}"


@dataclass(eq=False)
class _QueuedCall:
    action: Callable[[Turn], None]
    work: PendingWork
    entry: Entry  # of the flight recorder; may be empty


class Line:
    """Calls that run in order. `name` is the prefix of their names: empty for a group's main line."""

    def __init__(self, queue: CallQueue, name: str = "") -> None:
        self.queue, self.name = queue, name
        self._calls: deque[_QueuedCall] = deque()
        self._idle = [True]  # holds a token while no thread runs the line; a thread takes it by `pop`, which is atomic
        self._number = 0
        self._runner = 0  # the thread that is executing a call

    @cached_property
    def key(self) -> int:
        """64 bits of the name, the same on all ranks; 0 for the main line."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest()) if self.name else 0

    @property
    def following(self) -> int:
        """The number of the next call, unless another thread makes one meanwhile."""
        return self._number + len(self._calls) + 1

    def submit(self, call: _QueuedCall, here: bool) -> None:
        """Run `call` in its turn; in this thread if `here` and if it is next. Raises `ResourceError` if no thread can
        be started; the call then gets no number."""
        if self._runner == threading.get_ident():
            refuse_handlers_call(self.queue._text)
        self._calls.append(call)
        try:
            if not self._take():
                return
            if here and self._calls[0] is call:  # if it is next: callbacks of earlier calls may wait for later ones
                self._run(call)
            else:
                run_in_helper(self._run)
        except ResourceError as error:
            self._calls.remove(call)
            while not self._give_back():  # another thread has queued a call
                self._end(self._calls.popleft(), error)
            raise
        except BaseException:
            # after Ctrl-C there may be two tokens, in an aborted group; no token would be worse
            self._idle.append(True)
            raise

    def _take(self) -> bool:
        """Take the token. False if another thread has it: that thread then also runs the calls queued until now."""
        try:
            return self._idle.pop()
        except IndexError:
            return False

    def _give_back(self) -> bool:
        """Return the token if no call is queued; False if this thread must continue with the line."""
        while not self._calls:
            self._idle.append(True)
            if not self._calls or not self._take():
                return True
        return False

    def _run(self, last: _QueuedCall | None = None) -> None:
        """Run queued calls until none is left, `last` has run, or this thread has callbacks to run."""
        thread, kept = object(), list[CallFuture]()
        busy.add(thread)
        try:
            while (call := self._next()) is not None:
                with_callbacks = self._execute(call)
                leave = call is last or bool(with_callbacks)
                del call  # a waiting thread must not keep the last call's tensors alive
                kept += with_callbacks
                if leave and self._hand_over():
                    break
            for future in kept:
                future.run_callbacks()
        finally:
            busy.discard(thread)

    def _next(self) -> _QueuedCall | None:
        """The next call; None if there is none: then this thread no longer runs the line."""
        while not self._give_back():
            with suppress(IndexError):  # two threads may run the line of a group that Ctrl-C has ended
                return self._calls.popleft()
        return None

    def _hand_over(self) -> bool:
        """Let another thread take over the line. False if no thread can be started; then this thread runs the queued
        calls and afterwards the callbacks."""
        if self._give_back():
            return True
        try:
            run_in_helper(self._run)
        except ResourceError:
            return False
        return True

    def _execute(self, call: _QueuedCall) -> list[CallFuture]:
        """Run `call` and complete its handle; returns the futures whose callbacks have to run."""
        self._number += 1
        turn = Turn(self, self._number)
        call.work.id.name = str(turn)
        if call.entry:
            call.entry[NUMBER], call.entry[STARTED] = self._number, call.entry[CREATED]
        error: BaseException | None = self.queue.refusal
        if error is None:
            try:
                self._runner = threading.get_ident()
                call.action(turn)
            except Exception as failure:
                self.queue.recorder.name_in(failure)
                error = failure
            except BaseException as failure:  # an interrupt: the caller gets it unchanged
                self._runner = 0
                self._end(call, GroupAborted(f"the call was ended by {type(failure).__name__}: {failure}"))
                raise
            self._runner = 0
        return self._end(call, error)

    def _end(self, call: _QueuedCall, error: BaseException | None) -> list[CallFuture]:
        self.queue.pending.discard(call.work)
        if call.entry and error is None:
            call.entry[ENDED] = time.time_ns()
        return call.work.finish(error)


class CallQueue:
    """Runs the calls of the group `name`. `ranks` are its global ranks; error messages contain `text`; `recorder` is
    its flight recorder."""

    def __init__(
        self, name: str, ranks: Iterable[int] = (0,), text: str = "", recorder: FlightRecorder | None = None
    ) -> None:
        self.recorder = recorder or off()
        self._name, self._ranks, self._text = name, frozenset(ranks), text or name
        self._main, self._closed = Line(self), False
        self.refusal: GroupAborted | None = None  # the error of calls that have not begun
        self.pending: set[PendingWork] = set()
        _queues[id(self)] = self

    def run(
        self,
        action: Callable[[Turn], None],
        what: str,
        result: list[Any],
        async_op: bool,
        interrupted: Callable[[BaseException], None] = lambda error: None,
        here: bool = False,
        made: Any = None,
        shown: Callable[[int, str], AbstractContextManager[None]] | None = None,
    ) -> PendingWork:
        """Run `action` in its turn. Returns a handle, which is finished unless `async_op`. `here`: run it in this
        thread if its turn has come; helper threads always do that. `made`: the calls to record, or None. `shown(number,
        line)` opens the event of these calls in a profiler; it lasts as long as this method runs.

        `interrupted(error)` is called if an exception of other code, such as Ctrl-C, ends a wait for the call.
        """
        if self._closed:
            raise GroupAborted(f"{what}: the group was destroyed; make a new one")
        origin = current_origin()
        line = self._main if origin is None else self._line(origin)
        work = PendingWork(CallId(self, origin), what, result, interrupted)
        self.pending.add(work)
        entry: Entry = []
        if made is not None:
            entry = [line.following, made, time.time_ns(), 0, 0, line.name, None, None]
            self.recorder.add(entry)
        with nullcontext() if shown is None else shown(line.following, line.name):
            try:
                line.submit(_QueuedCall(action, work, entry), not async_op and (here or threads.is_helper()))
            except Exception:
                self.pending.discard(work)
                if entry:
                    entry[NUMBER] = 0
                raise
            if not async_op:
                work.wait()
        return work

    def _line(self, origin: Origin) -> Line:
        """The line of the calls that the callback `origin` makes in this group."""
        line: Line | None = origin.lines.get(self)
        if line is None:
            if NAMELESS in origin.place:
                raise self._unknown(origin.call.queue)
            line = origin.lines[self] = Line(self, f"{origin.name_for(self)}/")
        return line

    def name_for(self, other: CallQueue) -> str:
        """The prefix for this group in names of calls in `other`; empty if they are the same group.

        Raises `InvalidArgument` if not all ranks of `other` know this group by its name.
        """
        if other is self:
            return ""
        namesakes = [q for q in threads.living(_queues) if q._name == self._name and not q._closed]
        if not other._ranks <= self._ranks or len(namesakes) > 1:
            raise other._unknown(self)
        return f"@{self._name}"

    def _unknown(self, other: CallQueue) -> InvalidArgument:
        return InvalidArgument(
            f"{self._text}: a callback of a future of {other._text} makes a call in this group, and not all "
            "ranks of this group know that one by its name: wait for the future, and call outside of the callback"
        )

    def close(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Accept no more calls. Wait at most `seconds` for earlier calls, then refuse those that have not begun.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + seconds
        for work in list(self.pending):
            work.over.wait(max(0.0, end - time.monotonic()))
        self.refuse(GroupAborted(f"{self._text}: the group was destroyed; make a new one"))

    def refuse(self, error: GroupAborted) -> None:
        """End all calls that have not begun, present and future ones, with `error`. Any thread may call it."""
        self.refusal = error
        for work in list(self.pending):
            if not work.id.name:  # it has not begun
                for future in work.finish(error):
                    future.run_callbacks()


def _in_forked_child() -> None:
    """A fork copies no threads. The groups are unusable here; nothing may wait for their calls."""
    for queue in threads.living(_queues):
        queue._closed = True
        for work in queue.pending:
            work.forked(GroupAborted(f"{queue._text} belongs to the parent of this process; make a new group here"))
    busy.clear()


os.register_at_fork(after_in_child=_in_forked_child)


@atexit.register
def _close_all() -> None:
    # A daemon thread that returns from C++ into a finalized interpreter would crash the process.
    end = time.monotonic() + _DRAIN_SECONDS
    for queue in threads.living(_queues):
        queue.close(max(0.0, end - time.monotonic()))
    end = time.monotonic() + _CALLBACK_SECONDS
    while busy and time.monotonic() < end:
        time.sleep(0.005)
