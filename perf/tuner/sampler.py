"""Runs a candidate on one rank: is its result right, and how long does it take?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm import Communicator
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.perf.bench import check_data, collective_calls, timing
from tricomm.perf.tuner.points import Candidate, Point

_EAGER_CALLS, _REPLAYS = 20, 3  # of a sample on a GPU


class Sampler:
    """Calls of `comm`, whose table is replaced by the candidate's row. All ranks do the same in the same order."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._number = 0
        self._point: Point | None = None
        self._x = self._y = torch.empty(0)
        self._graphs: dict[Candidate, tuple[timing.Call, int]] = {}

    def check(self, point: Point, candidate: Candidate) -> int:
        """Wrong elements on this rank, of two calls, because the two use different mailboxes."""
        self._use(point, candidate)
        comm, wrong = self._comm, 0
        count, dtype = _count(point, comm.world_size), getattr(torch, point.dtype)
        for _ in range(2):
            self._number += 1
            facts = (point.collective, "sum", comm.world_size)
            check_data.poison(self._y)
            self._x.copy_(check_data.values(*facts, comm.rank, self._number, count, dtype))
            result = collective_calls.call(comm, point.collective, self._number, self._x, self._y)
            comm.synchronize()
            if result is not None and check_data.gets(point.collective, comm.world_size, comm.rank, self._number):
                exact = check_data.expected(*facts, self._number, count, comm.rank, dtype)
                wrong += check_data.wrong(result, exact)
        self._x.zero_()
        return wrong

    def sample(self, point: Point, candidate: Candidate) -> float:
        """Microseconds a call, the median of several."""
        if point.mode == "graph" and candidate in self._graphs and point == self._point:
            run, calls = self._graphs[candidate]
        else:
            self._use(point, candidate)
            run, calls = timing.prepare(self._comm, self._call(point), _mode(point), 1)
            if point.mode == "graph":
                self._graphs[candidate] = run, calls
        iters = 1 if self._comm.simulated else _REPLAYS if point.mode == "graph" else _EAGER_CALLS
        return timing.quantile(timing.timed(self._comm, run, calls, iters), 0.5)

    def _use(self, point: Point, candidate: Candidate) -> None:
        comm = self._comm
        if point != self._point:
            dtype = getattr(torch, point.dtype)
            self._graphs.clear()
            x, self._y = collective_calls.tensors(comm, point.collective, _count(point, comm.world_size), dtype)
            self._x = collective_calls.local(x)
            self._point = point
        comm.use_table((candidate.row(point, comm.world_size, None),), str(candidate))

    def _call(self, point: Point) -> Callable[[], Any]:
        return lambda: collective_calls.call(self._comm, point.collective, 0, self._x, self._y)


def _mode(point: Point) -> str:
    """Many calls in a graph, so that the launch of the graph itself hardly counts."""
    return "kernel" if point.mode == "graph" else "eager"


def _count(point: Point, world_size: int) -> int:
    """Elements of a row, for the point's bytes of input; rows are whole 16 bytes if that is possible."""
    item = int(getattr(torch, point.dtype).itemsize)
    row = point.nbytes // COLLECTIVES[point.collective].rows_in(world_size)
    return max(1, (row // 16 * 16 or row) // item)
