"""Wide words: 16 bytes, of which 12 are payload and 4 the flag, each written and read by one 128-bit access.

    bit 0                 64          96         128
    │ word of plane 0 / 1 │ half word │   flag    │
                            of plane 2

Three planes, int64 [BLOCK] each, make a tile of 2 * BLOCK wide words: word i of plane 0 is stored with the low half of
word i of plane 2, word i of plane 1 with its high half. So 24 bytes of payload take 32 bytes, where LL words
(`primitives.put_ll`) take 48. All planes have the layout of a plain tile, so nothing is shuffled between threads.

Arrival   A wide word that carries the awaited flag is complete, because it is one access: `ld` and `st` of `.b128`,
          relaxed at `.sys` scope, which the PTX memory model sees as one operation (8.2.2; a `.v2.b64` is two). No
          fence and no barrier is needed. It orders no other word.
Reuse     As for LL words: none may be overwritten before its reader has read and acknowledged it. Memory in which wide
          words are polled holds nothing else, because payload of another format may look like a flag.
Offered   Compiled from Triton 3.9 and sm_75 on. Older Triton may duplicate inline assembly when it converts layouts;
          flag and payload may then be from two loads, a newer flag with an older payload. 3.6, 3.7 and 3.8 were not
          seen to do so with planes of this form, but nothing prevents it. Duplicated stores are harmless. Always
          available under the interpreter, where a wide word is one access of 16 bytes (`launch/interpreted_wide.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels.primitives import LOW, look, pause

FIRST_TRITON = (3, 9)
FIRST_ARCHITECTURE = 75
COMPILES = tl.constexpr(tuple(int(n) for n in triton.__version__.split(".")[:2]) >= FIRST_TRITON)

_STORE = tl.constexpr(
    "{ .reg .pred p; .reg .b128 w; setp.ne.b32 p, $4, 0; mov.b128 w, {$2, $3}; "
    "@p st.relaxed.sys.global.b128 [$1], w; mov.u32 $0, 0; }"
)
_LOAD = tl.constexpr("{ .reg .b128 w; ld.relaxed.sys.global.b128 w, [$2]; mov.b128 {$0, $1}, w; }")


def why_not(architecture: int, version: str = triton.__version__) -> str | None:
    """None if wide words can be compiled for `architecture` (90 for sm_90) by this Triton, else the reason."""
    if architecture < FIRST_ARCHITECTURE:
        return f"sm_{architecture} has no 128-bit relaxed accesses in Triton's PTX; sm_75 or newer works"
    if tuple(int(n) for n in version.split(".")[:2]) < FIRST_TRITON:
        return f"Triton {version} may take flag and payload of a 16-byte word from two loads; Triton 3.9 or newer works"
    return None


@triton.jit
def store_wide(pointer, low, high, mask):
    """Store `low` and `high` (int64 tiles) as one 16-byte access each at `pointer` (int64*, multiples of 16)."""
    tl.inline_asm_elementwise(
        _STORE, "=r,l,l,l,r", [pointer, low, high, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_wide(pointer):
    """The halves (two int64 tiles) of the 16 bytes at each `pointer` (int64*, multiples of 16), one access each."""
    tl.static_assert(COMPILES, "wide words need Triton 3.9 or newer: older ones may copy inline assembly")
    low, high = tl.inline_asm_elementwise(
        _LOAD, "=l,=l,l", [pointer], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
    )
    return low, high


@triton.jit
def plane_words(count, BLOCK: tl.constexpr):
    """int32: words of a plane of the tile that carries `count` payload words, at most a full tile: plane k begins at
    word k * plane_words. An even number, so that planes of an aligned run are aligned."""
    carried = tl.maximum(tl.minimum(count, 3 * BLOCK), 0).to(tl.int32)
    return tl.minimum((carried + 5) // 6 * 2, BLOCK)


@triton.jit
def slots(BLOCK: tl.constexpr):
    """The place of each lane's wide word, in 64-bit words: even lanes first, then the odd ones. A thread has two
    neighbours of a plane, loaded in one access of 16 bytes. With this order it stores each next to a word of the
    neighbouring thread, so each store instruction of a warp fills whole sectors."""
    lane = tl.arange(0, BLOCK)
    return 2 * ((lane & 1) * (BLOCK // 2) + (lane >> 1))


@triton.jit
def put_wide(pointer, planes, flag, count, BLOCK: tl.constexpr):
    """Push the first `count` words of each of three `planes` (int64 [BLOCK]) with the 32-bit `flag`.

    `pointer` is int64*, 16-byte aligned; the tile takes 32 * BLOCK bytes of the mailbox. BLOCK is 2 or more. Pairs with
    `get_wide`.
    """
    mask = tl.arange(0, BLOCK) < count
    at = pointer + slots(BLOCK)
    top = (tl.zeros([BLOCK], tl.int64) + flag) << 32  # for a `flag` of any type
    store_wide(at, planes[0], (planes[2] & LOW) | top, mask)
    store_wide(at + 2 * BLOCK, planes[1], ((planes[2] >> 32) & LOW) | top, mask)


@triton.jit
def clear_wide(pointer, count, BLOCK: tl.constexpr):
    """Zero the first `count` wide words, at most BLOCK, from `pointer` (int64*, 16-byte aligned) on."""
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.int64)
    store_wide(pointer + 2 * lane, zeros, zeros, lane < count)


@triton.jit
def see_wide(pointer, flag, BLOCK: tl.constexpr):
    """Load the place of a tile once: (a tuple of three planes, int32 [BLOCK]: 1 where a wide word does not have
    `flag`).

    `flag` is int32, or a tile of it. Without a mask: there is room for a whole tile, and extra words are ignored.
    """
    at = pointer + slots(BLOCK)
    first, low = load_wide(at)
    second, high = load_wide(at + 2 * BLOCK)
    old = ((low >> 32).to(tl.int32) != flag) | ((high >> 32).to(tl.int32) != flag)
    return (first, second, (low & LOW) | (high << 32)), old.to(tl.int32)


@triton.jit
def get_wide(group, pointer, room, flag, count, SOURCES: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Poll SOURCES places in this rank's memory at once until the first `count` words of the planes of each carry
    `flag`.

    `pointer` (int64*, 16-byte aligned) is the first place, `room` the distance to the next one in 64-bit words. Returns
    (planes 0, planes 1, planes 2, status): each a tuple of SOURCES int64 [BLOCK] tiles, in which words from `count` on
    are undefined. Pairs with `put_wide`. All loads of a round are in flight together, and one reduction ends it; `look`
    bounds the wait.
    """
    expected = tl.arange(0, BLOCK) < count
    awaited = (tl.zeros([BLOCK], tl.int64) + flag).to(tl.int32)
    firsts = ()
    for _ in tl.static_range(SOURCES):
        firsts = firsts + (tl.zeros([BLOCK], tl.int64),)
    seconds = firsts
    thirds = firsts
    missing = 1
    spins = 0
    while missing == 1:
        late = expected & False
        some, others, halves = (), (), ()
        for source in tl.static_range(SOURCES):
            planes, old = see_wide(pointer + source * room, awaited, BLOCK)
            late |= expected & (old != 0)
            some = some + (planes[0],)
            others = others + (planes[1],)
            halves = halves + (planes[2],)
        firsts, seconds, thirds = some, others, halves
        missing = tl.max(late.to(tl.int32) | look(group, spins, late, PTX), axis=0)
        spins += 1
        pause(spins)
    return firsts, seconds, thirds, missing & 2
