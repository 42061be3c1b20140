"""Random calls of any collective, compared with their exact results."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from tricomm import Communicator
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES, Dtype, reduction
from tricomm.perf.bench import check_data


@dataclass(frozen=True)
class Made:
    """`count` elements a row, `offset` elements past an aligned address; `way`: fresh, out, place, strided or async."""

    collective: str
    algorithm: str | None
    protocol: str | None
    dtype: str
    op: str
    count: int
    offset: int
    way: str


def anything(draw: random.Random, kernel: Kernel, most: int = 2500) -> Made:
    """A case for `kernel`: sizes around every boundary of word, tile and shard, and beyond a mailbox."""
    dtype = draw.choice([dtype for dtype in DTYPES.values() if _operations(kernel, dtype)])
    op = draw.choice(_operations(kernel, dtype))
    edges = [n for n in (1, 2, 3, 15, 63, 64, 65, 255, 513, 1025, 2400) if n <= most]
    count = min(most, draw.choice(edges) + draw.randrange(3))
    way = draw.choice(["fresh", "out", "place", "strided", *(["async"] if kernel.collective == "all_reduce" else [])])
    return Made(kernel.collective, kernel.algorithm, kernel.protocol, dtype.name, op, count, draw.randrange(4), way)


def _operations(kernel: Kernel, dtype: Dtype) -> list[str]:
    """The operations that the kernel has for a type; multicast kernels lack some."""
    return [op for op in dtype.ops if not kernel.why_not_reduced(*reduction(dtype, op))] if kernel.reduces else ["sum"]


def outcome(comm: Communicator, case: Made, number: int) -> bool:
    """Make the call; True if the result is exact and neither the input nor memory around the tensors was written."""
    kind, dtype = collective_specs.COLLECTIVES[case.collective], getattr(torch, case.dtype)
    facts = (case.collective, case.op, comm.world_size)
    data = check_data.values(*facts, comm.rank, number, case.count, dtype)
    x, beside = _tensor(data, dtype, case)
    how = check_data.options(case.collective, case.op, comm.world_size, number, case.count)
    how |= {"algorithm": case.algorithm, "protocol": case.protocol}
    gets = check_data.gets(case.collective, comm.world_size, comm.rank, number)
    if case.way not in ("fresh", "async") and gets and not check_data.in_place(case.collective):
        how["out"] = _output(comm, kind, case, x)
    result = getattr(comm, case.collective)(x, **how, **({"async_op": True} if case.way == "async" else {}))
    result = result.wait() if case.way == "async" else result
    if not gets:
        return result is None and check_data.wrong(x, data) == 0 and beside()
    exact = check_data.expected(*facts, number, case.count, comm.rank, dtype)
    kept = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() or check_data.wrong(x, data) == 0
    return check_data.wrong(result.reshape(-1), exact) == 0 and kept and beside()


def _tensor(data: torch.Tensor, dtype: torch.dtype, case: Made) -> tuple[torch.Tensor, object]:
    """The data in a tensor `offset` elements into a buffer, and a function that checks that the rest is unchanged."""
    step = 2 if case.way == "strided" else 1
    whole = torch.zeros(len(data) * step + 9, dtype=dtype)
    check_data.poison(whole)
    x = whole[case.offset :][: len(data) * step : step]
    x.copy_(data)
    outside = torch.ones(len(whole), dtype=torch.bool)
    outside[case.offset :][: len(data) * step : step] = False
    before = _bytes(whole)[outside].clone()
    return x, lambda: torch.equal(_bytes(whole)[outside], before)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).reshape(len(x), -1)


def _output(comm: Communicator, kind: collective_specs.Collective, case: Made, x: torch.Tensor) -> torch.Tensor:
    rows_in, rows_out = kind.rows_in(comm.world_size), kind.rows_out(comm.world_size)
    if case.way == "place" and x.is_contiguous() and rows_in > rows_out:
        return x[comm.rank * case.count :][: case.count]
    if case.way == "place" and rows_in == rows_out == 1 and "all_to_all" not in case.collective:
        return x
    out = torch.empty(case.count * rows_out + case.offset, dtype=x.dtype)[case.offset :]
    check_data.poison(out)
    return out
