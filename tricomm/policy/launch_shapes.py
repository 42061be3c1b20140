"""The launch shape of a kernel: blocks, warps and tile; from a table's row, by rule, or forced by the group's options.

Pure functions of facts that all ranks share, as in `selection`. If a kernel cannot use a row's value, the nearest
usable value is taken; a forced value is refused.
"""

from __future__ import annotations

from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import MAX_BLOCKS, Layout, alike, tile_words
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import TableRow

MOST_REGISTERS, COMPACT_REGISTERS = 255, 128
BESIDE_BLOCKS = 16  # of a group whose calls overlap other kernels
LARGEST_LL_WARPS = 8  # of compact forms: a word per thread, so tiles of 256 words at most
_MOST_RANKS, _MOST_LL_RANKS = 8, 4
# Kernels without a compact form, because it would spill on sm_80, sm_90 or sm_100. A test compiles the others.
_LARGE = frozenset(
    {
        "all_reduce_two_shot_ll",
        "all_reduce_hybrid_cube_mesh_two_shot_simple",
        "all_gather_hybrid_cube_mesh_ll",
        "all_reduce_two_shot_zero_copy",
        "all_to_all_one_shot_ll",
        "all_reduce_multicast_simple",
    }
)
# Before sm_90 a number that is the same in all threads takes a register in each thread.
_LARGE_BEFORE_90 = frozenset(
    {
        "all_reduce_two_shot_simple",
        "broadcast_two_shot_simple",
        "all_reduce_one_shot_zero_copy",
        "reduce_scatter_one_shot_zero_copy",
    }
)


def has_compact_form(kernel: registry.Kernel, device: str, world_size: int) -> bool:
    """True if `kernel` takes at most 128 registers a thread on `device` ("cpu", "sm_90", "cuda") without spilling.

    Then two blocks of 256 threads, of any kernels, fit on a multiprocessor with 65536 registers. A compact form has the
    tiles of few ranks in flight at once (`COMPACT` in `kernels/specialization.py`).
    """
    if device == "cpu":
        return True
    if kernel.wire:
        return False
    older = not device.startswith("sm_") or int(device.removeprefix("sm_")) < 90
    if kernel.wide or kernel.name in _LARGE or (older and kernel.name in _LARGE_BEFORE_90):
        return False
    return (
        kernel.pairwise
        or kernel.needs_cube
        or world_size <= (_MOST_LL_RANKS if kernel.protocol == "ll" else _MOST_RANKS)
    )


GPU_WARPS = 8
GPU_TILE = 512  # words: two per thread, so that every access is 16 bytes wide
WORDS_PER_WARP = 32  # at least, because all threads poll together and need a part of each tile
LL_BLOCKS = 32
_MANY_RANKS = 8  # from here on tiles are half as large, because tiles of all ranks are in flight at once
# Words. A switch returns one tile for all ranks, so longer shards use whole tiles: modelled 3 to 9 % faster than half
# tiles. Handles keep half tiles, because whole ones take between 6 % less and 2 % more time.
_LONG_SHARD = 2 * MAX_BLOCKS * GPU_TILE
LEAST_WIRE_TILE = 64  # words of codes: a block of 128 elements in each of four planes
CPU_TILE = 8192  # the interpreter's time is per operation, not per element


def check_device(device: str, arena: Layout, tile: int | None) -> None:
    """Raises `InvalidArgument` for an arena or a forced tile that is too small for a GPU, on which every tile must span
    all threads of a block, because they poll together."""
    if device != "cuda":
        return
    if tile is not None and tile < WORDS_PER_WARP:
        raise InvalidArgument(f"Tuning.tile={tile}: a GPU needs tiles of at least {WORDS_PER_WARP} words")
    least = min(arena.largest_tile("two_shot", "ll"), arena.largest_tile("two_shot", "ll128"), arena.slot_words("ll"))
    if least < 2 * WORDS_PER_WARP:  # of wide words, whose planes are half of a tile
        raise InvalidArgument(f"Options.arena_bytes: {arena.nbytes} bytes leave tiles under {2 * WORDS_PER_WARP} words")


def check_grid(blocks: int | None, most: int, max_blocks: int | None) -> None:
    """Raises `InvalidArgument` for a forced grid of more than `most` blocks, the number that is certainly resident at
    once (or `max_blocks`): a block that waits for a block that is not resident would deadlock."""
    if blocks is not None and blocks > most:
        limit = "that is Options.max_blocks" if max_blocks == most else "the processors of a rank's share of its GPU"
        raise InvalidArgument(
            f"Tuning.blocks={blocks}: at most {most} blocks surely run at once on every rank's device ({limit}); "
            f"force 1 to {most}, or none"
        )


def registers_of(facts: SelectionFacts, row: TableRow | None) -> int:
    """The registers per thread that a call may use; few registers select the compact form of a kernel."""
    few = facts.beside or (row is not None and 0 < (row.registers or 0) < MOST_REGISTERS)
    return COMPACT_REGISTERS if few else MOST_REGISTERS


def shape_of(
    facts: SelectionFacts, kernel: registry.Kernel, words: int, row: TableRow | None = None
) -> tuple[int, int, int]:
    """Grid, warps and tile for a row of `words`, by `row` or by rule. All inputs are the same on all ranks.

    A GPU's tiles span all threads of a block, so short messages have fewer warps. Under LL tile and warps depend on the
    message's length, because a poll reads whole tiles, even if they are not full.
    """
    if kernel.pairwise:
        return _shape_of_message(facts, kernel, facts.layout.slot_words(kernel.protocol), words)
    widest = facts.layout.largest_tile(kernel.algorithm, kernel.protocol)
    warps = GPU_WARPS
    if facts.device == "cpu":
        tile = min(CPU_TILE, max(16, 1 << (max(words, 1) - 1).bit_length()))
        blocks = 1
    else:
        tile = GPU_TILE
        share = words if kernel.shards is None else -(-words // (kernel.shards or facts.world_size))
        if kernel.protocol != "simple":
            tile = _short_tile(kernel, share, facts.world_size)
            blocks = min(LL_BLOCKS, max(1, -(-share // tile_words(kernel.protocol, tile))))
        else:
            whole = kernel.multicast and not kernel.zero_copy and share > _LONG_SHARD
            if kernel.shards == 0 and facts.world_size >= _MANY_RANKS and not whole:
                tile, warps = GPU_TILE // 2, GPU_WARPS // 2
            blocks = _wide_grid(facts, kernel, share, min(facts.tile or tile, widest))
    if row is not None:
        tile, blocks, warps = row.tile or tile, row.blocks or blocks, row.warps or warps
    tile = _tile(facts, kernel, tile, widest, registers_of(facts, row))
    if facts.device != "cpu":
        warps = max(1, min(warps, tile // WORDS_PER_WARP // kernel.words_per_thread))
    return facts.blocks or min(blocks, facts.max_blocks, MAX_BLOCKS), warps, tile


def _tile(facts: SelectionFacts, kernel: registry.Kernel, tile: int, widest: int, registers: int) -> int:
    """`usable_tile`, where `widest` words divide the kernel's buffers."""
    least, why = LEAST_WIRE_TILE if kernel.wire else 1, divided(facts)
    if facts.device != "cpu":
        # A plane of wide words is half of their tile, as accesses through a switch are, and has to span all threads.
        least = max(least, kernel.words_per_thread * WORDS_PER_WARP)
        if registers < MOST_REGISTERS and kernel.protocol != "simple" and LARGEST_LL_WARPS * WORDS_PER_WARP < widest:
            widest, why = LARGEST_LL_WARPS * WORDS_PER_WARP, f"fit into {registers} registers a thread"
    return usable_tile(facts, kernel, tile, (least, widest), why)


def divided(facts: SelectionFacts) -> str:
    """The reason, in words, for the largest size of a tile."""
    return f"divide the buffers that Options.arena_bytes={facts.layout.nbytes} leaves"


def usable_tile(facts: SelectionFacts, kernel: registry.Kernel, tile: int, bounds: tuple[int, int], why: str) -> int:
    """The tile that the group forces, or `tile` limited to `bounds`, the sizes that the kernel can use; `why` explains
    them.

    Raises `InvalidArgument`, with the usable sizes, for a forced tile that the kernel cannot use.
    """
    least, most = bounds
    if facts.tile is None:
        return max(least, min(tile, most))
    if not least <= facts.tile <= most:
        name = f"{kernel.collective} {kernel.algorithm}/{kernel.protocol}"
        raise InvalidArgument(
            f"Tuning.tile={facts.tile}: tiles of {least} to {most} words span the threads of {name} and {why}; "
            "force one of these, none, or another algorithm= and protocol="
        )
    return facts.tile


def _short_tile(kernel: registry.Kernel, words: int, world_size: int) -> int:
    """Words of an LL tile. It is one warp's, which leaves a poll without a barrier and polls few words a round; larger
    if LL_BLOCKS blocks have several tiles each.

    Not larger for two shots of many ranks, whose tiles are polled together: modelled, 1 MiB on 8 H100 under `ll128`
    takes 9.0 us with tiles of one warp and 13.5 us with tiles of four warps. Codes take time to make, so for them it is
    9.3 us with four warps and 13.4 us with one; on 4 H100, 6.5 us with four and 8.9 us with eight.
    """
    tile = WORDS_PER_WARP * kernel.words_per_thread
    grows = kernel.shards is None or world_size < _MANY_RANKS or kernel.wire
    most = GPU_TILE // 2 if kernel.wire else GPU_TILE
    while grows and tile < most and words > LL_BLOCKS * tile_words(kernel.protocol, tile):
        tile *= 2
    return tile


def _wide_grid(facts: SelectionFacts, kernel: registry.Kernel, words: int, tile: int) -> int:
    """All blocks that run at once, or the fewest with the same number of tiles in the busiest block, which determines
    the time of a chunk.

    So from 1 MiB on, 512 KiB or more are in flight to a GPU's SMs at once, because every block has several tiles.
    """
    room = facts.layout.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective)
    _, chunk = alike(words, room * (facts.world_size if kernel.staged else 1), tile)
    tiles = max(1, -(-(words if kernel.zero_copy else min(words, chunk)) // tile))
    rounds = -(-tiles // min(MAX_BLOCKS, facts.max_blocks))
    return -(-tiles // rounds)


def _shape_of_message(facts: SelectionFacts, kernel: registry.Kernel, widest: int, words: int) -> tuple[int, int, int]:
    """`shape_of` for a message, with at most one block per queue."""
    tile = GPU_TILE if facts.device != "cpu" else min(CPU_TILE, max(16, 1 << (max(words, 1) - 1).bit_length()))
    tile = _tile(facts, kernel, tile, widest, MOST_REGISTERS)
    queues = facts.layout.queues
    blocks = 1 if facts.device == "cpu" else max(1, -(-words // tile))
    warps = max(1, min(GPU_WARPS, tile // WORDS_PER_WARP))
    return min(facts.blocks or min(blocks, facts.max_blocks), queues), warps, tile
