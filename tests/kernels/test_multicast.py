"""NVLS kernels, interpreted: mailboxes shared with other kernels, and reductions that NVLS lacks."""

import pytest

from tests import ranks
from tests.kernels import arenas
from tests.kernels.test_protocol import block, right, wait_for_all
from tricomm.kernels import multimem
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import EPOCH_LIMIT


def beside_others(rank, world_size, tell, where):
    """NVLS calls alternating with other kernels that use the same mailboxes, while the epochs wrap around."""
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
