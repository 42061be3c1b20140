"""Words of 64 bits as two int32 tiles, split and joined without instructions, because a GPU's registers have 32 bits.

Written with shifts, the compiler would not always recognise that these are moves, above all in polling loops. So there
is a variant in inline PTX, and one in pure `tl` for the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.reduction import element

_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def halves(words, PTX: tl.constexpr):
    """The lower and upper halves of an int64 tile, as two int32 tiles."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            "mov.b64 {$0, $1}, $2;", "=r,=r,l", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    return low, high


@triton.jit
def joined(parts, PTX: tl.constexpr):
    """The inverse of `halves`."""
    low, high = parts
    if PTX:
        words = tl.inline_asm_elementwise(
            "mov.b64 $0, {$1, $2};", "=l,r,r", [low, high], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        words = (low.to(tl.int64) & _LOW) | (high.to(tl.int64) << 32)
    return words


@triton.jit
def number_of(parts, j: tl.constexpr, ELEMENT: tl.constexpr, BITS: tl.constexpr):
    """Element j of each word, in fp32; `parts` are the words' `halves`."""
    HALF: tl.constexpr = 32 // BITS
    return element(parts[j // HALF], j % HALF, ELEMENT, BITS)
