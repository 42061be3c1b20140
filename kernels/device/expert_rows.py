"""The prologue of a mixture of experts: a token's row is the weighted sum of its experts' rows.

    row = sum over k of expert_rows[place(token, k)] * weight(token, k), in the order of k, then + shared[token]

All in fp32: each product and each sum is rounded to it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_rows(number, columns, inside, operands, SPEC: tl.constexpr):
    """Row `number` at `columns`, by the last nine of `operands` (`tricomm.core.fused.expert_rows`). A place that is
    outside the expert rows, such as -1, adds nothing."""
    shared, given = operands[-6], tl.zeros([], tl.int64) + operands[-4]
    total = tl.zeros(columns.shape, tl.float32)
    if SPEC.TOP_K > 0:
        total = _added(total, number, 0, columns, inside, operands, SPEC.TOP_K, SPEC)
    else:
        for first in range(0, operands[-1], 4):
            total = _added(total, number, first, columns, inside, operands, 4, SPEC)
    mask = _if(given & 4 != 0, columns, inside, SPEC)
    return total + tl.load(shared + number * SPEC.HIDDEN + columns, mask=mask, other=0).to(tl.float32)


@triton.jit
def _added(total, number, first, columns, inside, operands, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Add the next COUNT rows, from the `first` one on, to `total`; their loads are in flight together."""
    rows, places, weight, count = operands[-9], operands[-8], operands[-7], operands[-5]
    given, own, step, top_k = tl.zeros([], tl.int64) + operands[-4], operands[-3], operands[-2], operands[-1]
    parts, factors = (), ()
    for k in tl.static_range(COUNT):
        at = number * own + (first + k) * step
        there = (first + k) < top_k + given * 0
        place = tl.load(places + at, mask=there & (given & 1 != 0), other=0).to(tl.int64)
        place = tl.where(given & 1 != 0, place, at)
        there = there & (place >= 0) & (place < count)
        factor = tl.load(weight + at, mask=there & (given & 2 != 0), other=0).to(tl.float32)
        factors = factors + (tl.where(there & (given & 2 == 0), 1.0, factor),)
        start = tl.where(there, place, 0) * SPEC.HIDDEN
        parts = parts + (tl.load(rows + start + columns, mask=_if(there, columns, inside, SPEC), other=0),)
    for k in tl.static_range(COUNT):
        total += parts[k].to(tl.float32) * factors[k]
    return total


@triton.jit
def _if(condition, columns, inside, SPEC: tl.constexpr):
    """`inside` if the scalar `condition` is true, else False. The interpreter refuses such a scalar in a mask."""
    return inside & (columns < tl.where(condition, SPEC.HIDDEN, 0))
