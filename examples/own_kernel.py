"""A Triton kernel of your own over symmetric memory: each rank passes its numbers on to the next one, in rounds.

torchrun --nproc-per-node 2 examples/own_kernel.py     on GPUs, or on a CPU
python examples/own_kernel.py                          under many schedules, without a GPU: is anything unordered?
"""

import os

import torch
import triton
import triton.language as tl
from common import LIMIT

import tricomm
from tricomm.kernels.primitives import set_flag, wait_flag


@triton.jit
def pass_on(
    group, x_ptr, out_ptr, data, flags, number, count, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Round `number`, from 1: `count` elements of x go to the next rank, and the rank before sends as many to out. One
    block. Word 0 of a rank's flags is the last round whose data it has got, word 1 the last one that the next rank has
    read.
    """
    NEXT: tl.constexpr = (RANK + 1) % WORLD_SIZE
    BEFORE: tl.constexpr = (RANK + WORLD_SIZE - 1) % WORLD_SIZE
    lane = tl.arange(0, BLOCK)
    mask = lane < count
    tl.store(data[NEXT] + lane, tl.load(x_ptr + lane, mask=mask), mask=mask)
    set_flag(flags[NEXT], number)
    if wait_flag(group, flags[RANK], number) == 0:  # else a rank is gone or the time is up: leave
        tl.store(out_ptr + lane, tl.load(data[RANK] + lane, mask=mask), mask=mask)
        set_flag(flags[BEFORE] + 1, number)
        wait_flag(group, flags[RANK] + 1, number)  # the next round may overwrite the data


def ring(comm: tricomm.Communicator) -> torch.Tensor:
    """Three rounds; returns what has arrived."""
    data, flags = comm.symmetric((64,), torch.float32), comm.symmetric((2,), torch.int64)
    arrived = torch.zeros(3, 50, device=comm.device)
    for number in (1, 2, 3):
        x = torch.arange(50.0, device=comm.device) + 1000 * comm.rank + 100 * number
        comm.launch(
            pass_on,
            1,
            comm.group_table,
            x,
            arrived[number - 1],
            data.peers,
            flags.peers,
            number,
            50,
            RANK=comm.rank,
            WORLD_SIZE=comm.world_size,
            BLOCK=64,
        )
    comm.synchronize()
    return arrived


if __name__ == "__main__":
    if "RANK" in os.environ:
        with tricomm.init("env://", timeout=LIMIT) as comm:
            print(f"rank {comm.rank}: {ring(comm)[:, 0].tolist()}", flush=True)
    else:
        report = tricomm.check(ring, world_size=2, schedules=20)
        print(report)
        assert report.ok
