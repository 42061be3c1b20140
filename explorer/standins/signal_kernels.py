"""The kernels of torch's barriers and signals. A sender changes a word of a signal pad from 0 to 1 (release), and its
receiver changes it from 1 to 0 (acquire)."""

import triton
import triton.language as tl


@triton.jit
def signals(
    pads, CHANNEL: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, STEPS: tl.constexpr
):
    """Signal the ranks from FIRST to before END (if bit 1 of STEPS is set), and take a signal of each (bit 2)."""
    for peer in tl.static_range(FIRST, END):
        if STEPS & 1:
            word = tl.load(pads + peer).to(tl.pointer_type(tl.int32)) + CHANNEL + RANK
            while tl.atomic_cas(word, 0, 1, sem="release", scope="sys") != 0:
                pass
    for peer in tl.static_range(FIRST, END):
        if STEPS & 2:
            word = tl.load(pads + RANK).to(tl.pointer_type(tl.int32)) + CHANNEL + peer
            while tl.atomic_cas(word, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit
def write(word, VALUE: tl.constexpr):
    """`cuStreamWriteValue32`: a system fence, and then the write."""
    tl.atomic_xchg(word, VALUE, sem="release", scope="sys")
