"""Kernels through the switch, interpreted: results, chunks, epochs, and what the switch does not reduce."""

import pytest
import torch

from tests import ranks
from tests.kernels import arenas
from tests.kernels.test_protocol import block, right, wait_for_all
from tricomm.kernels import multimem
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import EPOCH_LIMIT

CASES = [
    (7, torch.bfloat16, 1, 2, 2, "sum"),
    (1001, torch.float16, 3, 3, 64, "sum"),
    (5, torch.int32, 0, 3, 16, "min"),
    (20000, torch.bfloat16, 0, 2, 512, "sum"),  # several chunks
    (999, torch.int64, 0, 1, 64, "max"),
]


def calls(rank, world_size, tell, where):
    """Every kernel in turn, over mailboxes that hold other words; the wrong ones, and the last epoch."""
    me = arenas.Rank(rank, where)
    me.fill_mailboxes(0)
    wait_for_all(me)
    wrong = []
    for seed, (whole, dtype, offset, blocks, tile, op) in enumerate(CASES):
        for kernel in registry.MULTICAST:
            count, root = max(1, whole // kernel.kind.rows_in(world_size)), seed % world_size
            parts = arenas.inputs(kernel, count, dtype, world_size, seed)
            x = torch.zeros(len(parts[rank]) + offset, dtype=dtype)[offset:]
            x.copy_(parts[rank])
            y = arenas.output(kernel, count, dtype, world_size, x, rank == root)
            me.run(kernel, x, y, op, blocks, tile, root=root)
            if not torch.equal(y, arenas.expected(kernel, parts, op, rank, root)):
                wrong.append((kernel.name, count, str(dtype), offset, blocks, tile, op))
            if not torch.equal(x, parts[rank]):
                wrong.append(("input changed", kernel.name, count))
    return wrong, me.epoch


def test_calls_of_changing_size_type_grid_and_offset():
    with block(3, 64 * 1024) as where:
        results = ranks.run(3, calls, where)
    assert [wrong for wrong, _ in results] == [[]] * 3 and len({epoch for _, epoch in results}) == 1
    assert results[0][1] > len(CASES) * len(registry.MULTICAST) + 8  # long ones took several epochs


def beside_others(rank, world_size, tell, where):
    """Calls of the switch between those of other kernels that use the same mailboxes, over the end of the epochs."""
    me = arenas.Rank(rank, where, epoch=EPOCH_LIMIT - 9)
    wait_for_all(me)
    others = [registry.find("all_reduce", "two_shot", "simple"), registry.find("all_gather", "one_shot", "simple")]
    kernels = [k for pair in zip(registry.MULTICAST, 2 * others, strict=True) for k in pair] * 2
    return [right(me, kernel, 300 + n, n, blocks=1 + n % 3) for n, kernel in enumerate(kernels)]


def test_mailboxes_are_shared_with_the_other_kernels():
    with block(2, 64 * 1024) as where:
        assert all(all(good) for good in ranks.run(2, beside_others, where))


@pytest.mark.parametrize(
    ("element", "op", "reason"),
    [
        ("float32", "sum", ""),
        ("bfloat16", "sum", ""),
        ("int64", "bxor", ""),
        ("int32", "min", ""),
        ("float32", "max", "no max of float32"),
        ("float64", "sum", "no sum of float64"),
        ("bfloat16", "avg", "no avg"),
        ("float8_e5m2", "sum", "no sum of float8"),
        ("int8", "sum", "no sum of int8"),
        ("int32", "prod", "no prod"),
    ],
)
def test_reductions_of_the_switch(element, op, reason):
    result = multimem.why_not_reduced(element, op)
    assert result is None if not reason else reason in result


def test_architectures_and_versions():
    assert multimem.why_not(90, "3.9.0") is None and multimem.why_not(100, "3.10.0") is None
    assert "sm_80" in multimem.why_not(80, "3.9.0") and "3.8.0" in multimem.why_not(90, "3.8.0")
