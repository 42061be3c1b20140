"""Channels on a GPU's launch path: streams of two channels are not ordered, a graph keeps its channel."""

from __future__ import annotations

import pytest
import torch

import tricomm
from tests.core.gpu.conftest import MINE, device_of, over
from tests.fake_cuda import OnFakeGpu
from tricomm import communicator
from tricomm.kernels import layout


@pytest.fixture
def comm(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE), channels=2) as made:
        for number in (0, 1):
            made.channel(number).all_reduce(torch.ones(8))  # compiled and loaded
        yield made
    for kept in communicator._kept:
        kept._group.control.close()
        kept._group.arena.close()
    communicator._kept.clear()


def streams(world):
    return [world.new_stream(torch.device("cuda", MINE)) for _ in range(2)]


def waits(world):
    return [line for line in world.log if " waits for " in line]


def test_calls_of_two_channels_are_not_ordered_and_those_of_one_are(comm, world):
    (a, b), x, y = streams(world), torch.ones(8), torch.ones(8)
    with world.stream(a):
        comm.all_reduce(x)
        comm.channel(1).all_reduce(y)  # the next one of its channel is ordered behind this one
    world.log.clear()
    with world.stream(a):
        comm.all_reduce(x)
    with world.stream(b):
        comm.channel(1).all_reduce(y)
    assert waits(world) == [f"{b} waits for an event on {a}"], "channel 1 has changed its stream"
    world.log.clear()
    for _ in range(2):
        with world.stream(a):
            comm.all_reduce(x)
        with world.stream(b):
            comm.channel(1).all_reduce(y)
    assert waits(world) == [], "each channel stays on its stream"


def test_functions_side_by_side_have_a_stream_each_between_what_was_and_what_comes(comm, world):
    here = world.current_stream()
    world.log.clear()
    before = len(device_of(comm).launches)
    x, y = torch.ones(8), torch.ones(8)
    comm.side_by_side(lambda: comm.all_reduce(x), lambda: comm.channel(1).all_reduce(y))
    first, second = (launch.stream for launch in device_of(comm).launches[before:])
    assert len({first, second, here.cuda_stream}) == 3
    behind = [line for line in waits(world) if line.startswith(f"{here} ")]
    assert len(behind) == 2 and len(waits(world)) == 6, "two fork, two change the stream of their channel, two join"


class Kept(torch.Tensor):
    """A result on the GPU, which notes the streams that its memory waits for before it is used again."""

    device = torch.device("cuda", MINE)

    def record_stream(self, stream):
        self.streams = [*getattr(self, "streams", []), stream]


def test_results_belong_to_the_stream_of_the_caller_too_and_no_capture_is_split(comm, world):
    here, result = world.current_stream(), torch.ones(3).as_subclass(Kept)
    [observed, *_] = comm.side_by_side(lambda: {"a": [result]}, lambda: None)
    assert observed["a"][0] is result and result.streams == [here]
    with world.capture(streams(world)[0]), pytest.raises(tricomm.InvalidArgument, match="captures a CUDA graph"):
        comm.side_by_side(lambda: comm.all_reduce(torch.ones(8)))
    comm.all_reduce(torch.ones(8))


def test_a_graph_keeps_its_channel_beside_eager_calls_and_after_the_end(comm, world):
    x, y = torch.ones(8), torch.ones(8)
    memory, arena = comm.arena_layout, comm._group.arena
    eager = device_of(comm).launches[-2]
    with world.capture(streams(world)[0]) as graph:
        comm.channel(1).all_reduce(y)
    captured = device_of(comm).launches[-1]
    comm.all_reduce(x)
    tables = [launch.words[2] for launch in (eager, captured)]
    assert tables == [arena.bases[0], arena.bases[0] + memory.slice], "the group table, and all else, of its own slice"
    for kernel in graph:
        kernel()
    assert comm._channels.captured and not comm._launcher.captured
    control = comm._group.control
    assert [control.sequence(0, number) for number in (0, 1)] == [2, 2]
    assert [group.words[layout.ENDED] for group in comm._group.channels] == [3, 3]
    comm.close()
    assert arena.tensor(0, 0, (1,), torch.int64).numel() == 1, "the graph may run again: its memory stays"
    assert all(group.words[layout.ABORT] for group in comm._group.channels)


def test_a_call_that_no_kernel_takes_is_named_with_the_channel_that_can(comm):
    with pytest.raises(tricomm.InvalidArgument, match="channel 1 runs the kernels alone: give this call to channel 0"):
        comm.channel(1).all_reduce(torch.ones(4, dtype=torch.complex64), op="max")
    choice = comm.channel(1).explain("all_reduce", nbytes=1 << 30)
    assert choice.blocks <= comm.most_blocks
