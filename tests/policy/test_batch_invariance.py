"""A batch-invariant group uses only kernels that reduce in rank order, at any size, and refuses other calls."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tricomm import env
from tricomm.c10d import capabilities, dispatch
from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.group_calls import GroupCall
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.kernels import layout
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.options import Options, digest_of, with_environment
from tricomm.perf.bench import request
from tricomm.perf.system import info
from tricomm.policy.backend_choice import REDUCTIONS, GroupFacts, decide
from tricomm.policy.selection import choose
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import TableRow
from tricomm.store.records import Capabilities

GPU = GroupFacts("cuda", 8, 1, None, "nccl", batch_invariant=True)
CPU = GroupFacts("cpu", 2, 1, "CPU tensors go over TCP", "gloo", batch_invariant=True)
CUBE_ROWS = tuple(
    TableRow("all_reduce", 8, most, algorithm, protocol)
    for most, algorithm, protocol in (
        (1 << 10, "hybrid_cube_mesh", "ll"),
        (1 << 20, "two_shot", "ll"),
        (None, "hybrid_cube_mesh_two_shot", "simple"),
    )
)


def site(world_size=8, device="sm_70", batch_invariant=True, **more):
    memory = layout.plan(world_size, 64 << 20)
    return SelectionFacts(device, world_size, memory, 64, batch_invariant=batch_invariant, **more)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(COLLECTIVES)),
    st.integers(0, 1 << 34),
    st.integers(1, 16),
    st.sampled_from(["cpu", "sm_70", "sm_90"]),
    st.sampled_from(["", "hybrid_cube_mesh", "nvswitch"]),
    st.sampled_from(["eager", "graph"]),
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([None, "ll", "simple"]),
    st.booleans(),
)
def test_any_choice_reduces_in_rank_order(collective, nbytes, world_size, device, topology, mode, bits, protocol, own):
    if collective == "barrier":
        protocol = None
    facts = site(world_size, device, topology=topology, tuned=CUBE_ROWS if own else (), tuned_name="mine")
    choice = choose(facts, collective, nbytes, protocol=protocol, mode=mode, bits=bits)
    kernel = registry.find(collective, choice.algorithm, choice.protocol)
    assert kernel.rank_order
    assert ("in rank order" in choice.reason) == kernel.reduces and "batch-invariant" in choice.reason


def test_without_the_mode_the_same_tables_choose_a_cube_mesh():
    for nbytes in (8, 1 << 30):
        facts = site(batch_invariant=False, tuned=CUBE_ROWS)
        assert "hybrid_cube_mesh" in choose(facts, "all_reduce", nbytes).algorithm
    unordered = {"hybrid_cube_mesh", "hybrid_cube_mesh_two_shot", "multicast", *(k.algorithm for k in registry.WIRE)}
    assert {k.algorithm for k in registry.ALL if not k.rank_order} == unordered
    assert choose(site(), "all_gather", 8, "hybrid_cube_mesh").algorithm == "hybrid_cube_mesh"


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("how", [("hybrid_cube_mesh", None), ("hybrid_cube_mesh_two_shot", "simple")])
def test_a_forced_cube_mesh_is_refused_with_the_algorithms_that_keep_the_order(how, reachable):
    with pytest.raises(InvalidArgument) as error:
        choose(site(reachable=reachable), "all_reduce", 8, *how)
    text = str(error.value)
    assert how[0] in text and "adds the sums of two quads" in text and "TRICOMM_BATCH_INVARIANT" in text
    assert ("; there is one_shot/ll, " in text) == (", two_shot/simple" in text) == reachable
    assert ("no kernel runs here" in text) != reachable


@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(0, 1 << 40), st.booleans())
def test_no_size_goes_to_nccl(collective, nbytes, forced):
    op = "sum" if collective in REDUCTIONS else "none"
    route = decide(GPU, collective, torch.float32, op, nbytes, forced)
    assert route.backend == "kernels" and "batch-invariant" in route.reason


def test_without_the_mode_large_calls_go_to_nccl():
    assert decide(GroupFacts("cuda", 8, 1, None, "nccl"), "all_reduce", torch.float32, "sum", 1 << 34).backend == "nccl"


def gpu(**more):
    return GroupFacts(**{**vars(GPU), **more})


@pytest.mark.parametrize(
    ("facts", "call", "words"),
    [
        (GPU, ("all_reduce", torch.uint16, "sum", 8), ["sum of uint16", "no kernel takes torch.uint16", "convert"]),
        (GPU, ("all_reduce", torch.float32, "premul_sum", 8), ["premul_sum of float32", "is not defined", "operation"]),
        (GPU, ("reduce", torch.complex64, "prod", 8), ["prod of complex64", "sum, avg"]),
        (GPU, ("reduce_scatter_v", torch.float32, "sum", None), ["no reduce_scatter_v kernel", "pad the parts"]),
        (gpu(nodes=2), ("all_reduce", torch.float32, "sum", 8), ["spans 2 nodes", "inside a node"]),
        (gpu(no_kernels="no peer access"), ("reduce", torch.float32, "max", 8), ["no peer access", "every rank's GPU"]),
        (gpu(reachable=False), ("all_reduce", torch.float32, "sum", 8), ["not every rank reaches", "every rank's GPU"]),
        (CPU, ("all_reduce_sparse", None, "sum", 0), ["no fixed order", "to_dense()"]),
        (CPU, ("all_reduce", torch.complex64, "prod", 8), ["prod of complex64", "all_gather"]),
    ],
)
def test_calls_that_cannot_be_batch_invariant_are_refused_with_an_alternative(facts, call, words):
    with pytest.raises(InvalidArgument) as error:
        decide(facts, *call)
    for word in [*words, call[0], "batch-invariant", "TRICOMM_BATCH_INVARIANT"]:
        assert word in str(error.value)
    assert decide(GroupFacts(**{**vars(facts), "batch_invariant": False}), *call).backend in ("nccl", "gloo", "kernels")


@pytest.mark.parametrize("facts", [gpu(nodes=2), gpu(no_kernels="no peer access"), gpu(reachable=False), CPU])
@pytest.mark.parametrize("call", [("broadcast", torch.float32), ("send", torch.uint16), ("all_gather_v", torch.int8)])
def test_the_route_of_calls_that_do_not_reduce_is_unchanged(facts, call):
    assert decide(facts, *call, "none", 8).backend == facts.fallback


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"])
def test_tricomm_reduces_messages_over_gloo_in_rank_order(collective):
    for dtype in (torch.float32, torch.uint16, torch.bfloat16):
        route = decide(CPU, collective, dtype, "sum", 1 << 30)
        assert route.backend == "gloo" and "reduced here in rank order" in route.reason


# Options, the environment, agreement


def test_the_variable_is_the_option_of_every_group(monkeypatch):
    assert not with_environment(None).batch_invariant
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "1")
    assert with_environment(None).batch_invariant and with_environment(Options(max_blocks=4)).max_blocks == 4
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "0")
    assert with_environment(Options(batch_invariant=True)).batch_invariant and not env.batch_invariant()
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "perhaps")
    with pytest.raises(InvalidArgument, match="TRICOMM_BATCH_INVARIANT='perhaps'"):
        with_environment(None)
    with pytest.raises(InvalidArgument, match="batch_invariant=1: True or False"):
        Options(batch_invariant=1)


def test_ranks_with_another_mode_have_another_fingerprint():
    memory = layout.plan(2, 1 << 20)
    one, other = (digest_of(Options(batch_invariant=value), memory, "cpu") for value in (False, True))
    assert one != other


def test_tools_follow_the_variable(monkeypatch):
    assert "in groups made with" in info._batch_invariant()
    assert any("hybrid" in case.algorithm for case in request.cases(("all_reduce",), "all", "all", 8))
    monkeypatch.setenv("TRICOMM_BATCH_INVARIANT", "1")
    assert "in every group" in info._batch_invariant()
    assert all("batch-invariant" in row["reason"] for row in info._selection())
    assert not any("hybrid" in case.algorithm for case in request.cases(("all_reduce",), "all", "all", 8))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_c10d_call_on_a_gpu_is_refused_before_nccl_or_the_kernels_memory(batch_invariant, monkeypatch):
    """No part of a coalesced call is made."""
    monkeypatch.setattr(dispatch, "torch_backend", lambda device: "nccl")
    monkeypatch.setattr(dispatch, "_capturing", lambda device: False)
    monkeypatch.setattr(dispatch.Dispatcher, "_communicator", lambda self, device: made.append("memory"))
    device, made = torch.device("cuda", 0), []
    config = GroupConfig(None, 0, 2, timedelta(seconds=9), [0, 1], "g")
    agreed = GroupCapabilities((), 1, True, {"cuda": None}, None, batch_invariant)
    calls = dispatch.Dispatcher(config, agreed, Backends({}), None)
    batch = [
        GroupCall("all_reduce", torch.ones(2, dtype=t), op="sum", device=device) for t in (torch.int32, torch.uint16)
    ]

    def run():
        calls.run(batch, lambda: made.append("nccl"))

    if batch_invariant:
        with pytest.raises(InvalidArgument, match="sum of uint16 is refused in a batch-invariant group"):
            run()
        assert made == []
    else:
        run()
        assert made[-1] == "nccl"
    calls.close()


def member(flags):
    return Capabilities(1, 0, 0, b"n" * 16, flags, 1000)


def test_a_c10d_group_is_batch_invariant_on_all_ranks_or_refused_by_name():
    assert capabilities._conclude([member(0b11111)] * 2, None).batch_invariant
    assert not capabilities._conclude([member(0b01111)] * 2, None).batch_invariant
    with pytest.raises(RendezvousError, match=r"rank\(s\) \[1\] ask for a batch-invariant group, rank\(s\) \[0, 2\]"):
        capabilities._conclude([member(0b01111), member(0b11111), member(0b01111)], None)
