"""NCCL as a communicator's fallback: the calls that it runs, the same on all ranks, and its failures."""

import os
import signal
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies import nccl_bodies as bodies
from tricomm.core import bootstrap
from tricomm.errors import InvalidArgument
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import GroupFacts, decide

GPU = GroupFacts("cuda", 8, 1, None, "nccl")


def test_by_size_and_type(url):
    result = ranks.run(3, bodies.by_route, url, timeout=200)
    for rank, (wrong, small, large, routes, reason, refused, value, ended, lines) in enumerate(result):
        assert wrong == []
        want = {"all_reduce": 4, "barrier": 1, **dict.fromkeys(set(COLLECTIVES) - {"all_reduce", "barrier"}, 1)}
        assert small == want
        # In all_to_all_v no rank knows its peers' bytes, and a barrier has none.
        assert large == {name: count for name, count in want.items() if name not in ("all_to_all_v", "barrier")}
        assert routes == ["kernels", "nccl", "kernels", "kernels"]
        assert reason == "4097 bytes are over the NCCL threshold of 4096"
        forced, narrow, op, explained, message = refused
        assert "send: no kernel takes torch.uint16" in message
        assert "a kernel is forced" in forced and "no kernel takes torch.uint32" in forced
        assert "NCCL has no sum of torch.uint16" in narrow and narrow == explained
        assert "NCCL has no bxor of torch.uint32" in op
        assert value == 3.0 and ended == "destroyed"
        assert bool(lines) == (rank == 0)
        if lines:
            assert len(lines) == len(set(lines))
            assert sum("all_reduce sum float32 " in line and "-> nccl: " in line for line in lines) == 2
            assert any("all_gather uint16 24 B -> nccl: no kernel takes" in line for line in lines)


def test_without_shared_memory_everything_goes_to_nccl(url):
    for wrong, kind, route, reason, kernels in ranks.run(2, bodies.without_memory, url, timeout=120):
        assert wrong == [] and kind == "none" and route == "nccl" and kernels == {}
        assert "cannot share memory" in reason and "no peer access on this machine" in reason


@pytest.mark.parametrize("how", ["missing", "not wanted"])
def test_without_shared_memory_and_without_nccl_all_ranks_say_why(how, url):
    for text in ranks.run(2, bodies.without_memory_or_nccl, url, how):
        assert "no peer access on this machine" in text
        assert ("rank 1: nccl4py cannot be used" in text) == (how == "missing")


def test_nodes(url):
    with ranks.start(4, bodies.nodes, url, timeout=200) as started:
        told = started.messages()
        more = {rank: started.message(rank) for rank in (0, 3)}
        result = started.results()
    assert told == [("posix_shm", 1.0)] * 2 + [("posix_shm", 5.0)] * 2
    assert more == {0: ("none", 3.0), 3: ("none", 3.0)}
    for outcome in result:
        assert outcome.error is None, outcome.text
        wrong, reason, kind = outcome.value
        assert wrong == [] and kind == "none" and reason == "the group spans 2 nodes"


def test_a_failed_handshake_leaves_the_ranks_without_shared_memory(url):
    for x, kind, reason in ranks.run(2, bodies.namespaces, url):
        assert x == [2.0] * 3 and kind == "none" and "PID namespace" in reason


def test_a_rank_of_another_node_that_does_not_come(url):
    kind, text, seconds, ended = ranks.run(2, bodies.absent_on_another_node, url)[0]
    assert kind == "CollectiveTimeout" and "timeout after 3 s" in text and "cannot be seen from here" in text
    assert 2.0 < seconds < 8.0 and ended == "aborted"


def test_a_group_of_cpus_on_several_nodes_is_refused_with_the_remedy(url):
    for kind, text in ranks.run(2, bodies.nodes_on_a_cpu, url):
        assert kind == "RendezvousError" and "on another host" in text and "over TCP" in text


def test_nccl_that_one_rank_lacks_is_lacking_on_all(url):
    for large, small, said, route, stats in ranks.run(3, bodies.nccl_is_missing, url, timeout=120):
        assert large == small == 3.0 and route == "kernels"
        assert len(said) == 2
        for text in said:
            assert "no kernel takes torch.uint16" in text and "rank 1: nccl4py cannot be used" in text
        assert stats["kernels"] == {"all_reduce": 2} and stats["nccl"] == {}


def test_an_asynchronous_error_ends_the_group_on_all_ranks(url):
    for rank, (kind, text, seconds, ended) in enumerate(ranks.run(2, bodies.fails_on_its_own, url)):
        assert kind == "GroupAborted" and "NCCL reports error 6 (a link went down)" in text
        assert ("rank 0 aborted the group" in text) == (rank == 1)
        assert ended == "aborted" and seconds < 1.0 + ranks.BUSY


def test_a_rank_that_dies_is_named_by_those_in_nccl(url):
    with ranks.start(3, bodies.dies, url) as started:
        victim = started.messages()[1]
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        for rank, outcome in enumerate(started.results()):
            if rank != 1:
                kind, text, caught, ended = outcome.value
                assert kind == "PeerDied" and f"rank 1 (pid {victim}) died" in text
                assert caught - killed < 2.0 + ranks.BUSY and ended == "aborted"


SMALL, LARGE = 8, bodies.LIMIT


@pytest.mark.parametrize("before", [[], [LARGE]], ids=["at the first call", "later"])
@pytest.mark.parametrize("sizes", [(SMALL, LARGE), (LARGE, 2 * LARGE)], ids=["kernels and NCCL", "NCCL"])
def test_ranks_that_choose_different_routes_are_named_at_once(sizes, before, url):
    for kind, text, seconds in ranks.run(2, bodies.different_calls, url, sizes, before):
        assert kind == "CollectiveMismatch", text
        assert seconds < 5.0
        assert "all_reduce" in text


def test_without_the_comparison_they_wait_until_the_timeout(url):
    for kind, _, seconds in ranks.run(2, bodies.different_calls, url, (SMALL, LARGE), [LARGE], False):
        assert kind in ("CollectiveTimeout", "GroupAborted") and seconds > 2.0


# The decision alone


def test_if_ranks_do_not_all_reach_each_other_only_cube_mesh_collectives_use_kernels():
    apart = GroupFacts("cuda", 8, 1, None, "nccl", reachable=False)
    for collective in COLLECTIVES:
        route = decide(apart, collective, torch.float32, "sum", 8)
        assert route.backend == ("kernels" if collective in ("all_reduce", "all_gather") else "nccl")
        assert route.backend == "kernels" or "reaches every other one's memory" in route.reason
    assert (
        decide(GroupFacts("cuda", 4, 1, None, "nccl", reachable=False), "all_reduce", torch.float32, "sum", 8).backend
        == "nccl"
    )


def test_size_is_no_reason_without_a_fallback():
    route = decide(GroupFacts("cuda", 8, 1, None, None, "no NCCL here"), "all_reduce", torch.float32, "sum", 1 << 30)
    assert route.backend == "kernels" and "NCCL threshold" in route.reason and "no NCCL here" in route.reason


def test_a_forced_kernel_is_run_or_refused():
    assert decide(GPU, "all_reduce", torch.float32, "sum", 1 << 30, True).backend == "kernels"
    with pytest.raises(InvalidArgument, match="all_reduce: a kernel is forced.*spans 2 nodes"):
        decide(GroupFacts("cuda", 8, 2, None, "nccl"), "all_reduce", torch.float32, "sum", 8, True)


@pytest.mark.parametrize(("world_size", "most"), [(2, 8), (3, 16), (8, 16), (16, 16)])
def test_nvls_raises_the_size_up_to_which_kernels_are_used(world_size, most):
    apart = GroupFacts("cuda", world_size, 1, None, "nccl")
    through = GroupFacts("cuda", world_size, 1, None, "nccl", switch=True)

    def by(facts, nbytes, dtype=torch.bfloat16, op="sum", collective="all_reduce"):
        return decide(facts, collective, dtype, op, nbytes).backend

    assert by(through, most << 20) == "kernels" and by(through, (most << 20) + 8) == "nccl"
    assert by(apart, 8 << 20) == "kernels" and by(apart, (8 << 20) + 8) == "nccl"
    for dtype, op in ((torch.float64, "sum"), (torch.float32, "max"), (torch.uint8, "sum"), (torch.float32, "prod")):
        assert by(through, (8 << 20) + 8, dtype, op) == "nccl", "NVLS does not reduce this"
    assert by(through, most << 20, torch.int32, "max") == "kernels"
    assert by(through, (8 << 20) + 8, collective="all_gather", op="none") == "nccl"


def test_on_a_cpu_the_kernels_have_no_fallback(url):
    native, missing = bootstrap.fallback(torch.device("cpu"), tricomm.Options())
    assert native is None and "over TCP" in missing
    assert bootstrap.fallback(torch.device("cuda"), tricomm.Options()) == ("nccl", "")
    with tricomm.init(url, 0, 1, "cpu", options=tricomm.Options(arena_bytes=256 * 1024)) as comm:
        with pytest.raises(InvalidArgument, match=r"band.*is not defined for float32; there is [^;]*$"):
            comm.all_reduce(torch.ones(2), "band")
        with pytest.raises(InvalidArgument, match="no kernel takes torch.uint16; there is float64.*over TCP"):
            comm.all_reduce(torch.ones(2, dtype=torch.uint16))
        with pytest.raises(InvalidArgument, match="no kernel takes torch.uint16"):
            comm.explain("all_reduce", 8, torch.uint16)
        assert comm.explain("all_reduce", 1 << 30).route == backend_choice.KERNELS
