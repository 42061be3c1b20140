"""Push all-gather with a flag that is the number of the call.

Modelled on Triton-distributed's low-latency kernels: two rooms are used in turn and never reset. A rank that sends in
call e + 2 has received from all ranks in call e + 1.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.explorer.public.common import INT, Mistake, gathers, races, run
from tricomm import Communicator


@triton.jit
def push_gather(
    x_ptr,
    out_ptr,
    rooms,
    flags,
    rank,
    call,
    n,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BUG: tl.constexpr,
):
    """Block b of each rank sends every peer its share of the numbers, then the flag; waits for the peers' block b."""
    block = tl.program_id(0)
    room = 0 if BUG == "one room" else call & 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at <= n if BUG == "one too many" else at < n
    flag = 1 if BUG == "flag without epoch" else call + 1
    slot = (room * WORLD + rank) * tl.num_programs(0) + block
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    for other in tl.static_range(WORLD):
        if BUG == "flag before the data":
            tl.debug_barrier()
            tl.atomic_xchg(flags[other] + slot, flag, sem="release", scope="sys")
        source = other if BUG == "wrong room" else rank
        tl.store(rooms[other] + (room * WORLD + source) * n + at, x, mask=mask)  # @ push data
    if BUG != "no barrier before the flag":
        tl.debug_barrier()
    for other in tl.static_range(WORLD):
        if BUG == "relaxed flag":
            tl.atomic_xchg(flags[other] + slot, flag, sem="relaxed", scope="sys")
        elif BUG == "plain flag":
            tl.store(flags[other] + slot, flag)  # @ push plain flag
        elif BUG != "flag before the data":
            tl.atomic_xchg(flags[other] + slot, flag, sem="release", scope="sys")  # @ push flag
    for other in tl.static_range(WORLD):
        if rank == other:
            lane = tl.arange(0, LANES)
            mine = flags[other] + (room * WORLD + lane % WORLD) * tl.num_programs(0) + block
            none = tl.zeros([LANES], tl.int32)
            late = 1
            while late != 0:
                if BUG == "plain poll":
                    seen = tl.load(mine, volatile=True)  # @ push plain poll
                elif BUG == "relaxed poll":
                    seen = tl.atomic_add(mine, none, sem="relaxed", scope="sys")
                elif BUG == "gpu poll":
                    seen = tl.atomic_add(mine, none, sem="acquire", scope="gpu")  # @ push gpu poll
                else:
                    seen = tl.atomic_add(mine, none, sem="acquire", scope="sys")  # @ push poll
                missing = seen != flag
                if BUG == "waits for all but one":
                    missing = missing & (lane % WORLD != WORLD - 1)
                late = tl.max(missing.to(tl.int32), axis=0)
            if BUG != "no barrier after the poll":
                tl.debug_barrier()
            for sender in tl.static_range(WORLD):
                got = tl.load(rooms[other] + (room * WORLD + sender) * n + at, mask=at < n)  # @ push read
                tl.store(out_ptr + sender * n + at, got, mask=at < n)


def push_gathers(bug: str = "", blocks: int = 2, calls: int = 3, n: int = 7) -> Callable[[Communicator], Any]:
    def fn(comm: Communicator) -> list[torch.Tensor]:
        rank, world = comm.rank, comm.world_size
        rooms, flags = comm.symmetric((2, world, n), INT).peers, comm.symmetric((2, world, blocks), INT).peers
        lanes = triton.next_power_of_2(world)

        def launch(x: torch.Tensor, out: torch.Tensor, call: int) -> None:
            run(comm, push_gather, blocks, x, out, rooms, flags, rank, call, n, LANES=lanes, bug=bug)

        return gathers(comm, calls, n, launch)

    return fn


MISTAKES = (
    *races(
        "push data, push read",
        "relaxed flag; relaxed poll; plain poll; no barrier before the flag; no barrier after the poll; "
        "flag without epoch; one room",
    ),
    Mistake("plain flag", 2, "race", pairs=("push plain flag, push poll",)),
    Mistake("gpu poll", 2, "scope", pairs=("push flag, push gpu poll",)),
    Mistake("flag before the data", 2, "race uninitialised", pairs=("push data, push read",), lone=("push read",)),
    Mistake("wrong room", 2, "race uninitialised", pairs=("push data, push data",), lone=("push read",)),
    Mistake("one too many", 2, "race out_of_bounds", pairs=("push data, push data", "push data, push read")),
    Mistake("waits for all but one", 2, "race uninitialised", pairs=("push data, push read",), lone=("push read",)),
)
