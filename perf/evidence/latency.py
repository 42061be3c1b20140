"""The latency probe: two ranks exchange a word again and again, while the other ranks wait.

Half a round trip is the time from a store on one GPU until a poll on the other one sees it. The kernel is written as a
user would write one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import tricomm
from tricomm import Communicator, Options
from tricomm.kernels.primitives import get_ll, put_ll, signal, wait_sequence
from tricomm.perf.bench import timing
from tricomm.perf.evidence import hardware

_LANES = 32  # of one warp: a poll of `primitives` spans all threads
_BUFFER = 2 * _LANES  # words that a poll of LL words reads
WAYS = ("ll", "flag")


@triton.jit
def ping_pong(group, table, bounds, rank, other, LEADS: tl.constexpr, LL: tl.constexpr, BUFFER: tl.constexpr,
              LANES: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
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


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """One rank, a process of its own: emits the microseconds one way of every pair whose lower rank this is."""
    device = hardware.begin_rank(rank, data)
    options = Options(timeout=60.0, arena_bytes=1 << 20, nccl=False, share_device=data["one_gpu"])
    with tricomm.init(url, rank, world_size, device, options=options) as comm:
        buffers = {way: comm.symmetric((world_size, _BUFFER), torch.int64) for way in WAYS}
        for a, b in itertools.combinations(range(world_size), 2):
            for way in WAYS:
                comm.barrier()
                if rank in (a, b):
                    other = b if rank == a else a
                    samples = probe(comm, buffers[way].table, other, way, data["trips"], data["samples"])
                    if rank == a:
                        emit("pair", ranks=[a, b], way=way, samples=samples)
        comm.barrier()


def probe(comm: Communicator, table: torch.Tensor, other: int, way: str, trips: int, samples: int) -> list[float]:
    """Microseconds one way, one number per launch of `trips` round trips, after a launch that synchronizes the two."""
    sizes = {"BUFFER": _BUFFER, "LANES": _LANES, "num_warps": 1}
    options = {"LEADS": comm.rank < other, "LL": way == "ll", "PTX": not comm.simulated, **sizes}
    times, first = [], 1
    for _ in range(samples):
        edges = [first, first + -(-trips // 4), first + -(-trips // 4) + trips]
        first = edges[-1]
        bounds = torch.tensor([edges[:2], edges[1:]], dtype=torch.int64, device=comm.device)

        def run(row: torch.Tensor) -> None:
            comm.launch(ping_pong, 1, comm.group_table, table, row, comm.rank, other, **options)

        run(bounds[0])
        elapsed = timing.stopwatch(comm.device)
        run(bounds[1])
        times.append(elapsed() / trips / 2)
        comm.check()
    return times
