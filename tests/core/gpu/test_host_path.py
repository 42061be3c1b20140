"""The host path of a repeated call: its queries, allocations and writes, counted over fakes."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
import torch

from devtools import null_launch
from tests.core.gpu.conftest import MINE, device_of
from tests.core.operations import Operations
from tests.policy import test_wire as wires
from tricomm.errors import InvalidArgument
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry

ONE_OF_EACH = {"_cuda_getDevice": 1, "_cuda_isCurrentStreamCapturing": 1, "_cuda_getCurrentRawStream": 1}


def asked(world, call):
    world.queries.clear()
    call()
    return dict(world.queries)


def test_eager_and_captured_calls_make_the_same_three_queries_once(comm, world):
    x = torch.ones(8)
    assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        for _ in range(2):
            assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH, "no stream or event object is made"
    assert len(graph) == 2 and comm._launcher.captured
    assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH


def test_an_asynchronous_call_makes_an_event_and_no_stream(comm, world):
    result = asked(world, lambda: comm.all_reduce(torch.ones(8), async_op=True))
    assert result == {**ONE_OF_EACH, "_cuda_getCurrentRawStream": 2, "_cuda_isCurrentStreamCapturing": 2, "Event": 1}
    side = world.new_stream(torch.device("cuda", MINE))
    with world.capture(side):
        comm.all_reduce(torch.ones(8), async_op=True)
        assert world.log[-1] == f"event on {side}", "not ordered after the last eager call"


def test_a_change_of_streams_makes_the_objects_that_order_them(comm, world):
    """The count when a call has to be ordered between two streams by torch's stream objects."""
    with world.stream(world.new_stream(torch.device("cuda", MINE))):
        result = asked(world, lambda: comm.all_reduce(torch.ones(8)))
    assert result["current_stream"] == 1 and result["_cuda_isCurrentStreamCapturing"] == 1


def test_every_other_collective_queries_the_capture_once(comm, world):
    x, y = torch.ones(8), torch.ones(8)
    for call in (lambda: comm.all_reduce(x, out=y), lambda: comm.all_gather(x, out=y), lambda: comm.broadcast(x, 0)):
        call()
        assert asked(world, call)["_cuda_isCurrentStreamCapturing"] == 1
        with world.capture(world.new_stream(torch.device("cuda", MINE))):
            assert asked(world, call)["_cuda_isCurrentStreamCapturing"] == 1


def test_a_captured_call_has_the_plan_of_its_mode_and_separate_memory(comm, world):
    x, y = torch.ones(8), torch.ones(8)
    comm.all_reduce(x)
    eager = device_of(comm).launches[-1]
    with world.capture(world.new_stream(torch.device("cuda", MINE))):
        comm.all_reduce(x)
        comm.all_reduce(y)
    first, second = device_of(comm).launches[-2:]
    assert first.words[:2] == eager.words[:2] == [x.data_ptr()] * 2 and second.words[:2] == [y.data_ptr()] * 2
    modes = {plan.mode: plan.fingerprint for plan in comm._planner.plans.values() if plan.numel == 8}
    numbers = [launch.words[-3] for launch in (eager, first, second)]
    assert [n & 0xFFFFFFFF for n in numbers] == [modes["eager"], modes["graph"], modes["graph"]]
    assert [n >> 32 for n in numbers] == [numbers[0] >> 32, (numbers[0] >> 32) + 1, (numbers[0] >> 32) + 2]


@pytest.mark.parametrize("wire", registry.WIRES)
def test_a_quantised_call_is_launched_and_replayed_as_others_are(comm, world, wire):
    x, y = (torch.full((1000,), 77, dtype=torch.bfloat16) for _ in range(2))
    call = lambda: comm.all_reduce(x, out=y, wire=wire)  # noqa: E731
    capture = lambda: world.capture(world.new_stream(torch.device("cuda", MINE)))  # noqa: E731

    def right(run, seed):
        x.copy_(wires.numbers(seed, len(x), x.dtype))
        y.fill_(77)
        run()
        return torch.equal(wires.bits(y), wires.bits(reference.quantised(wire, "sum", [x])))

    with capture(), pytest.raises(InvalidArgument, match="run this call once before capture"):
        call()
    assert right(call, 0)
    assert right(lambda: asked(world, call), 1) and asked(world, call) == ONE_OF_EACH
    kernel = device_of(comm).launches[-1].function
    with capture() as graph:
        assert asked(world, call) == ONE_OF_EACH
    assert len(graph) == 1 and device_of(comm).launches[-1].function == kernel and comm._launcher.captured
    assert right(graph[0], 2) and right(call, 3) and right(graph[0], 4)
    plans = {plan.mode: plan for plan in comm._planner.plans.values() if plan.numel == len(x)}
    assert {plan.choice.algorithm for plan in plans.values()} == {registry.algorithm_of(wire)}
    assert set(plans) == {"eager", "graph"}


def kept_and_used(call, calls=100):
    """The blocks and objects left after `calls`, and the peak bytes of one call."""
    for _ in range(calls):
        call()
    gc.collect()
    gc.disable()
    try:
        blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
        for _ in range(calls):
            call()
        blocks, objects = sys.getallocatedblocks() - blocks, len(gc.get_objects()) - objects
        tracemalloc.start()
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return blocks, objects, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_call_leaves_no_object_and_allocates_no_memory_of_torch(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "40")  # the flight recorder is full before the calls that are counted
    x = torch.ones(64)
    with null_launch.communicator() as made:
        call = lambda: made.all_reduce(x)  # noqa: E731
        call()
        blocks, objects, used = kept_and_used(call)
        assert blocks < 50 and objects < 50, "in 100 calls; other threads of the process have some"
        assert used < 1500, "integers, and the arguments of the launch"
        with Operations() as operations:
            call()
        assert operations.seen == []
        kept = []
        blocks, objects, _ = kept_and_used(lambda: kept.append((made.all_reduce(x), object())))
        assert blocks >= 100 and objects >= 100, "the counts see what is left"
        _, _, used = kept_and_used(lambda: made.all_reduce(x) is bytes(2000))
        assert used > 1500, "and what is there for a moment"
        with Operations() as operations:
            made.all_reduce(x, out=torch.empty_like(x))
        assert operations.seen != []
