"""What a call that has been made before asks, makes and writes on the host: counted, over fakes."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
import torch

from tests.core.gpu.conftest import MINE, device_of
from tests.core.operations import Operations
from tests.kernels.fake_launch import Result
from tricomm import GroupAborted, ResourceError
from tricomm.perf import null_launch

ONE_OF_EACH = {"_cuda_getDevice": 1, "_cuda_isCurrentStreamCapturing": 1, "_cuda_getCurrentRawStream": 1}


def asked(world, call):
    world.queries.clear()
    call()
    return dict(world.queries)


def test_an_eager_and_a_captured_call_ask_the_same_three_things_once(comm, world):
    x = torch.ones(8)
    assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        for _ in range(2):
            assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH, "and no object of a stream or an event"
    assert len(graph) == 2 and comm._launcher.captured
    assert asked(world, lambda: comm.all_reduce(x)) == ONE_OF_EACH


def test_every_other_collective_asks_once_whether_it_is_captured(comm, world):
    x, y = torch.ones(8), torch.ones(8)
    for call in (lambda: comm.all_reduce(x, out=y), lambda: comm.all_gather(x, out=y), lambda: comm.broadcast(x, 0)):
        call()
        assert asked(world, call)["_cuda_isCurrentStreamCapturing"] == 1
        with world.capture(world.new_stream(torch.device("cuda", MINE))):
            assert asked(world, call)["_cuda_isCurrentStreamCapturing"] == 1


def test_a_repeated_launch_that_is_refused_loses_the_group(comm, world):
    fake = device_of(comm)
    comm.all_reduce(torch.ones(8))
    fake.failures[("cuLaunchKernel", fake.calls.count("cuLaunchKernel") + 1)] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(ResourceError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*Nothing was launched on rank 0"):
        comm.all_reduce(torch.ones(8))
    with pytest.raises(GroupAborted):
        comm.all_reduce(torch.ones(8))


def kept_and_used(call, calls=100):
    """Blocks and objects that are left after `calls`, and the most bytes that one of them has at a time."""
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


def test_a_call_leaves_no_object_and_asks_torch_for_no_memory():
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
