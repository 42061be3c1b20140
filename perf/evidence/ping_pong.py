"""The kernel of the latency probe, as a user would write one: a word to another rank and back, again and again."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.primitives import get_ll, put_ll, signal, wait_sequence


@triton.jit
def ping_pong(group, table, bounds, rank, other, LEADS: tl.constexpr, LL: tl.constexpr, ROOM: tl.constexpr,
              LANES: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """The numbers from bounds[0] to bounds[1] - 1 to the other rank and back, one at a time.

    `table` has the address of every rank's memory (int64 [world_size][ROOM]), a room for each source. LL: as LL words,
    which carry their flag; else as words that are released and acquired, as headers are.
    """
    theirs = tl.multiple_of(tl.load(table + other).to(tl.pointer_type(tl.int64)), 16) + rank * ROOM
    mine = tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.int64)), 16) + other * ROOM
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
