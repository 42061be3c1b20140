"""A Triton kernel with a mistake that tests on a GPU rarely show, and that the explorer finds in its first schedule:

tricomm check examples/racy_kernel.py:ring --timeline race.html
"""

import torch
import triton
import triton.language as tl

import tricomm
from tricomm.kernels.primitives import wait_flag


@triton.jit
def pass_on(group, x_ptr, out_ptr, data, flags, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Each rank passes 64 numbers on to the next rank."""
    NEXT: tl.constexpr = (RANK + 1) % WORLD_SIZE
    lane = tl.arange(0, 64)
    tl.store(data[NEXT] + lane, tl.load(x_ptr + lane))
    tl.atomic_xchg(flags[NEXT], 1, sem="relaxed", scope="sys")  # the mistake: `set_flag` releases the data first
    wait_flag(group, flags[RANK], 1)
    tl.store(out_ptr + lane, tl.load(data[RANK] + lane))


def ring(comm: tricomm.Communicator) -> torch.Tensor:
    data, flags = comm.symmetric((64,), torch.float32), comm.symmetric((1,), torch.int64)
    x, out = torch.full((64,), comm.rank + 1.0, device=comm.device), torch.zeros(64, device=comm.device)
    group = {"RANK": comm.rank, "WORLD_SIZE": comm.world_size}
    comm.launch(pass_on, 1, comm.group_table, x, out, data.peers, flags.peers, **group)
    comm.synchronize()
    return out


if __name__ == "__main__":
    print(tricomm.check(ring, world_size=3, schedules=20))
