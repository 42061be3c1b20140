"""Parts of a group, and the form of two levels by size: pure."""

import time
from dataclasses import replace

import pytest
import torch

from tricomm.policy import levels
from tricomm.policy.backend_choice import GroupFacts, decide, not_in_two_levels
from tricomm.policy.levels import Parts


def test_parts_by_the_ranks_nodes():
    parts = Parts.by([b"x", b"y", b"y", b"x"])
    assert parts.of == (0, 1, 1, 0) and (parts.count, parts.size) == (2, 2)
    assert [parts.members(part) for part in range(2)] == [[0, 3], [1, 2]]
    assert [parts.position(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [parts.column(rank) for rank in range(4)] == [[0, 1], [0, 1], [3, 2], [3, 2]]
    assert parts.why_not(16) is None and parts.named(1) == "node 1 (rank(s) 1, 2)"


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ((0, 0), "all ranks are on one"),
        ((0, 1), "one rank each"),
        ((0, 0, 1), "other numbers of ranks: 1, 2"),
        ((0,) * 17 + (1,) * 17, "17 ranks each, and the kernels take up to 16"),
    ],
)
def test_parts_without_two_levels(of, why):
    assert why in Parts(of).why_not(16)


def test_the_parts_of_ten_thousand_nodes_take_no_time():
    began = time.process_time()
    parts = Parts.by([b"%d" % (rank // 4) for rank in range(40_000)])
    assert parts.why_not(16) is None and parts.column(39_999)[:2] == [3, 7] and parts.position(39_998) == 2
    assert time.process_time() - began < 2.0


def test_the_form_by_size():
    forms = [levels.choose("cuda", "nodes", n).form for n in (65535, 65536, 4 << 20, (4 << 20) + 1)]
    assert forms == [None, "shards", "shards", None]
    assert [levels.choose("cpu", "nodes", n).form for n in (1024, 1025)] == ["leaders", "shards"]
    assert levels.choose("cuda", "islands", 1 << 20).form == "shards"
    assert levels.limits("cuda", "nodes") == [65535, 4 << 20] and levels.choose("xpu", "nodes", 1).form is None


PCIE = GroupFacts("cuda", 4, 1, None, "nccl", across="kernels", between="islands")
GPUS = GroupFacts("cuda", 16, 2, None, "nccl", across="nccl")


@pytest.mark.parametrize(
    ("facts", "dtype", "op", "nbytes", "backend", "words"),
    [
        (GPUS, torch.float32, "sum", 1 << 20, "two_level", "table 'levels' row"),
        (GPUS, torch.float32, "sum", 8, "nccl", "spans 2 nodes; not in two levels: table 'levels'"),
        (GPUS, torch.int8, "avg", 1 << 20, "nccl", "may not fit into int8"),
        (GroupFacts("cuda", 16, 2, None, "nccl"), torch.float32, "sum", 1 << 20, "nccl", "spans 2 nodes"),
        (PCIE, torch.float32, "sum", 1 << 20, "two_level", "islands"),
        (PCIE, torch.float32, "sum", 1 << 30, "nccl", "over the NCCL threshold"),
        (PCIE, torch.float32, "sum", 64, "kernels", "the kernels cover it"),
        (replace(GPUS, fallback=None), torch.float32, "sum", 8, "two_level", "no backend has it"),
    ],
)
def test_the_backend_of_an_all_reduce(facts, dtype, op, nbytes, backend, words):
    route = decide(facts, "all_reduce", dtype, op, nbytes)
    assert route.backend == backend and words in route.reason


def test_what_nccl_lacks_has_no_two_levels():
    assert "NCCL has no bxor of int32" in not_in_two_levels("nccl", "bxor", torch.int32)
    assert not_in_two_levels("gloo", "bxor", torch.int32) is None
    assert "not defined" in not_in_two_levels("gloo", "max", torch.complex64)
