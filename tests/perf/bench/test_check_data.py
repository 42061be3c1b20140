"""The check's data are exact in every type and differ between ranks and calls; the comparison misses no error."""

import pytest
import torch

from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf.bench import check_data

EACH = [(name, op) for name, dtype in DTYPES.items() for op in dtype.ops]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("name", "op"), EACH)
def test_inputs_and_results_are_exact(name: str, op: str, world_size: int) -> None:
    dtype = getattr(torch, name)
    exact = check_data.expected("all_reduce", op, world_size, 5, 4096, 0, dtype)
    parts = [check_data.values("all_reduce", op, world_size, r, 5, 4096, dtype) for r in range(world_size)]
    wraps = name in ("int8", "uint8") and op == "prod"
    for whole in parts if wraps else (exact, *parts):
        back = whole.to(dtype).real if dtype.is_complex else whole.to(dtype)
        assert torch.equal(back.to(whole.dtype), whole)
    if op == "avg":
        assert torch.equal(exact * world_size, torch.stack(parts).sum(0))


@pytest.mark.parametrize("wire", registry.WIRES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_a_quantised_sum_the_rounded_one_is_right(wire: str, dtype: torch.dtype) -> None:
    facts = ("all_reduce", "sum", 4, 5, 4096, 0, dtype)
    exact, rounded = check_data.expected(*facts), check_data.expected(*facts, wire)
    apart = (exact - rounded).abs()
    assert rounded.dtype == dtype and 0 < apart.max() <= 8 and check_data.wrong(rounded, exact) > 100


def test_ranks_calls_and_elements_differ() -> None:
    facts = ("all_reduce", "sum", 4)
    a = check_data.values(*facts, 0, 7, 4096)
    rank, call = check_data.values(*facts, 1, 7, 4096), check_data.values(*facts, 0, 8, 4096)
    for other in (rank, call, a.roll(1), a.roll(2048)):
        assert (a != other).float().mean() > 0.9


@pytest.mark.parametrize("name", DTYPES)
def test_poison_is_counted_as_wrong(name: str) -> None:
    dtype = getattr(torch, name)
    out = torch.zeros(64, dtype=dtype)
    check_data.poison(out)
    exact = check_data.expected("all_reduce", "sum", 4, 1, 64, 0, dtype)
    assert check_data.wrong(out, exact) == 64
    out.copy_(exact)
    assert check_data.wrong(out, exact) == 0
    other = exact.clone()
    other[3] = not other[3] if dtype == torch.bool else other[3] + 1
    assert check_data.wrong(out, other) == 1


def test_rows_are_in_rank_order() -> None:
    exact = check_data.expected("all_gather", "sum", 3, 1, 8)
    assert torch.equal(exact[8:16], check_data.values("all_gather", "sum", 3, 1, 1, 8))
    sent = check_data.values("all_to_all", "sum", 3, 2, 1, 8)
    assert torch.equal(check_data.expected("all_to_all", "sum", 3, 1, 8, rank=1)[16:24], sent[8:16])


@pytest.mark.parametrize("collective", [name for name, kind in COLLECTIVES.items() if kind.root])
def test_the_root_rotates(collective: str) -> None:
    roots = [check_data.options(collective, "sum", 3, call, 8)[COLLECTIVES[collective].root] for call in range(4)]
    assert roots == [0, 1, 2, 0]
    takers = [r for r in range(3) if check_data.gets(collective, 3, r, 1)]
    assert takers == ([1] if COLLECTIVES[collective].root == "dst" else [0, 1, 2])
