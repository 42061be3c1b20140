"""One real GPU: ranks that fail, streams, and graphs that do not match. Run with `-m gpu`."""

import os
import signal
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.gpu.gpu_limits import within

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STALL = 3.0  # seconds


def join(rank, world_size, url, **options):
    chosen = tricomm.Options(**{"timeout": 60.0, "share_device": True, **options})
    return tricomm.init(url, rank, world_size, "cuda:0", options=chosen)


def endless(rank, world_size, tell, url, diverges=False):
    """Calls until an error; rank 1 may make another call than rank 0 after a second."""
    with join(rank, world_size, url, stall_timeout=STALL) as comm:
        comm.barrier()
        tell(os.getpid())
        begins = time.monotonic() + 1.0
        try:
            while True:
                other = diverges and rank == 1 and time.monotonic() > begins
                if other:
                    tell(time.monotonic())
                comm.all_reduce(torch.ones(1001 if other else 1000, device="cuda"))
                comm.synchronize()
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic()


def test_a_killed_rank_is_named_within_two_seconds(url, record_property):
    with ranks.start(2, endless, url, timeout=120) as started:
        pids = started.messages()
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        kind, text, caught = started.results()[0].value
    record_property("after_s", round(caught - killed, 3))
    assert kind == "PeerDied" and "rank 1" in text
    assert caught - killed < within(2.0)


def test_a_stopped_rank_is_named_after_a_stall(url, record_property):
    with ranks.start(2, endless, url, timeout=120) as started:
        pids = started.messages()
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        kind, text, caught = started.results([0])[0].value
    record_property("after_s", round(caught - stopped, 3))
    assert kind == "PeerStalled" and "rank 1" in text
    assert caught - stopped < within(STALL + 1.0)


def test_a_rank_that_makes_another_call_is_named_within_two_seconds(url, record_property):
    with ranks.start(2, endless, url, True, timeout=120) as started:
        started.messages()
        began = started.message(1)
        kind, text, caught = started.results([0])[0].value
    record_property("after_s", round(caught - began, 3))
    assert kind == "CollectiveMismatch" and caught - began < within(2.0), text


@ranks.each(2, [float(1 + 2 * n) for n in range(10)])
def test_two_streams(rank, world_size, tell, url):
    """Calls on two streams are ordered by events."""
    with join(rank, world_size, url) as comm:
        streams = [torch.cuda.Stream() for _ in range(2)]
        xs = [torch.full((1000,), float(rank + n), device="cuda") for n in range(10)]
        torch.cuda.synchronize()
        for n, x in enumerate(xs):
            with torch.cuda.stream(streams[n % 2]):
                comm.all_reduce(x)
        torch.cuda.synchronize()
        return [x[0].item() for x in xs]


@ranks.each(2, [2.0**6, 2.0**6], timeout=120)
def test_two_communicators_in_another_order_on_each_rank(rank, world_size, tell, url):
    """Each rank launches them in another order: a graph and an eager call at the same time."""
    with join(rank, world_size, url, max_blocks=32) as comm, comm.split(range(world_size)) as second:
        streams = [torch.cuda.Stream() for _ in range(2)]
        xs = [torch.ones(1000, device="cuda") for _ in range(2)]
        for each, x in zip((comm, second), xs, strict=True):
            each.all_reduce(x)
        comm.synchronize()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[1]):
            second.all_reduce(xs[1])
        for number in (rank, 1 - rank) * 5:
            with torch.cuda.stream(streams[number]):
                graph.replay() if number else comm.all_reduce(xs[0])
        torch.cuda.synchronize()
        comm.check()
        second.check()
        return [x[0].item() for x in xs]


def captures_too_early(rank, world_size, tell, url, message):
    """A call that has not run before, or a message, is refused inside a capture; the group still works."""
    with join(rank, world_size, url) as comm:
        x, text = torch.full((1000,), 1.0, device="cuda"), ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)  # a graph needs something
            try:
                comm.send(x, 1 - rank) if message else comm.all_reduce(x)
            except tricomm.InvalidArgument as error:
                text = str(error)
        comm.all_reduce(x)
        comm.synchronize()
        return text, x[0].item()


@pytest.mark.parametrize("message", [False, True])
def test_a_capture_before_the_first_call_is_refused_and_the_group_still_works(message, url):
    for text, value in ranks.run(2, captures_too_early, url, message, timeout=120):
        assert ("cannot be captured" if message else "run this call once before capture") in text and value == 2.0


def replays_apart(rank, world_size, tell, url, how):
    """Rank 0 replays once too often, or replays what rank 1 calls without a graph."""
    with join(rank, world_size, url, timeout=4.0) as comm:
        x = torch.ones(1000, device="cuda")
        comm.all_reduce(x)
        comm.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_reduce(x)
        began = time.monotonic()
        try:
            if rank == 0 or how == "too often":
                with torch.cuda.stream(stream):
                    for _ in range(3 + (rank == 0)):
                        graph.replay()
            else:
                comm.all_reduce(x)
            with torch.cuda.stream(stream):
                comm.synchronize()
            if rank == 1:
                time.sleep(8.0)  # lives on, and calls nothing
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return "nothing", "", time.monotonic() - began


@pytest.mark.parametrize(("how", "kind"), [("too often", "CollectiveTimeout"), ("one rank only", "CollectiveMismatch")])
def test_replays_that_do_not_match_are_named(how, kind, url):
    (result, text, seconds), other = ranks.run(2, replays_apart, url, how, timeout=120)
    assert result == kind and "rank 1" in text, text
    assert seconds < within(6.0 if how == "too often" else 3.0)
    assert other[0] == (kind if how == "one rank only" else "nothing")
