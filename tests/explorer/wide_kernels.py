"""An exchange of wide words over symmetric memory, as a user would write it, and a version with a mistake."""

import torch
import triton
import triton.language as tl

from tricomm.communicator import Communicator
from tricomm.kernels.wide_words import get_wide, plane_words, put_wide

BLOCK = 4


@triton.jit
def gather_sum(
    x_ptr,
    y_ptr,
    boxes,
    group,
    rank,
    epoch,
    words,
    FORM: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
):
    """y[0:words] = the sum of all ranks' x (int64). `boxes`: addresses of int64 [2][WORLD_SIZE][tiles][4 * BLOCK].

    Every block sends to the same block of all ranks in every epoch, even without payload, which shows that it has
    left the last epoch, so two boxes are enough. FORM is "wide", or a mistake: "one box" uses one box in every epoch.
    """
    lane = tl.arange(0, BLOCK)
    tile = tl.program_id(0)
    count = tl.minimum(words - tile * (3 * BLOCK), 3 * BLOCK)
    plane = plane_words(tl.maximum(count, 1), BLOCK)
    planes = ()
    for k in tl.static_range(3):
        at = k * plane + lane
        planes = planes + (tl.load(x_ptr + tile * (3 * BLOCK) + at, mask=(lane < plane) & (at < count), other=0),)
    room = tl.num_programs(0) * (4 * BLOCK)
    epoch = tl.zeros([], tl.int64) + epoch
    parity = 0 if FORM == "one box" else epoch & 1
    place = parity * WORLD_SIZE * room + tile * (4 * BLOCK)
    for step in tl.static_range(WORLD_SIZE):
        to = (rank + step) % WORLD_SIZE
        box = tl.load(boxes + to).to(tl.pointer_type(tl.int64)) + place + rank * room
        put_wide(box, planes, epoch, plane, BLOCK)
    mine = tl.load(boxes + rank).to(tl.pointer_type(tl.int64)) + place
    firsts, seconds, thirds, status = get_wide(group, mine, room, epoch, plane, WORLD_SIZE, BLOCK, PTX)
    if status == 0:
        y = y_ptr + tile * (3 * BLOCK)
        _store_sum(y, firsts, 0, plane, count, WORLD_SIZE, BLOCK)
        _store_sum(y, seconds, 1, plane, count, WORLD_SIZE, BLOCK)
        _store_sum(y, thirds, 2, plane, count, WORLD_SIZE, BLOCK)


@triton.jit
def _store_sum(y, parts, k: tl.constexpr, plane, count, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = parts[0]
    for r in tl.static_range(1, WORLD_SIZE):
        total += parts[r]
    lane = tl.arange(0, BLOCK)
    tl.store(y + k * plane + lane, total, mask=(lane < plane) & (k * plane + lane < count))


def sums(
    comm: Communicator,
    sizes: tuple[int, ...],
    form: str = "wide",
    tile: int = BLOCK,
    ptx: bool = False,
    first: int = 1,
    **options: int,
) -> list[torch.Tensor]:
    """`gather_sum` of int64 [size] for each size in turn from epoch `first`, compared with the expected sum."""
    tiles = max(-(-size // (3 * tile)) for size in sizes)
    boxes = comm.symmetric((2 * comm.world_size * tiles * 4 * tile,), torch.int64)
    boxes.local.zero_()
    comm.barrier()
    results = []
    for epoch, size in enumerate(sizes, first):
        parts = [part(epoch, rank, size) for rank in range(comm.world_size)]
        y = torch.full((size,), -99, dtype=torch.int64)
        args = (parts[comm.rank], y, boxes.table, comm.group_table, comm.rank, epoch, size)
        how = {"FORM": form, "WORLD_SIZE": comm.world_size, "BLOCK": tile, "PTX": ptx, **options}
        comm.launch(gather_sum, tiles, *args, **how)
        want = torch.stack(parts).sum(0)
        if not torch.equal(y, want):
            raise AssertionError(f"epoch {epoch}: {y.tolist()} instead of {want.tolist()}")
        results.append(y)
    return results


def part(epoch: int, rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
