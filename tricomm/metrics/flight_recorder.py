"""The flight recorder: the last calls of each group on this rank, for torch's analyser (`torchfrtrace`).

A call writes one entry into a ring that is allocated with its group. The rest is done by a dump (`flight_document`),
which takes no lock and may run at any time, on any thread and in a signal handler. TORCH_FR_BUFFER_SIZE=0 turns the
recorder off; other variables of torch define when and where to dump (`tricomm.env`).
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from tricomm import env, threads
from tricomm.deadline import poll
from tricomm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    PeerDied,
    PeerStalled,
    ResourceError,
)
from tricomm.metrics import flight_document
from tricomm.metrics.flight_document import NUMBER, STACK, Entry, Short, full
from tricomm.store import files
from tricomm.store.bounded_store import first_line

log = logging.getLogger("tricomm")
_CALLS, _MOST_CALLS = 2000, 1_000_000
_MOST_FRAMES = 64
_WORDS = " Last calls: "
_PASSING = (CollectiveMismatch, CollectiveTimeout)  # they may leave the group usable
_FAULTS = (*_PASSING, PeerDied, PeerStalled, GroupAborted)
_DUMP_SECONDS, _HANDLER_SECONDS = 2.0, 0.5
_NAME = "comm_lib_trace_rank_"  # torch's
_open: weakref.WeakValueDictionary[int, FlightRecorder] = weakref.WeakValueDictionary()
# Recorders of groups that were closed recently, because a peer may hang in a call that this rank has made.
_closed: deque[FlightRecorder] = deque(maxlen=16)
_warned: set[str] = set()
_listener: _SignalListener | None = None


class FlightRecorder:
    """The last `calls` calls of one group (None: the number from the environment; 0: none).

    name, ranks  of the group; the ranks as the job numbers them, in the group's order
    group        the name that the program uses for the group
    rank         this rank's number in the job, by which the dump's file is named
    timeout      of a call, in seconds
    origin       the group that was shrunk to this one, if any
    on           whether calls are recorded
    numbered     entries of a communicator's calls, each at index (call number modulo length)
    settle       completes the entries for a dump with numbers and times that only the maker of the calls knows
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, timeout: float, calls: int | None = None) -> None:
        self.name, self.ranks, self.rank, self.timeout = name, tuple(ranks), rank, timeout
        self.group = name
        self.settle: Callable[[list[Entry]], None] = _nothing
        self.origin = ""
        self._kept = _recorded_calls() if calls is None else calls
        self.on = self._kept > 0
        self._size = self._kept + max(1, self._kept // 4)
        self.numbered: Any = [None] * self._size * self.on
        self._others: Any = [None] * self._size * self.on
        self._following = itertools.count().__next__
        self._pid = os.getpid()
        self._said: str | None = None
        self._reporting: threading.Thread | None = None
        if self.on:
            if env.includes_stacks():
                self.numbered, self._others = _WithStacks(self.numbered), _WithStacks(self._others)
            for old in [old for old in list(_closed) if (old.name, old.rank) == (name, rank)]:
                with suppress(ValueError):  # another thread has removed it
                    _closed.remove(old)
            _open[id(self)] = self
            _listen()

    def add(self, entry: Entry | Short) -> None:
        """Record a call that has no number yet, or a message."""
        self._others[self._following() % self._size] = entry

    def job_rank(self) -> bytes:
        """This process's number in the job, for an exchange: torch's or the launcher's; this rank if there is none."""
        with suppress(InvalidArgument):
            launched = dist.get_rank() if dist.is_initialized() else env.integer("RANK")
            return str(self.rank if launched is None or launched < 0 else launched).encode()
        return str(self.rank).encode()

    def place(self, numbers: list[bytes]) -> None:
        """Set the numbers in the job of this group's ranks. If two are equal, ranks keep their numbers in the group."""
        if len(set(numbers)) == len(self.ranks):
            self.rank, self.ranks = int(numbers[self.ranks.index(self.rank)]), tuple(map(int, numbers))

    def entries(self) -> list[Entry]:
        """Copies of the entries, with their times."""
        entries = [full(entry) for ring in (self.numbered, self._others) for entry in list(ring) if entry is not None]
        self.settle(entries)
        return [entry for entry in entries if entry[NUMBER]]

    def first(self, numbers: list[int]) -> int:
        """The number of the first call to dump, among the last calls of a stream, which have these ascending `numbers`.
        If earlier calls have been overwritten, it is a round number, so that ranks that are a few calls apart begin
        with the same call."""
        if not numbers or numbers[0] == 1:
            return 0
        step = 1 << max(0, (len(numbers) // 5).bit_length() - 1)  # a stream may fill any part of the ring
        return -(-numbers[0] // step) * step

    def withdraw(self, after: int) -> None:
        """Remove the calls with a number above `after`, which were refused before anything was sent."""
        for place, entry in enumerate(list(self.numbered)):
            if entry is not None and entry[NUMBER] > after:
                self.numbered[place] = None

    def report(self, again: bool = False) -> str:
        """Called when the group has a fault: dump, unless TORCH_NCCL_DUMP_ON_TIMEOUT forbids it, and return the text
        with which errors name the file. Dumps only once, or `again` after a fault that has not ended the group. Raises
        nothing."""
        if self.on and self._pid == os.getpid() and (self._said is None or again):
            try:
                self._said = f"{_WORDS}{_write(self.rank, None)}." if _dumps_on_fault() else ""
            except Exception as error:  # a job does not end because of its recorder
                self._said = ""
                warn_once("dump", f"the last calls could not be dumped: {error}")
        return self._said or ""

    def name_in(self, error: BaseException) -> None:
        """Dump if `error` is a fault whose text names no file yet, and add the file to its text."""
        if isinstance(error, _FAULTS) and _WORDS not in str(error):
            words = self.report(again=isinstance(error, _PASSING))
            if words:
                error.args = (f"{str(error).removesuffix('.')}.{words}",)

    def report_soon(self) -> None:
        """`report` on another thread; if none can be started, the error of the next call reports."""
        if self.on:
            with suppress(ResourceError):
                self._reporting = threads.start("tricomm-dump", self.report)

    def close(self) -> None:
        """The group makes no more calls."""
        if self._reporting is not None and self._reporting is not threading.current_thread():
            self._reporting.join(_DUMP_SECONDS)
        if self.on and _open.pop(id(self), None) is not None:
            self.numbered, self._others = list[Any](self.entries()), []
            self.settle = _nothing
            _closed.append(self)


def off() -> FlightRecorder:
    """A recorder that records nothing."""
    return FlightRecorder("", (), 0, 0.0, calls=0)


def dump(prefix: str | Path | None = None) -> list[Path]:
    """Write the last calls of this process's groups to the file `prefix` + rank. Returns the paths, which are several
    if this process has several ranks. `torchfrtrace` reads the files of all ranks.

    `prefix` may be a directory; the default is TORCH_FR_DUMP_TEMP_FILE, as for torch. Raises `InvalidArgument` if no
    group has recorded anything, `ResourceError` if a file cannot be written; a file is written whole or not.
    """
    ranks = sorted({recorder.rank for recorder in _recorders()})
    if not ranks:
        raise InvalidArgument("dump: this process has made no group, or TORCH_FR_BUFFER_SIZE=0 turns recording off")
    return [_write(rank, prefix) for rank in ranks]


def _recorders() -> list[FlightRecorder]:
    return [*_closed, *threads.living(_open)]


def _write(rank: int, prefix: str | Path | None) -> Path:
    """Write the file of `rank`; raises `ResourceError`."""
    given = env.dump_prefix() if prefix is None else str(prefix)
    path = Path(f"{given}{rank}")
    content = flight_document.document([recorder for recorder in _recorders() if recorder.rank == rank])
    try:
        if os.path.isdir(given):
            path = Path(given, f"{_NAME}{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, pickle.dumps(content))  # torch's format; nothing here loads a dump
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise ResourceError(
            f"{path} cannot be written ({first_line(error)}): TORCH_FR_DUMP_TEMP_FILE, or dump(prefix), names another"
        ) from error
    return path


def _nothing(entries: list[Entry]) -> None:
    pass


class _WithStacks:
    """A ring whose entries get the stack of their call."""

    def __init__(self, ring: list[Any]) -> None:
        self._ring = ring

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ring)

    def __setitem__(self, place: int, entry: Any) -> None:
        if isinstance(entry, tuple):
            entry = full(entry)
        if entry is not None and entry[STACK] is None:
            stack: list[tuple[Any, int]] = []
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and len(stack) < _MOST_FRAMES:
                stack.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            entry[STACK] = stack
        self._ring[place] = entry


def _recorded_calls() -> int:
    try:
        calls = env.recorded_calls(_CALLS)
        if calls <= _MOST_CALLS:
            return max(0, calls)
        wrong = f"TORCH_FR_BUFFER_SIZE={calls}: {_MOST_CALLS} calls at most are kept"
    except InvalidArgument as error:
        wrong = str(error)
    warn_once("size", f"{wrong}; the last {_CALLS} are")
    return _CALLS


def _dumps_on_fault() -> bool:
    try:
        return env.dumps_on_fault()
    except InvalidArgument as error:
        warn_once("fault", f"{error}; it counts as on")
        return True


def warn_once(about: str, text: str) -> None:
    """Log `text`, but only the first text for each `about`."""
    if about not in _warned:
        _warned.add(about)
        log.warning("%s", text)


# Signals


class _SignalListener:
    """Dumps when signal `number` is received, and then runs the previous handler.

    Python runs handlers in the main thread, between two instructions, and that thread may hang in C. So another thread
    reads the numbers of signals from a pipe (`signal.set_wakeup_fd`), and dumps if the handler does not. If the program
    already uses such a pipe, as asyncio does, only the handler dumps.
    """

    def __init__(self, number: int) -> None:
        self._number, self._came, self._handled, self._dumping = number, 0, 0, False
        self._before = signal.signal(number, self._handle)
        readable, writable = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writable, False)
        other = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            os.close(readable)
            os.close(writable)
        else:
            threads.start("tricomm-dump", self._read, readable)

    def _read(self, readable: int) -> None:
        while received := os.read(readable, 64):
            self._came += received.count(self._number)
            if not poll(lambda: self._handled >= self._came, _HANDLER_SECONDS, 0.01):
                _dump_for_signal()
            self._came = self._handled = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1
        if not self._dumping:  # signals that are faster than dumps would nest without end
            self._dumping = True
            try:
                _dump_for_signal()
            finally:
                self._dumping = False
        if callable(self._before):
            self._before(number, frame)


def _dump_for_signal() -> None:
    try:
        dump()
    except Exception as error:
        warn_once("dump", f"the last calls could not be dumped: {error}")


def _listen() -> None:
    """Begin to listen for the signal that TRICOMM_DUMP_SIGNAL names, if any; a problem is a warning."""
    global _listener
    name = env.text("TRICOMM_DUMP_SIGNAL")
    if name is None or _listener is not None:
        return
    try:
        number = int(name) if name.isdigit() else signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"].value
        _listener = _SignalListener(number)
    except (KeyError, ValueError, OSError, ResourceError) as error:  # ValueError also outside of the main thread
        warn_once("signal", f"TRICOMM_DUMP_SIGNAL={name!r} does not dump: {type(error).__name__}: {error}")


def _after_fork() -> None:
    """Called in a forked child: drops the parent's groups, its file and its pipe for signals."""
    global _listener
    _open.clear()
    _closed.clear()
    if _listener is not None:
        _listener = None
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)
