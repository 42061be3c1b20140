"""A Triton kernel of your own over symmetric memory, with and without its bug (docs/own-kernels.md).

tricomm check examples/own_kernel.py:racy              the bug: a missing barrier
tricomm check examples/own_kernel.py:ring              without it
torchrun --nproc-per-node 2 examples/own_kernel.py     on GPUs, or on a CPU
python examples/own_kernel.py                          checks `ring` under 20 schedules
"""

import os
from datetime import timedelta
from functools import partial

import torch
import triton
import triton.language as tl

import tricomm
from tricomm.kernels.primitives import set_flag, wait_flag


@triton.jit
def shift(group, x, out, data, flags, number, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, SAFE: tl.constexpr):
    NEXT: tl.constexpr = (RANK + 1) % WORLD_SIZE
    BEFORE: tl.constexpr = (RANK + WORLD_SIZE - 1) % WORLD_SIZE
    lane = tl.arange(0, 64)
    tl.store(data[NEXT] + lane, tl.load(x + lane))  # into the next rank's memory
    if SAFE:
        set_flag(flags[NEXT], number)  # a barrier of the block, then a store with release
    else:
        tl.atomic_xchg(flags[NEXT], number, sem="release", scope="sys")
    if wait_flag(group, flags[RANK], number) == 0:  # else the group was aborted
        tl.store(out + lane, tl.load(data[RANK] + lane))
        set_flag(flags[BEFORE] + 1, number)  # the rank before may overwrite
        wait_flag(group, flags[RANK] + 1, number)


def ring(comm: tricomm.Communicator, safe: bool = True) -> torch.Tensor:
    data, flags = comm.symmetric((64,), torch.float32), comm.symmetric((2,), torch.int64)
    out = torch.empty(64, device=comm.device)
    ranks = {"RANK": comm.rank, "WORLD_SIZE": comm.world_size}
    for number in (1, 2):  # flags start at 0, and each launch writes a larger number
        x = torch.arange(64.0, device=comm.device) + 100 * comm.rank + number
        comm.launch(shift, 1, comm.group_table, x, out, data.peers, flags.peers, number, **ranks, SAFE=safe)
    comm.synchronize()
    return out


racy = partial(ring, safe=False)

if __name__ == "__main__":
    if "RANK" in os.environ:
        with tricomm.init("env://", timeout=timedelta(minutes=5)) as comm:
            print(f"rank {comm.rank}: {ring(comm)[0].item()} from the rank before", flush=True)
    else:
        report = tricomm.check(ring, world_size=2, schedules=20)
        print(report)
        assert report.ok
