"""A communicator on one of two fake GPUs."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.core.bodies import common_bodies
from tests.fake_cuda import FakeDevice, OnFakeGpu, World
from tricomm import Options, communicator

MINE, OTHER = 1, 0


@pytest.fixture
def world(monkeypatch):
    made = World()
    made.install(monkeypatch)
    yield made
    made.verify()


def over(runtime, **settings):
    """A group of one rank, whose kernels are launched on the fake GPU of `runtime`."""
    return common_bodies.over(runtime, HashStore(), 0, 1, Options(arena_bytes=1 << 20, timeout=20.0, **settings))


@pytest.fixture
def comm(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE)) as made:
        made.all_reduce(torch.ones(8))  # compiled and loaded
        made.all_reduce(torch.ones(8), async_op=True)
        yield made
    for kept in communicator._kept:  # memory of captured calls, whose graphs are not replayed any more
        kept._group.control.close()
        kept._group.arena.close()
    communicator._kept.clear()


def device_of(comm) -> FakeDevice:
    return comm._group.runtime.fake
