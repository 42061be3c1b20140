"""Counts calls: of a communicator by kernel and size, with bytes and times, and of the process by route.

Counting costs a call one addition: to the tally of its kernel and size. `tricomm.stats()` and `comm.stats()` add the
tallies up when they are called. Only plans made while `Activity.clock` is set are timed, so timing costs other calls
nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tricomm import env, notebook
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu

_MOST_SPANS = 4096  # spans that are kept, and events that have not passed yet
Took = Callable[[float], None]  # called with the seconds of a call
Name = tuple[str, str, str, int]  # of a call: collective, algorithm, protocol, bytes


@dataclass(frozen=True)
class Span:
    """One timed call. `start_us` is in microseconds of Unix time (on a GPU: as near as the host knows it)."""

    start_us: float
    time_us: float
    collective: str
    algorithm: str
    protocol: str
    nbytes: int


class Clock:
    """Times every `every`th call of each plan that is made while this clock is set, and keeps the latest spans: on a
    CPU by the wall clock, on a GPU by events around the kernel."""

    def __init__(self, every: int, gpu: Gpu | None) -> None:
        self.every = every
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._pending: deque[tuple[Any, Any, Took, Name]] = deque(maxlen=_MOST_SPANS)
        self._lock = threading.Lock()
        self._gpu, self._began = gpu, 0.0
        # recorded by the first timed call, at `_began`; not here, because a graph may be being captured
        self._mark: Any = None

    def timed(self, run: Callable[..., Any], of: Callable[[Any], tuple[Took, Name]]) -> Callable[..., Any]:
        """`run`, with every `every`th of its calls timed. `of` returns, for a call's input, the function to call with
        its time, and its name."""
        left = 1
        measured = self._by_host if self._gpu is None else self._by_events

        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return run(*arguments)
            left = self.every
            return measured(run, arguments, *of(arguments[0]))

        return call

    def spans(self) -> tuple[Span, ...]:
        """The latest spans, oldest first; on a GPU the spans whose end `collect` has seen. Any thread may call it."""
        return tuple(self._spans)

    def collect(self) -> None:
        """Read the times of kernels that have ended. Only for threads that make calls, because querying an event in
        another thread would invalidate a capture."""
        if self._gpu is None or self._mark is None:
            return
        with self._gpu.here(), self._lock:
            if self._gpu.capturing():
                return
            while self._pending and self._pending[0][1].query():
                begin, end, took, name = self._pending.popleft()
                time_us = begin.elapsed_time(end) * 1e3
                took(time_us / 1e6)
                start = self._began + self._mark.elapsed_time(begin) * 1e3
                self._spans.append(Span(start, time_us, *name))

    def _by_host(self, run: Callable[..., Any], arguments: Any, took: Took, name: Name) -> Any:
        start, began = time.time(), time.perf_counter()
        result = run(*arguments)
        seconds = time.perf_counter() - began
        took(seconds)
        self._spans.append(Span(start * 1e6, seconds * 1e6, *name))
        return result

    def _by_events(self, run: Callable[..., Any], arguments: Any, took: Took, name: Name) -> Any:
        assert self._gpu is not None, "calls are timed by events on a GPU only"
        if self._mark is None:
            self._began, self._mark = time.time() * 1e6, self._gpu.recorded(timing=True)
        self.collect()
        begin = self._gpu.recorded(timing=True)
        result = run(*arguments)
        end = self._gpu.recorded(timing=True)
        self._pending.append((begin, end, took, name))
        return result


_CALL = 1 << 96  # a tally has calls above this bit and bytes below it, so that one addition counts both
_BYTES = _CALL - 1
RECENT = 512
_SHOWN = 20  # lines of a text
KERNELS, NCCL, GLOO = "kernels", "nccl", "gloo"
log = logging.getLogger("tricomm")
Key = tuple[str, str, str, int]  # of a tally: collective, algorithm, protocol, bucket


class Tally:
    """Counts the calls of one kernel with sizes of one bucket. `total` is the sum of the calls' `weight`."""

    __slots__ = ("recent", "seconds", "timed", "total")

    def __init__(self) -> None:
        self.total = 0
        self.timed, self.seconds = 0, 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)  # microseconds

    def took(self, seconds: float) -> None:
        """Add the time of a call."""
        self.timed, self.seconds = self.timed + 1, self.seconds + seconds
        self.recent.append(seconds * 1e6)


def weight(nbytes: int) -> int:
    """The number that a call of `nbytes` bytes adds to its tally's total."""
    return _CALL + nbytes


def bucket(nbytes: int) -> int:
    """The smallest power of two that is not below `nbytes`; 0 for no bytes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@dataclass(frozen=True)
class Calls:
    """Calls of one kernel with at most `bucket` bytes of input per rank, and more than half of that.

    `calls` and `nbytes` count all calls, `timed` and `seconds` the timed ones; `p50_us` and `p99_us` are of the latest
    timed calls, None if there are none. Captured calls count once; their replays are not counted.
    """

    collective: str
    algorithm: str
    protocol: str
    bucket: int
    calls: int
    nbytes: int
    timed: int
    seconds: float
    p50_us: float | None
    p99_us: float | None


@dataclass(frozen=True)
class HeldMemory:
    """One rank's memory: its kind, and the bytes of device memory that its arena and its symmetric memory take, which
    is 0 while the communicator is suspended."""

    kind: str = "none"
    nbytes: int = 0
    suspended: bool = False


@dataclass(frozen=True)
class Statistics:
    """A communicator's statistics so far. `waited` is, by peer, the seconds that this rank was in calls that the peer
    had not entered, sampled by the monitor every 20 ms, so shorter delays are missing. `memory` is the device memory
    that it holds now, `origin` the group that was shrunk to it, if any."""

    group: str
    rank: int
    world_size: int
    device: str
    simulated: bool
    calls: tuple[Calls, ...]
    waited: dict[int, float]
    spans: tuple[Span, ...] = ()
    memory: HeldMemory = HeldMemory()
    origin: str = ""

    def __str__(self) -> str:
        """The group, a line for each of the kernels and sizes with the most bytes, and the waits."""
        where = f"{self.device}{', simulated' * self.simulated}{f', {self.origin}' if self.origin else ''}"
        lines = [
            f"group {self.group}, rank {self.rank} of {self.world_size} on {where}: {self.memory.nbytes:,} bytes held"
        ]
        calls = sorted(self.calls, key=lambda each: each.nbytes, reverse=True)
        for each in calls[:_SHOWN]:
            name = f"{each.collective} {each.algorithm}/{each.protocol} up to {each.bucket:,} bytes"
            times = "" if each.p50_us is None else f", p50 {each.p50_us:.1f} us, p99 {each.p99_us:.1f} us"
            lines.append(f"{each.calls:>9,} x {name}: {each.nbytes:,} bytes{times}")
        if len(calls) > _SHOWN:
            lines.append(f"          and {len(calls) - _SHOWN} more kernels and sizes, in `calls`")
        lines += [
            f"waited {seconds:.2f} s for rank {peer}" for peer, seconds in self.waited.items() if seconds >= 0.005
        ]
        return "\n".join(lines)

    _repr_html_ = notebook.preformatted


class _ProcessTallies:
    """The tallies of all communicators of this process, and of the calls that the fallbacks of c10d groups ran.

    A communicator's tallies are added to `past` when it is freed, so that a process that makes and closes many does not
    grow.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.live: dict[int, dict[Key, Tally]] = {}
        self.ended: deque[int] = deque()  # appended to by finalizers, which may run anywhere, so without the lock
        self.past: Counter[tuple[str, str]] = Counter()  # calls by route and collective
        self.fallback: dict[tuple[str, str, int], Tally] = {}  # by route, collective and bucket
        self._numbers = itertools.count()

    def add(self, activity: object, tallies: dict[Key, Tally]) -> int:
        """Count `tallies` while `activity` is alive, and their final counts afterwards; returns their number."""
        number = next(self._numbers)
        with self.lock:
            self._fold()
            self.live[number] = tallies
        weakref.finalize(activity, self.ended.append, number).atexit = False
        return number

    def _fold(self) -> None:
        while self.ended:
            _add(self.past, self.live.pop(self.ended.popleft(), {}))

    def calls(self) -> Counter[tuple[str, str]]:
        """By route and collective."""
        with self.lock:
            self._fold()
            calls = self.past.copy()
            for tallies in list(self.live.values()):
                _add(calls, tallies)
            for (route, collective, _), tally in list(self.fallback.items()):
                calls[route, collective] += tally.total // _CALL
        return calls


def _add(calls: Counter[tuple[str, str]], tallies: dict[Key, Tally]) -> None:
    for (collective, algorithm, _, _), tally in list(tallies.items()):
        calls[NCCL if algorithm == NCCL else KERNELS, collective] += tally.total // _CALL


_process = _ProcessTallies()


def _after_fork() -> None:
    """In a child: the parent's thread may have held the lock."""
    _process.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def stats() -> dict[str, dict[str, int]]:
    """Calls of this process by route and collective: {"kernels": {"all_reduce": 3}, "gloo": {...}, "nccl": {...}}.

    Counts both communicators and c10d groups; a c10d call that runs over the kernels counts once. A call that launches
    nothing, because it has no elements or is refused, is not counted.
    """
    calls: dict[str, dict[str, int]] = {KERNELS: {}, NCCL: {}, GLOO: {}}
    for (route, collective), count in _process.calls().items():
        if count:
            calls[route][collective] = count
    return calls


def count_fallback(route: str, collective: str, nbytes: int | None) -> None:
    """Count a c10d group's call that runs on NCCL or over TCP, of `nbytes` of input; None if ranks may differ in it."""
    key = (route, collective, bucket(nbytes or 0))
    tally = _process.fallback.get(key)
    if tally is None:
        tally = _process.fallback.setdefault(key, Tally())
    tally.total += weight(nbytes or 0)


def fallback_by_size() -> dict[tuple[str, str, int], tuple[int, int]]:
    """Calls and bytes of c10d groups on NCCL and over TCP, by (route, collective, bucket of sizes); 0 bytes if ranks'
    sizes differ."""
    known = list(_process.fallback.items())
    return {key: (tally.total // _CALL, tally.total & _BYTES) for key, tally in known}


class Activity:
    """The tallies of one communicator. `waited` is the monitor's; TRICOMM_STATS_EVERY=n times every nth call. `held`
    returns the device memory of the communicator."""

    def __init__(
        self,
        group: str,
        rank: int,
        world_size: int,
        device: torch.device,
        waited: dict[int, float],
        gpu: Gpu | None = None,
    ) -> None:
        self.group, self.rank, self.world_size, self.device = group, rank, world_size, device
        self.clock: Clock | None = None
        self.held: Callable[[], HeldMemory] = HeldMemory
        self.origin = ""
        self._gpu, self._waited = gpu, waited
        self._tallies: dict[Key, Tally] = {}
        self._lock = threading.Lock()
        self._number = _process.add(self, self._tallies)
        self.time_calls(env.integer("TRICOMM_STATS_EVERY") or 0, "TRICOMM_STATS_EVERY")

    def time_calls(self, every: int, name: str = "every") -> None:
        """Time every `every`th call of each plan that is made from now on; 0: none. Raises `InvalidArgument`."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidArgument(f"{name}={every!r}: 1 for every call, 100 for each hundredth, 0 for none")
        self.collect()
        self.clock = Clock(every, self._gpu) if every else None

    def collect(self) -> None:
        """Read the times of kernels that have ended, as `Clock.collect`; a device error loses them."""
        if self.clock is not None:
            try:
                self.clock.collect()
            except RuntimeError as error:
                log.warning("times of earlier calls are lost: %s", error)

    def tally(self, collective: str, algorithm: str, protocol: str, nbytes: int) -> Tally:
        """The tally of a call of `nbytes` of input; the same one for all sizes of its bucket."""
        with self._lock:
            return self._tallies.setdefault((collective, algorithm, protocol, bucket(nbytes)), Tally())

    def sized(self, run: Callable[..., Any], kernel: tuple[str, str, str], clock: Clock | None) -> Callable[..., Any]:
        """`run` for calls of varying sizes: counted and, with a clock, timed here by the bytes of each input."""
        tallies: dict[int, Tally] = {}

        def of(nbytes: int) -> Tally:
            size = bucket(nbytes)
            if size not in tallies:
                tallies[size] = self.tally(*kernel, nbytes)
            return tallies[size]

        if clock is not None:
            run = clock.timed(run, lambda x: (of(x.nbytes).took, (*kernel, x.nbytes)))

        def call(x: torch.Tensor, *more: Any) -> None:
            run(x, *more)
            of(x.nbytes).total += weight(x.nbytes)

        return call

    def statistics(self) -> Statistics:
        """The counts so far. Any thread may call it at any time."""
        spans = self.clock.spans() if self.clock is not None else ()
        with self._lock:
            known = list(self._tallies.items())
        calls = tuple(_calls(key, tally) for key, tally in known if tally.total)
        waited = dict(list(self._waited.items()))
        facts = (self.group, self.rank, self.world_size, str(self.device), self.device.type != "cuda")
        return Statistics(*facts, calls, waited, spans, self.held(), self.origin)


def _calls(key: Key, tally: Tally) -> Calls:
    total, recent = tally.total, sorted(tally.recent)
    p50, p99 = (recent[-(-len(recent) * part // 100) - 1] if recent else None for part in (50, 99))
    return Calls(*key, total // _CALL, total & _BYTES, tally.timed, tally.seconds, p50, p99)
