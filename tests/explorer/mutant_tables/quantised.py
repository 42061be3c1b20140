"""The table of mutants, last part: an all-reduce that quantises on the links (`all_reduce_two_shot_quantized.py`)."""

from typing import Any

import torch

from tests.explorer import bodies
from tests.explorer.mutant_tables.message import NOT_TRIED
from tests.explorer.mutant_tables.names import ARRIVAL, CHUNKS, MAILBOX, RACE
from tests.explorer.mutation import Edit, Mutant

FILE = "kernels/collectives/all_reduce_two_shot_quantized.py"

EITHER = frozenset({"race", "wrong_result", "rank_mismatch"})
DIFFERENT = frozenset({"rank_mismatch"})


def _mutant(
    name: str, title: str, bug: str, *edits: Edit, expect: frozenset[str] = RACE, protocol: str = "simple", **more: Any
) -> Mutant:
    """Three chunks, then a call of one element, then two chunks, by tiles of 512 elements."""
    known = {"tile": 64, "sizes": (6300, 1, 3300), "dtype": torch.bfloat16, "body": bodies.quantised} | more
    key = ("all_reduce", "two_shot_fp8", protocol)
    return Mutant(name, title, bug, edits, (key,), expect, processes=NOT_TRIED, **known)


def _flagged(name: str, title: str, bug: str, *edits: Edit, expect: frozenset[str] = EITHER, **more: Any) -> Mutant:
    """With flags in the data, by tiles of 768 elements."""
    return _mutant(name, title, bug, *edits, expect=expect, protocol="ll128", **more)


QUANTISED = (
    _mutant(
        "Q1", "codes are summed before they have arrived", "the header of phase 0 is what publishes a chunk's codes",
        Edit(CHUNKS, "status = synchronize(ahead, 0, SPEC)\n        elif", "status = 0\n        elif"),
    ),
    _mutant(
        "Q2", "the last results are taken at once", "the header of phase 1 is what publishes the last chunk's results",
        Edit(CHUNKS, "status = synchronize(behind, 1, SPEC)", "status = 0"),
    ),
    _mutant(
        "Q3", "results go where codes are", "a peer may still sum what its second half would have kept apart",
        Edit(FILE, "(buffer + half + first // SPEC.TILE * SPEC.ROOM,)\n        if",
             "(buffer + first // SPEC.TILE * SPEC.ROOM,)\n        if"),
        Edit(FILE, "get_codes((buffer + half + first", "get_codes((buffer + first"),
        expect=EITHER,
    ),
    _mutant(
        "Q4", "a tile has no room for its scales", "the codes of the next tile overwrite them",
        Edit(FILE, "first // SPEC.TILE * SPEC.ROOM,)\n        if", "first // SPEC.TILE * SPEC.BLOCK,)\n        if"),
        Edit(FILE, "half + first // SPEC.TILE * SPEC.ROOM,), plane", "half + first // SPEC.TILE * SPEC.BLOCK,), plane"),
        expect=EITHER,
    ),
    _mutant(
        "Q5", "one mailbox", "a chunk is pushed over codes that a peer still sums",
        Edit(MAILBOX, "(chunk.epoch & 1) * SPEC.WORLD_SIZE + source\n    offset = simple_base(group)",
             "source + chunk.epoch * 0\n    offset = simple_base(group)"),
    ),
    _mutant(
        "Q6", "the owner keeps its result unquantised", "ranks hold different bits: FlashInfer's merged FP8 kernel",
        Edit(FILE, "first, dequantize(codes, by_word, SPEC), plane", "first, _averaged(sums, SPEC), plane"),
        expect=DIFFERENT,
    ),
    _flagged(
        "Q7", "ll128: scales are not awaited", "codes and scales arrive apart, each with a flag",
        Edit(ARRIVAL, "tile, old = tile + scales, old | unscaled", "tile = tile + scales"),
        schedules=20,
    ),
    _flagged(
        "Q8", "ll128: codes are not awaited", "codes and scales arrive apart, each with a flag",
        Edit(ARRIVAL, "tile, old = tile + scales, old | unscaled", "tile, old = tile + scales, unscaled"),
        schedules=20,
    ),
    _flagged(
        "Q9", "ll128: no wait for headers", "the fingerprint is not read, and the header is there for the next call",
        Edit(FILE, "lefts, WORLD_SIZE, True, SPEC)", "lefts, WORLD_SIZE, False, SPEC)"),
        expect=frozenset({"leftover", "race"}),
    ),
    _flagged(
        "Q10", "ll128: results go where codes are", "a word of the second hop is taken for one of the first",
        Edit(FILE, "me, first, half, SPEC)", "me, first, 0, SPEC)"),
        Edit(FILE, "table_of(group), 0, first, half, SPEC)", "table_of(group), 0, first, 0, SPEC)"),
    ),
    _flagged(
        "Q11", "ll128: a tile has no room for its scales", "the codes of the next tile overwrite them",
        Edit(FILE, "first // SPEC.TILE * SPEC.ROOM, 16)", "first // SPEC.TILE * 2 * SPEC.BLOCK, 16)"),
        Edit(FILE, "// SPEC.FIRST_ROOM).to", "// (2 * SPEC.BLOCK)).to"),
        expect=EITHER | {"deadlock"},
    ),
    _flagged(
        "Q12", "ll128: one mailbox", "a chunk is pushed over codes that a peer still sums",
        Edit(MAILBOX, "(chunk.epoch & 1) * SPEC.WORLD_SIZE + source\n    if SPEC.WIDE", "source\n    if SPEC.WIDE"),
        expect=EITHER | {"deadlock"},
    ),
    _flagged(
        "Q13", "ll128: the owner keeps its result unquantised", "as Q6",
        Edit(FILE, "there, decoded(codes, scales, SPEC)", "there, _summed(tiles, SPEC)"),
        expect=DIFFERENT,
    ),
    _flagged(
        "Q14", "ll128: another block's tiles are cleared", "a tile of codes is longer than another one by its scales",
        Edit(MAILBOX, "SPEC.ROOM if CODES else SPEC.OWNED * STEP", "SPEC.OWNED * STEP"),
        first_epoch=2**30 - 1, blocks=2, schedules=40,
    ),
)  # fmt: skip
