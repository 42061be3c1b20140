"""Times some of a communicator's calls: on a CPU by the wall clock, on a GPU by events around the kernel."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tricomm.gpu import Gpu

_MOST = 4096  # spans that are kept, and events that have not passed yet
Took = Callable[[float], None]  # told the seconds of a call
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
    """Times every `every`th call of each plan that is made while this clock is set. Keeps the latest spans."""

    def __init__(self, every: int, gpu: Gpu | None) -> None:
        self.every = every
        self._spans: deque[Span] = deque(maxlen=_MOST)
        self._pending: deque[tuple[Any, Any, Took, Name]] = deque(maxlen=_MOST)
        self._lock = threading.Lock()
        self._gpu, self._began = gpu, 0.0
        self._mark: Any = None  # recorded by the first timed call at `_began`: now a graph may be being captured

    def timed(self, run: Callable[..., Any], of: Callable[[Any], tuple[Took, Name]]) -> Callable[..., Any]:
        """`run`, with every `every`th of its calls timed. `of` gives, for a call's input, the function that gets its
        time, and its name."""
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
        """The latest spans, oldest first; on a GPU those whose end `collect` has seen. Any thread may ask."""
        return tuple(self._spans)

    def collect(self) -> None:
        """Take the times of kernels that have ended. Only for threads that make calls: to query an event in another
        thread would break a graph that is being captured."""
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
