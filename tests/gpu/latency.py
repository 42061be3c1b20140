"""The latency probe: two ranks exchange a word again and again, while the other ranks wait.

Half a round trip is the time from a store on one GPU until a poll on the other one sees it. The kernel is written as a
user would write one.
"""

import itertools

import torch
import triton
import triton.language as tl

from tests.gpu.gpu_limits import stopwatch
from tricomm.kernels.primitives import get_ll, put_ll, signal, wait_sequence

LANES = 32  # of one warp: a poll of `primitives` spans all threads
BUFFER = 2 * LANES  # words that a poll of LL words reads
WAYS = ("ll", "flag")


@triton.jit
def ping_pong(
    group,
    table,
    bounds,
    rank,
    other,
    LEADS: tl.constexpr,
    LL: tl.constexpr,
    BUFFER: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Exchange the numbers from bounds[0] to bounds[1] - 1 with the other rank, one at a time.

    `table` has the address of every rank's memory (int64 [world_size][BUFFER]), a buffer for each source. With LL the
    words carry their flag; without it they are released and acquired, as headers are.
    """
    theirs = tl.multiple_of(tl.load(table + other).to(tl.pointer_type(tl.int64)), 16) + rank * BUFFER
    mine = tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.int64)), 16) + other * BUFFER
    lane = tl.arange(0, LANES)
    number = tl.load(bounds)
    last = tl.load(bounds + 1)
    status = 0
    while (number < last) & (status == 0):
        if LEADS:
            _send(theirs, number, lane, LL, LANES, PTX)
            status = _receive(group, mine, number, lane, LL, LANES, PTX)
        else:
            status = _receive(group, mine, number, lane, LL, LANES, PTX)
            _send(theirs, number, lane, LL, LANES, PTX)
        number += 1


@triton.jit
def _send(pointer, number, lane, LL: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    if LL:
        put_ll(pointer, number + lane, number, 1, LANES, PTX)
    else:
        signal(pointer + lane, (number << 32) + lane, lane == 0, True, PTX)


@triton.jit
def _receive(group, pointer, number, lane, LL: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    if LL:
        words, status = get_ll(group, pointer, 0, number, 1, 1, LANES, PTX)
    else:
        words, status = wait_sequence(group, pointer + lane, number, lane == 0, PTX)
    return status


def of_pairs(comm, trips, samples):
    """Microseconds one way of every pair whose lower rank this is, by (pair, way)."""
    buffers = {way: comm.symmetric((comm.world_size, BUFFER), torch.int64) for way in WAYS}
    times = {}
    for pair in itertools.combinations(range(comm.world_size), 2):
        for way in WAYS:
            comm.barrier()
            if comm.rank in pair:
                other = pair[1 - pair.index(comm.rank)]
                measured = probe(comm, buffers[way].table, other, way, trips, samples)
                times |= {(pair, way): measured} if comm.rank == pair[0] else {}
    comm.barrier()
    return times


def probe(comm, table, other, way, trips, samples):
    """Microseconds one way, one number per launch of `trips` round trips, after a launch that synchronizes the two."""
    sizes = {"BUFFER": BUFFER, "LANES": LANES, "num_warps": 1}
    options = {"LEADS": comm.rank < other, "LL": way == "ll", "PTX": not comm.simulated, **sizes}
    times, first = [], 1
    for _ in range(samples):
        edges = [first, first + -(-trips // 4), first + -(-trips // 4) + trips]
        first = edges[-1]
        bounds = torch.tensor([edges[:2], edges[1:]], dtype=torch.int64, device=comm.device)

        def run(row):
            comm.launch(ping_pong, 1, comm.group_table, table, row, comm.rank, other, **options)

        run(bounds[0])
        elapsed = stopwatch(comm.device)
        run(bounds[1])
        times.append(elapsed() / trips / 2)
        comm.check()
    return times
