"""The prologue of a mixture of experts: a token's row is the weighted sum of its experts' rows.

    row = sum over k of expert_rows[place(token, k)] * weight(token, k), in the order of k, then + shared[token]

All in fp32: each product and each sum is rounded to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_AT_ONCE = tl.constexpr(4)  # expert rows that are in flight together


@triton.jit
def expert_rows(number, columns, inside, operands, SPEC: tl.constexpr):
    """Row `number` at `columns`, by the last nine of `operands` (`tricomm.core.fused.expert_rows`). A place that is
    outside the expert rows, such as -1, adds nothing."""
    rows, index, weight, shared = operands[-9], operands[-8], operands[-7], operands[-6]
    count, given = operands[-5], tl.zeros([], tl.int64) + operands[-4]
    own, step, top_k = operands[-3], operands[-2], operands[-1]
    total = tl.zeros(columns.shape, tl.float32)
    for first in range(0, top_k, _AT_ONCE):
        for k in tl.static_range(_AT_ONCE):
            at = number * own + (first + k) * step
            there = (first + k) < top_k + given * 0
            place = tl.load(index + at, mask=there & (given & 1 != 0), other=0).to(tl.int64)
            place = tl.where(given & 1 != 0, place, at)
            there = there & (place >= 0) & (place < count)
            factor = tl.load(weight + at, mask=there & (given & 2 != 0), other=0).to(tl.float32)
            factor = tl.where(there & (given & 2 == 0), 1.0, factor)
            start = tl.where(there, place, 0) * SPEC.HIDDEN
            part = tl.load(rows + start + columns, mask=_if(there, columns, inside, SPEC), other=0)
            total += part.to(tl.float32) * factor
    mask = _if(given & 4 != 0, columns, inside, SPEC)
    return total + tl.load(shared + number * SPEC.HIDDEN + columns, mask=mask, other=0).to(tl.float32)


@triton.jit
def _if(condition, columns, inside, SPEC: tl.constexpr):
    """`inside` if a condition, a scalar, is true. The interpreter takes no scalar of comparisons in a mask."""
    return inside & (columns < tl.where(condition, SPEC.HIDDEN, 0))
