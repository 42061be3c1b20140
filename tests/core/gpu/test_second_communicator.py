"""Two communicators on two streams: their calls are not ordered, and a graph of one runs during calls of the other."""

from __future__ import annotations

import torch

from tests.core.gpu.conftest import MINE, device_of, over
from tests.fake_cuda import OnFakeGpu
from tricomm import communicator
from tricomm.kernels import layout


def waits(world):
    return [line for line in world.log if " waits for " in line]


def test_calls_of_two_are_not_ordered_and_those_of_one_are(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE)) as comm, over(OnFakeGpu(world, MINE)) as second:
        a, b = (world.new_stream(torch.device("cuda", MINE)) for _ in range(2))
        x, y = torch.ones(8), torch.ones(8)
        with world.stream(a):
            comm.all_reduce(x)
            second.all_reduce(y)  # its next call is ordered after this one
        world.log.clear()
        with world.stream(a):
            comm.all_reduce(x)
        with world.stream(b):
            second.all_reduce(y)
        assert waits(world) == [f"{b} waits for {a}"], "the second communicator has changed its stream"
        world.log.clear()
        for _ in range(2):
            with world.stream(a):
                comm.all_reduce(x)
            with world.stream(b):
                second.all_reduce(y)
        assert waits(world) == [], "each communicator stays on its stream"


def test_a_graph_of_one_communicator_during_eager_calls_of_the_other_and_after_its_end(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE)) as comm, over(OnFakeGpu(world, MINE)) as second:
        x, y = torch.ones(8), torch.ones(8)
        comm.all_reduce(x)
        second.all_reduce(y)
        arena, words = second._group.arena, second._group.words
        with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
            second.all_reduce(y)
        assert device_of(second).launches[-1].words[2] == arena.bases[0], (
            "it only uses the second communicator's memory"
        )
        comm.all_reduce(x)
        for kernel in graph:
            kernel()
        assert [each._group.words[layout.ENDED] for each in (comm, second)] == [3, 3]
        second.close()
        assert arena.tensor(0, 0, (1,), torch.int64).numel() == 1, "the graph may run again: its memory stays"
        assert words[layout.ABORT]
        comm.all_reduce(x)
    for kept in communicator._kept:
        kept._group.control.close()
        kept._group.arena.close()
    communicator._kept.clear()
