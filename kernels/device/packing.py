"""Elements and 64-bit words: load them from a user's tensor, store them back.

All kernels move payload as int64 tiles, whatever the element type: 8 // itemsize elements a word, element i of the
tensor in word i // PACK. The format in a mailbox therefore never depends on how a user's tensor is aligned; only the
loads and stores here do (`ALIGNED`, a fact that one rank may know alone).

Widths: the body runs in full tiles without a mask, 16 bytes an access. A mask whose bound is not known to be a multiple
of 16 would halve or quarter the width of every access, so the tail is handled separately, element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_mask(first, count, BLOCK: tl.constexpr):
    """True for the words of the tile that starts at word `first` of a run of `count` words."""
    return first + tl.arange(0, BLOCK) < count


@triton.jit
def shard_words(count, WORLD_SIZE: tl.constexpr):
    """Words of a rank's shard of `count` words: an even number, so that every shard starts 16-byte aligned."""
    return tl.cdiv(count, 2 * WORLD_SIZE) * 2


@triton.jit
def end_of(words, numel, PACK: tl.constexpr):
    """Elements before word `words`, at most `numel`: where a shard ends that ends at that word."""
    return tl.minimum(words * PACK, numel)


@triton.jit
def member(table, rank, like):
    """Pointer of `like`'s type to `rank`'s symmetric memory: its address in `table` (int64*), a multiple of 16."""
    return tl.load(table + rank).to(like.dtype)


@triton.jit
def load_words(x_ptr, first, numel, BLOCK: tl.constexpr, ALIGNED):
    """Words first .. first + BLOCK of the elements x_ptr[0:numel], as int64 [BLOCK]; zeros past the end."""
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    index = first + tl.arange(0, BLOCK)
    full = ((first + BLOCK) * PACK <= numel) & ALIGNED
    words = tl.zeros([BLOCK], tl.int64)
    if full:
        # The alignment hint is for a pointer that this function computes: on an integer or an argument it would be
        # lost.
        wide = tl.multiple_of(x_ptr.to(tl.pointer_type(tl.int64)) + first, 16)
        words = tl.load(wide + tl.arange(0, BLOCK))
    else:
        for j in range(PACK):  # unrolled late, because each load slows down Triton's early passes
            at = index * PACK + j
            part = tl.load(raw_pointer(x_ptr, BITS) + at, mask=at < numel, other=0).to(tl.int64)
            if PACK > 1:
                part = (part & ((1 << BITS) - 1)) << (BITS * j)
            words |= part
    return words


@triton.jit
def store_words(y_ptr, first, words, numel, BLOCK: tl.constexpr, ALIGNED):
    """The inverse of `load_words`: store the elements of `words` that are in y_ptr[0:numel]."""
    BITS: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    index = first + tl.arange(0, BLOCK)
    full = ((first + BLOCK) * PACK <= numel) & ALIGNED
    if full:
        wide = tl.multiple_of(y_ptr.to(tl.pointer_type(tl.int64)) + first, 16)
        tl.store(wide + tl.arange(0, BLOCK), words)
    else:
        raw = raw_pointer(y_ptr, BITS)
        for j in tl.static_range(PACK):
            at = index * PACK + j
            tl.store(raw + at, (words >> (BITS * j)).to(raw.dtype.element_ty), mask=at < numel)


@triton.jit
def load_elements(x_ptr, first, numel, BLOCK: tl.constexpr, STEP: tl.constexpr = 1):
    """`load_words` element by element, for tiles of several planes; of every STEP words one. The loop increments the
    pointer:

    if it computed each address in place, Triton's early passes would visit the whole computation for each load, which
    doubles their time for a kernel with three planes of eight ranks.
    """
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    at = (first + tl.arange(0, BLOCK) * STEP) * PACK
    elements = raw_pointer(x_ptr, BITS) + at
    words = tl.zeros([BLOCK], tl.int64)
    for j in range(PACK):
        part = tl.load(elements, mask=at < numel, other=0).to(tl.int64)
        if PACK > 1:
            part = (part & ((1 << BITS) - 1)) << (BITS * j)
        words |= part
        elements += 1
        at += 1
    return words


@triton.jit
def store_elements(y_ptr, first, words, numel, BLOCK: tl.constexpr, STEP: tl.constexpr = 1):
    """The inverse of `load_elements`."""
    BITS: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth
    PACK: tl.constexpr = 64 // BITS
    at = (first + tl.arange(0, BLOCK) * STEP) * PACK
    elements = raw_pointer(y_ptr, BITS) + at
    for j in range(PACK):
        tl.store(elements, (words >> (BITS * j)).to(elements.dtype.element_ty), mask=at < numel)
        elements += 1
        at += 1


@triton.jit
def raw_pointer(pointer, BITS: tl.constexpr):
    """`pointer` as one to integers of BITS."""
    RAW: tl.constexpr = tl.int64 if BITS == 64 else (tl.int32 if BITS == 32 else (tl.int16 if BITS == 16 else tl.int8))
    return pointer.to(tl.pointer_type(RAW))


@triton.jit
def load_tile(buffer, first, count, BLOCK: tl.constexpr):
    """The tile at word `first` of `count` words in a buffer of the `simple` mailbox (int64*, aligned)."""
    at = tl.multiple_of(buffer + first, 16) + tl.arange(0, BLOCK)
    words = tl.zeros([BLOCK], tl.int64)
    if first + BLOCK <= count:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=tile_mask(first, count, BLOCK), other=0)
    return words


@triton.jit
def load_tiles(buffers, first, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`load_tile` from each of a tuple of COUNT buffers, in one branch, so that all loads are in flight at once."""
    if first + BLOCK <= count:
        tiles = ()
        for n in tl.static_range(COUNT):
            tiles = tiles + (tl.load(tl.multiple_of(buffers[n] + first, 16) + tl.arange(0, BLOCK)),)
    else:
        tiles = ()
        for n in tl.static_range(COUNT):
            tiles = tiles + (load_tile(buffers[n], first, count, BLOCK),)
    return tiles


@triton.jit
def store_tile(buffer, first, words, count, BLOCK: tl.constexpr):
    """Store a tile of words in a buffer of a `simple` mailbox, of this rank or a peer."""
    at = tl.multiple_of(buffer + first, 16) + tl.arange(0, BLOCK)
    if first + BLOCK <= count:
        tl.store(at, words)
    else:
        tl.store(at, words, mask=tile_mask(first, count, BLOCK))


@triton.jit
def whole_tile(first, count, start, numel, like, BLOCK: tl.constexpr, ALIGNED):
    """True if the tile at word `first` of a run of `count` words is full and entirely inside like[0:numel].

    The run begins at word `start` of the tensor `like`; `ALIGNED` says that its words are 16-byte aligned.
    """
    PACK: tl.constexpr = 64 // like.dtype.element_ty.primitive_bitwidth
    return (first + BLOCK <= count) & ((start + first + BLOCK) * PACK <= numel) & ALIGNED


@triton.jit
def move_tiles(sources, targets, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the full tile at word `first` of each of COUNT sources to the same word of its target.

    Both are tuples of int64*, 16-byte aligned. All tiles are loaded before one is stored, so that COUNT loads are in
    flight at once.
    """
    words = ()
    for n in tl.static_range(COUNT):
        words = words + (tl.load(tl.multiple_of(sources[n] + first, 16) + tl.arange(0, BLOCK)),)
    for n in tl.static_range(COUNT):
        tl.store(tl.multiple_of(targets[n] + first, 16) + tl.arange(0, BLOCK), words[n])


@triton.jit
def store_tiles(buffers, first, words, count, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`store_tile` of the same words to each of a tuple of COUNT buffers."""
    if first + BLOCK <= count:
        for n in tl.static_range(COUNT):
            tl.store(tl.multiple_of(buffers[n] + first, 16) + tl.arange(0, BLOCK), words)
    else:
        for n in tl.static_range(COUNT):
            store_tile(buffers[n], first, words, count, BLOCK)


@triton.jit
def members(table, like, WORLD_SIZE: tl.constexpr):
    """A tuple of `member` for every rank."""
    pointers = ()
    for rank in tl.static_range(WORLD_SIZE):
        pointers = pointers + (member(table, rank, like),)
    return pointers


@triton.jit
def store_everywhere(pointers, first, words, numel, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED):
    """`store_words` to each of a tuple of WORLD_SIZE pointers."""
    BITS: tl.constexpr = pointers[0].dtype.element_ty.primitive_bitwidth
    full = ((first + BLOCK) * (64 // BITS) <= numel) & ALIGNED
    if full:
        for rank in tl.static_range(WORLD_SIZE):
            wide = tl.multiple_of(pointers[rank].to(tl.pointer_type(tl.int64)) + first, 16)
            tl.store(wide + tl.arange(0, BLOCK), words)
    else:
        for rank in tl.static_range(WORLD_SIZE):
            store_words(pointers[rank], first, words, numel, BLOCK, False)
