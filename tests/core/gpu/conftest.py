"""A communicator on one of two fake GPUs."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.fake_cuda import FakeDevice, OnFakeGpu, World
from tricomm import Communicator, Options, communicator
from tricomm.kernels import layout
from tricomm.options import digest_of
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.handshake import handshake

MINE, OTHER = 1, 0
CPU = torch.device("cpu")


@pytest.fixture
def world(monkeypatch):
    made = World()
    made.install(monkeypatch)
    yield made
    made.verify()


def over(runtime):
    """A group of one rank on the CPU's memory, whose kernels are launched on the fake GPU of `runtime`."""
    options = Options(arena_bytes=1 << 20, timeout=20.0)
    plan = layout.plan(1, options.arena_bytes)
    control = handshake(HashStore(), 0, 1, 20.0, digest_of(options, plan, "cpu"))
    return Communicator._over(control, open_arena(control, plan.nbytes, CPU, 20.0), plan, CPU, 20.0, options, runtime)


@pytest.fixture
def comm(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE)) as made:
        made.all_reduce(torch.ones(8))  # compiled and loaded
        made.all_reduce(torch.ones(8), async_op=True)
        yield made
    for kept in communicator._kept:  # of captured calls: no graph will run them again
        kept._group.control.close()
        kept._group.arena.close()
    communicator._kept.clear()


def device_of(comm) -> FakeDevice:
    return comm._group.runtime.fake
