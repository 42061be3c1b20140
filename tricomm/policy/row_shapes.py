"""The kernel and the launch shape of an all-reduce of rows with an epilogue: a pure function, as in `selection`.

A block takes whole rows, so a call has one block per row, up to the number that is resident at once. A tile is a row, a
shard of a row, or the part that a block's registers can hold from all ranks at once. Whether a call is fused may depend
on the number of rows only if the group is not batch-invariant; the algorithm may always depend on it, because all
algorithms give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS
from tricomm.kernels.layout import MAX_BLOCKS
from tricomm.kernels.specialization import Specialization
from tricomm.policy import selection
from tricomm.policy.launch_shapes import COMPACT_REGISTERS, CPU_TILE, WORDS_PER_WARP, divided, usable_tile
from tricomm.policy.selection import Choice, has_wide_words
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import TableRow, epilogue_name

MOST_HIDDEN = 16384
ROW_BLOCKS = 32  # as LL's
MOST_FUSED = SelectionFacts.most_fused
_POLLED = 4096  # words, over all ranks, that a block's registers can hold
_WORDS_PER_THREAD = 16  # of a row, about: 4 warps for 2048 words
_FEWER_WORDS = 8  # with `wire` codes before sm_90, where numbers that all threads share take registers: 16 would spill
_WIDE_WARPS = 8  # polling three planes of eight ranks at once spills 66 words with 128 registers, none with 255
_LEAST_TILE = 16  # words, of the interpreter
# The most tiles into which the rules divide a row; the code unrolls them. Two shots for bf16 rows of 8192 on eight
# ranks take 12 s to compile with 16 tiles, 53 s with 32.
_MOST_TILES = {"one_shot": 16, "two_shot": 32}
_REGISTERS = 65536
_FIRST_ARCHITECTURE = 80  # has instructions for two 16-bit numbers


def choose(
    facts: SelectionFacts,
    collective: str,
    bits: int,
    hidden: int,
    rows: int,
    forced: tuple[str | None, str | None],
    quantize: str = "",
    mode: str = "eager",
) -> Choice | str:
    """The kernel for `rows` rows of `hidden` elements of `bits`, or why none supports them. A table's row decides
    kernel and shape, else the rules here. `forced`: algorithm and protocol, each None if it is not forced.

    Raises `InvalidArgument` if the group forces a tile that none of these kernels can use.
    """
    algorithm, protocol = forced
    nbytes = rows * hidden * bits // 8
    if hidden % 8 or not 8 <= hidden <= MOST_HIDDEN:
        return f"hidden={hidden}: fused kernels take multiples of 8 up to {MOST_HIDDEN}"
    if bits not in (16, 32):
        return f"{bits} bits: fused kernels take fp16, bf16 and fp32"
    if facts.beside:
        return f"fused kernels take more than {COMPACT_REGISTERS} registers a thread"
    if facts.device != "cpu" and _architecture(facts) < _FIRST_ARCHITECTURE:
        return f"fused kernels are compiled for sm_{_FIRST_ARCHITECTURE} and newer, and the same for all ranks"
    if not facts.reachable:
        return "not every rank reaches every other one's memory here"
    if forced == (None, None) and not facts.batch_invariant and facts.device != "cpu" and nbytes > facts.most_fused:
        return f"{nbytes} bytes; fused kernels take less time up to {facts.most_fused}"
    wide = has_wide_words(facts, collective, forced=protocol == "ll128")
    fits, reasons, refused = [], [], []
    for kernel in registry.FUSED:
        named = algorithm in (None, kernel.algorithm) and protocol in (None, kernel.protocol)
        if kernel.collective != collective or not named or (kernel.wide and not wide):
            continue
        try:
            shape = _shape(facts, kernel, bits, hidden, rows, quantize)
        except InvalidArgument as error:
            refused.append(error)
            continue
        if isinstance(shape, str):
            reasons.append(shape)
        else:
            fits.append((kernel, shape))
    if refused and not fits:
        raise refused[0]
    if not fits:
        return "; ".join(reasons) or f"there is no fused {registry.name_of(algorithm, protocol)} kernel"
    # One block polls a row from all ranks. If its registers cannot hold that at once, a second hop is faster.
    short = facts.world_size * hidden * bits // 64 <= _POLLED
    first = sorted(fits, key=lambda fit: (fit[0].algorithm == "one_shot") != short)
    kernel, (blocks, warps, tile) = first[0]
    table, number, name = "fused", None, epilogue_name(hidden, quantize)
    reason = f"fused: {rows} rows of {hidden}, {nbytes} bytes; one shot if registers hold a row of all ranks"
    for tabled, at, row in selection.table_rows(facts, collective, nbytes, mode, bits, name):
        fitting = next((k for k, _ in first if (k.algorithm, k.protocol) == (row.algorithm, row.protocol)), None)
        shape = _shape(facts, fitting, bits, hidden, rows, quantize, row) if fitting is not None else ""
        if fitting is not None and not isinstance(shape, str):
            kernel, (blocks, warps, tile), table, number = fitting, shape, tabled, at
            reason = f"table {table!r} row {number}: {collective} {name}, {nbytes} bytes"
            break
    if forced != (None, None):
        reason, number = f"{registry.name_of(algorithm, protocol)} forced by the caller", None
    if facts.batch_invariant:
        reason += "; batch-invariant: in rank order, rounded once, statistics exact, whatever the rows"
    second = next((f"{k.algorithm}/{k.protocol}" for k, _ in first if k != kernel), "")
    return Choice(
        collective, kernel.algorithm, kernel.protocol, blocks, warps, tile, reason, table, number, second, fused=True
    )


def constexprs(facts: SelectionFacts, choice: Choice, hidden: int, aligned: bool) -> dict[str, Any]:
    """The constexprs of a kernel of rows, in addition to `launch_plan.constexprs`."""
    shards = facts.world_size if choice.algorithm == "two_shot" else 1
    values: dict[str, Any] = {"HIDDEN": hidden, "SHARDS": shards, "ALIGNED": aligned}
    if facts.device != "cpu":
        values["maxnreg"] = min(COMPILE_OPTIONS["maxnreg"], _REGISTERS // (32 * choice.warps))
    return values


def _architecture(facts: SelectionFacts) -> int:
    """90 for sm_90; 0 for GPUs of several kinds."""
    return int(facts.device.removeprefix("sm_").replace("cuda", "0"))


def _power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def _shape(
    facts: SelectionFacts,
    kernel: registry.Kernel,
    bits: int,
    hidden: int,
    rows: int,
    quantize: str,
    row: TableRow | None = None,
) -> tuple[int, int, int] | str:
    """(blocks, warps, tile), from `row` if it gives them, or why the kernel does not support such rows here.

    Raises `InvalidArgument` for a forced tile that it cannot use.
    """
    blocks, warps, wanted = (None, None, None) if row is None else (row.blocks, row.warps, row.tile)
    gpu, name = facts.device != "cpu", f"{kernel.algorithm}/{kernel.protocol}"
    form = Specialization(
        facts.world_size,
        1,
        0,
        False,
        WIDE=kernel.wide,
        ELEMENT="float32" if bits == 32 else "float16",
        HIDDEN=hidden,
        SHARDS=facts.world_size if kernel.algorithm == "two_shot" else 1,
        QUANTIZE=quantize,
    )
    run = -(-form.SHARD * 2 // 3) if kernel.wide else form.SHARD
    least = (WORDS_PER_WARP if gpu else _LEAST_TILE) * (2 if kernel.wide else 1)  # a plane spans a warp
    whole = max(least, _power_of_two(run))
    widest = facts.layout.largest_tile(kernel.algorithm, kernel.protocol)
    # Each thread has a word of each plane, so that a tile has the same layout when it is loaded, polled and stored.
    held = _FEWER_WORDS if gpu and quantize and _architecture(facts) < 90 else _WORDS_PER_THREAD
    warps = _WIDE_WARPS if kernel.wide and held == _WORDS_PER_THREAD else 16
    most = least * min(warps, max(4, _power_of_two(-(-form.ROW // (32 * held))))) if gpu else CPU_TILE
    shortest, why = least, divided(facts)
    if gpu:  # the longest tile is a shard, if the row fits into its buffer
        while shortest < widest and replace(form, BLOCK=shortest).ROW_TILES > _MOST_TILES[kernel.algorithm]:
            shortest *= 2
        if shortest > least:
            why = f"make at most {_MOST_TILES[kernel.algorithm]} of a row of {hidden}, and {why}"
    form = replace(form, BLOCK=max(shortest, min(wanted or most, widest, whole)))
    room = facts.layout.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective)
    if form.PITCH > room:
        return (
            f"{name}: a row of {hidden} takes {8 * form.PITCH} bytes of a buffer, and Options.arena_bytes leaves "
            f"{8 * room} of payload"
        )
    # A forced tile may be longer than a row: a group has one for calls of all sizes.
    tile = usable_tile(facts, kernel, form.BLOCK, (shortest, widest), why)
    form = replace(form, BLOCK=tile)
    words = form.SCALED
    if form.GROUP and (form.GROUP % form.PACK or form.PLANE % words or any(first % words for first in form.FIRSTS)):
        why = "ll does not divide them" if quantize == "nvfp4" else "a power of two up to 128 fits most rows"
        return f"{name}: planes of a row of {hidden} begin inside blocks of {form.GROUP} elements; {why}"
    if not gpu:
        return min(facts.blocks or blocks or 1, facts.max_blocks, MAX_BLOCKS), 8, tile
    warps = max(1, min(warps or 16, tile // least))
    return min(facts.blocks or blocks or min(ROW_BLOCKS, max(rows, 1)), facts.max_blocks, MAX_BLOCKS), warps, tile
