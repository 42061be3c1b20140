"""Rank functions over a fake GPU, at module level so that a new process can import them."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from torch.distributed import FileStore

from tests.core.bodies.common_bodies import attempt, over
from tests.fake_cuda import OnFakeGpu, World
from tests.kernels.fake_launch import Result
from tricomm import Options, errors

LATE = 1.0  # seconds by which rank 0 is later than the others


@triton.jit
def fill(out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.full([N], 7.0, tl.float32))


@contextmanager
def on_fake_gpu(rank, world_size, url):
    """(communicator, world, device); the kernels are launched on a separate fake GPU for each rank."""
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        world.install(patch)
        runtime = OnFakeGpu(world, 0)
        store = FileStore(url.removeprefix("file://"), world_size)
        comm = over(runtime, store, rank, world_size, Options(arena_bytes=256 * 1024, timeout=60.0))
        comm.all_reduce(torch.ones(8))
        comm.barrier()
        yield comm, world, runtime.fake


def replays_after_close(rank, world_size, tell, url, how):
    """A replay of two captured calls: seconds, and what was in flight at the peer."""
    with on_fake_gpu(rank, world_size, url) as (comm, world, _):
        handle = comm.symmetric((8,), torch.float32)
        comm.all_reduce(handle, out=torch.zeros(8))
        with world.capture(world.new_stream("cuda:0")) as graph:
            comm.all_reduce(torch.ones(8))
            comm.all_reduce(handle, out=torch.zeros(8))
        comm.barrier()
        if how == "unprotected":
            comm._launcher.captured = False
        comm.close()
        comm.close()
        began = time.monotonic()
        if rank == 0:  # its peer replays no graph
            for node in graph:
                node()
        took = time.monotonic() - began
        try:
            comm.all_reduce(torch.ones(8))
        except errors.GroupAborted as error:
            return took, str(error)


def refused_on_one(rank, world_size, tell, url):
    """The driver refuses rank 0's launch; return each rank's error and the seconds after its call."""
    with on_fake_gpu(rank, world_size, url) as (comm, _, fake):
        x = torch.ones(8)
        if rank == 0:
            fake.failures[("cuLaunchKernel", fake.calls.count("cuLaunchKernel") + 1)] = Result.CUDA_ERROR_OUT_OF_MEMORY
            time.sleep(LATE)
        said = attempt(lambda: (comm.all_reduce(x), comm.synchronize()))
        comm.close()
    return said
