"""The call that a point measures: its tensors, and whether its results are right."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import Communicator
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.perf import row_calls
from tricomm.perf.bench import check_data, collective_calls, fused_bench
from tricomm.perf.bench.request import Case
from tricomm.perf.tuner.points import Point


def prepared(comm: Communicator, point: Point) -> TunedCall:
    """The tensors of a point are made once, by all ranks together."""
    return FusedRows(comm, point) if point.epilogue else PlainCall(comm, point)


class PlainCall:
    """A plain collective. `run` does not wait; `wrong` counts this rank's wrong elements, by the number of the data."""

    def __init__(self, comm: Communicator, point: Point) -> None:
        self._comm, self._collective, self._wire = comm, point.collective, point.wire
        self._count, self._dtype = _count(point, comm.world_size), getattr(torch, point.dtype)
        x, self._y = collective_calls.tensors(comm, point.collective, self._count, self._dtype)
        self._x = collective_calls.local(x)

    def run(self) -> Any:
        return collective_calls.call(self._comm, self._collective, 0, self._x, self._y)

    def wrong(self, number: int) -> int:
        comm, name, wrong = self._comm, self._collective, 0
        facts = (name, "sum", comm.world_size)
        check_data.poison(self._y)
        self._x.copy_(check_data.values(*facts, comm.rank, number, self._count, self._dtype))
        result = collective_calls.call(comm, name, number, self._x, self._y)
        comm.synchronize()
        if result is not None and check_data.gets(name, comm.world_size, comm.rank, number):
            wire = registry.wire_of(comm.explain(name, result.nbytes, self._dtype).algorithm) if self._wire else ""
            exact = check_data.expected(*facts, number, self._count, comm.rank, self._dtype, wire)
            wrong = check_data.wrong(result, exact)
        self._x.zero_()
        return wrong


class FusedRows:
    """The call of an all_reduce_rms_norm."""

    def __init__(self, comm: Communicator, point: Point) -> None:
        form, item = row_calls.parse(point.epilogue), getattr(torch, point.dtype).itemsize
        case = Case(point.collective, None, None, point.dtype, hidden=form.hidden, quantize=form.quantize)
        self._comm, self._made = comm, fused_bench.tensors(comm, case, point.nbytes // item)
        self.run = fused_bench.ours(comm, case, self._made)

    def wrong(self, number: int) -> int:
        self._made.load(self._comm, number)
        self.run()
        self._comm.synchronize()
        return self._made.wrong(self._comm, number)


TunedCall = PlainCall | FusedRows


def _count(point: Point, world_size: int) -> int:
    """Elements of a row, for the point's bytes of input; rows are whole 16 bytes if that is possible."""
    item = int(getattr(torch, point.dtype).itemsize)
    row = point.nbytes // COLLECTIVES[point.collective].rows_in(world_size)
    return max(1, (row // 16 * 16 or row) // item)
