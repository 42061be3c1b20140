"""Tiles of the LL protocols: load them from a user's tensor, push, poll and reduce them.

A tile is a tuple of PLANES int64 planes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.device.arrival import poll_words
from tricomm.kernels.device.reduction import reduce_words
from tricomm.kernels.primitives import put_ll


@triton.jit
def plane_start(left, k: tl.constexpr, SPEC: tl.constexpr):
    """Words from the first of a tile to the first of its plane k."""
    return k * SPEC.BLOCK


@triton.jit
def put_planes(pointer, tile, flag, left, SPEC: tl.constexpr):
    """Push the first `left` words of a tile."""
    put_ll(pointer, tile[0], flag, left, SPEC.BLOCK, SPEC.PTX)


@triton.jit
def reduce_planes(tiles, SPEC: tl.constexpr):
    """The sum of a tuple of WORLD_SIZE tiles."""
    parts = ()
    for r in tl.static_range(SPEC.WORLD_SIZE):
        parts = parts + (tiles[r][0],)
    return (reduce_words(parts, SPEC),)


@triton.jit
def poll_planes(chunk, pointers, lefts, COUNT: tl.constexpr, MEET: tl.constexpr, SPEC: tl.constexpr):
    """As `poll_words`, of tiles."""
    words, status = poll_words(chunk, pointers, lefts, COUNT, MEET, SPEC)
    tiles = ()
    for n in tl.static_range(COUNT):
        tiles = tiles + ((words[n],),)
    return tiles, status
