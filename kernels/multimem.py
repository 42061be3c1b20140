"""Reductions and stores in the switch: PTX `multimem` on an address that stands for the same place in all ranks'
memory.

A load returns the sum (or another reduction that the switch supports) of the ranks' values, a store writes to all of
them. So data that N ranks add leaves each GPU once instead of N - 1 times.

Places    A multicast pointer is a tuple: compiled, the one address that the driver mapped for all ranks' memory; under
          the interpreter, which has no switch, the ranks' addresses in rank order.
Width     16 bytes a thread: two neighbouring 64-bit words, for floats in one instruction. The switch has no vectors of
          integers, so integers take accesses of 8 or 4 bytes. A tile has at least two words per thread: with fewer, two
          threads would make the same access, and in place the later one would add the result of the other.
Order     Relaxed at `.sys`: a store arrives at different ranks at different times. Headers publish these stores as they
          do plain data. Plain accesses use another address of the same bytes, and PTX orders accesses by two addresses
          only with an alias fence between them (ALIASES of `primitives.barrier`).
Sums      `why_not_reduced` has the types and operations. The instruction requests sums of 16-bit floats in fp32. The
          switch chooses the order of additions and the rounding. One rank reduces a word and all ranks get its result,
          but a sum in rank order may have other bits. The interpreter adds in rank order and rounds once.
Offered   From sm_90 and Triton 3.9 on. Older Triton may duplicate inline assembly when it converts layouts, and a sum
          that the switch computes twice may have two values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tricomm.kernels import layout
from tricomm.kernels.group import peer_of, table_of
from tricomm.kernels.reduction import reduce_words
from tricomm.kernels.wide_words import FIRST_TRITON

FIRST_ARCHITECTURE = 90
MULTICAST = tl.constexpr(layout.MULTICAST)

_FLOATS = {"float32": "v4.f32", "float16": "acc::f32.v4.f16x2", "bfloat16": "acc::f32.v4.bf16x2"}
_INTEGERS = {
    "sum": ("add", "u"),
    "min": ("min", "s"),
    "max": ("max", "s"),
    "band": ("and", "b"),
    "bor": ("or", "b"),
    "bxor": ("xor", "b"),
}

_STORE = tl.constexpr(
    "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $4, 0; mov.b64 {a, b}, $2; mov.b64 {c, d}, $3; "
    "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {a, b, c, d}; mov.u32 $0, 0; }"
)


def why_not(architecture: int, version: str = triton.__version__) -> str | None:
    """None if `multimem` can be compiled for `architecture` (90 for sm_90) by this Triton, else the reason."""
    if architecture < FIRST_ARCHITECTURE:
        return f"sm_{architecture} has no multimem instructions; sm_90 or newer has"
    if tuple(int(n) for n in version.split(".")[:2]) < FIRST_TRITON:
        return f"Triton {version} may copy inline assembly, and the switch add twice; Triton 3.9 or newer works"
    return None


def why_not_reduced(element: str, op: str) -> str | None:
    """None if the switch reduces `element` by `op`, as `dtypes.reduction` names them, else the reason."""
    if (element in _FLOATS and op == "sum") or (element in ("int32", "int64") and op in _INTEGERS):
        return None
    return f"the switch has no {op} of {element}; it adds fp32, fp16 and bf16, and reduces 32-bit and 64-bit integers"


def instruction(element: str, op: str) -> str:
    """PTX that loads two reduced words, $0 and $1, from address $2 if $3 is not 0."""
    head = "multimem.ld_reduce.relaxed.sys.global"
    zeros = "mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;"
    registers, out = ".reg .b32 a, b, c, d;", "mov.b64 $0, {a, b}; mov.b64 $1, {c, d};"
    if element in _FLOATS:
        loads = f"@p {head}.add.{_FLOATS[element]} {{a, b, c, d}}, [$2];"
    else:
        name, sign = _INTEGERS[op]
        names, bits = ("abcd", 32) if element == "int32" else ("ab", 64)
        loads = " ".join(
            f"@p {head}.{name}.{sign}{bits} {register}, [$2 + {n * bits // 8}];" for n, register in enumerate(names)
        )
        if bits == 64:
            zeros, registers = "mov.b64 a, 0; mov.b64 b, 0;", ".reg .b64 a, b;"
            out = "mov.b64 $0, a; mov.b64 $1, b;"
    return f"{{ .reg .pred p; {registers} setp.ne.b32 p, $3, 0; {zeros} {loads} {out} }}"


@triton.jit
def everywhere(group, WORLD_SIZE: tl.constexpr, PTX: tl.constexpr):
    """A multicast pointer (int64*) to the heads of all ranks' arenas."""
    heads = ()
    if PTX:
        head = tl.load(table_of(group) + MULTICAST).to(tl.pointer_type(tl.int64))
        heads = heads + (tl.multiple_of(head, 16),)
    else:
        for rank in tl.static_range(WORLD_SIZE):
            heads = heads + (peer_of(group, rank, WORLD_SIZE),)
    return heads


@triton.jit
def everywhere_in(table, WORLD_SIZE: tl.constexpr, PTX: tl.constexpr):
    """A multicast pointer (int64*) to the beginning of symmetric memory on all ranks. `table` (int64*) has its address
    on each rank, followed by the multicast address."""
    heads = ()
    if PTX:
        heads = heads + (tl.multiple_of(tl.load(table + WORLD_SIZE).to(tl.pointer_type(tl.int64)), 16),)
    else:
        for rank in tl.static_range(WORLD_SIZE):
            heads = heads + (tl.load(table + rank).to(tl.pointer_type(tl.int64)),)
    return heads


@triton.jit
def load_reduced(pointers, first, count, SPEC: tl.constexpr):
    """The tile at word `first` of a run of `count` at a multicast pointer, reduced over the ranks: int64 [BLOCK].

    `pointers` are int64*, multiples of 16, `first` is even. Words are loaded in pairs. Words past the last pair that
    begins before `count` are undefined, and the second word of that pair has to be readable memory.
    """
    if SPEC.PTX:
        tl.static_assert(SPEC.BLOCK >= 2 * SPEC.LANES)
        pair = tl.arange(0, SPEC.BLOCK // 2)
        at = tl.multiple_of(pointers[0] + first, 16) + 2 * pair
        mask = (first + 2 * pair < count).to(tl.int32)
        low, high = tl.inline_asm_elementwise(
            SPEC.LOAD_REDUCED, "=l,=l,l,r", [at, mask], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
        )
        words = tl.reshape(tl.join(low, high), [SPEC.BLOCK])
    else:
        lane = tl.arange(0, SPEC.BLOCK)
        parts = ()
        for rank in tl.static_range(SPEC.WORLD_SIZE):
            mask = first + (lane // 2) * 2 < count
            parts = parts + (tl.load(pointers[rank] + first + lane, mask=mask, other=0),)
        words = reduce_words(parts, SPEC)
    return words


@triton.jit
def store_to_all(pointers, first, words, count, SPEC: tl.constexpr):
    """Store the tile `words` at word `first` of a run of `count` at a multicast pointer: to every rank, by pairs as
    `load_reduced`."""
    if SPEC.PTX:
        tl.static_assert(SPEC.BLOCK >= 2 * SPEC.LANES)
        pair = tl.arange(0, SPEC.BLOCK // 2)
        at = tl.multiple_of(pointers[0] + first, 16) + 2 * pair
        low, high = tl.split(tl.reshape(words, [SPEC.BLOCK // 2, 2]))
        tl.inline_asm_elementwise(
            _STORE,
            "=r,l,l,l,r",
            [at, low, high, (first + 2 * pair < count).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        lane = tl.arange(0, SPEC.BLOCK)
        for rank in tl.static_range(SPEC.WORLD_SIZE):
            tl.store(pointers[rank] + first + lane, words, mask=first + (lane // 2) * 2 < count)
