"""What a communicator has done: calls, bytes and times by kernel and size, and how long it waited for whom.

Counting costs a call one addition. Times are taken only when asked for (`Activity.clock`), by plans made for it, so
that a call that is not timed pays nothing for those that are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu
from tricomm.metrics.timer import Clock, Span

_CALL = 1 << 96  # a tally's calls are above this bit and its bytes below it: both are counted by one addition
_BYTES = _CALL - 1
RECENT = 512


class Tally:
    """Calls of one kernel at sizes of one bucket. `total` is the sum of the calls' `weight`."""

    __slots__ = ("recent", "seconds", "timed", "total")

    def __init__(self) -> None:
        self.total = 0
        self.timed, self.seconds = 0, 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)  # microseconds

    def took(self, seconds: float) -> None:
        """A call was timed."""
        self.timed, self.seconds = self.timed + 1, self.seconds + seconds
        self.recent.append(seconds * 1e6)


def weight(nbytes: int) -> int:
    """What a call of `nbytes` bytes adds to its tally's total."""
    return _CALL + nbytes


def bucket(nbytes: int) -> int:
    """The smallest power of two that is not below `nbytes`; 0 for no bytes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@dataclass(frozen=True)
class Calls:
    """Calls of one kernel with at most `bucket` bytes of input per rank, and more than half of that.

    `calls` and `nbytes` are of all, `timed` and `seconds` of those that were timed; `p50_us` and `p99_us` are of the
    latest of these, None where there are none. Captured calls count once; their replays are the graph's.
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
class Statistics:
    """A communicator's life so far. `waited` is, by peer, the seconds that this rank was in a call that the peer had
    not entered, as the monitor sees it every 20 ms: shorter delays are not in it."""

    group: str
    rank: int
    world_size: int
    device: str
    simulated: bool
    calls: tuple[Calls, ...]
    waited: dict[int, float]
    spans: tuple[Span, ...] = ()


class Activity:
    """The tallies of one communicator. `waited` is the monitor's own; TRICOMM_STATS_EVERY says what is timed."""

    def __init__(
        self, group: str, rank: int, world_size: int, device: torch.device, waited: dict[int, float],
        gpu: Gpu | None = None,
    ) -> None:  # fmt: skip
        self.group, self.rank, self.world_size, self.device = group, rank, world_size, device
        self.clock: Clock | None = None
        self._gpu, self._waited = gpu, waited
        self._tallies: dict[tuple[str, str, str, int], Tally] = {}
        self._lock = threading.Lock()
        self.time_calls(env.integer("TRICOMM_STATS_EVERY") or 0, "TRICOMM_STATS_EVERY")

    def time_calls(self, every: int, name: str = "every") -> None:
        """Time every `every`th call of each plan that is made from now on; 0: none. Raises `InvalidArgument`."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidArgument(f"{name}={every!r}: 1 for every call, 100 for each hundredth, 0 for none")
        self.clock = Clock(every, self._gpu) if every else None

    def tally(self, collective: str, algorithm: str, protocol: str, nbytes: int) -> Tally:
        """The tally of a call of `nbytes` of input; the same one for all sizes of its bucket."""
        with self._lock:
            return self._tallies.setdefault((collective, algorithm, protocol, bucket(nbytes)), Tally())

    def sized(self, run: Callable[..., Any], kernel: tuple[str, str, str], clock: Clock | None) -> Callable[..., Any]:
        """`run`, counted and, with a clock, timed here, for calls of sizes of their own: the bytes of their input."""
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
        """What has been counted until now. Any thread may ask, at any time."""
        spans = self.clock.spans() if self.clock is not None else ()
        with self._lock:
            known = list(self._tallies.items())
        calls = tuple(_calls(key, tally) for key, tally in known if tally.total)
        waited = dict(list(self._waited.items()))
        facts = (self.group, self.rank, self.world_size, str(self.device), self.device.type != "cuda")
        return Statistics(*facts, calls, waited, spans)


def _calls(key: tuple[str, str, str, int], tally: Tally) -> Calls:
    total, recent = tally.total, sorted(tally.recent)
    p50, p99 = (recent[-(-len(recent) * part // 100) - 1] if recent else None for part in (50, 99))
    return Calls(*key, total // _CALL, total & _BYTES, tally.timed, tally.seconds, p50, p99)
