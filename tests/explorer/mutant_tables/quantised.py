"""The table of mutants, last part: an all-reduce that quantises on the links (`all_reduce_two_shot_quantized.py`)."""

import torch

from tests.explorer import bodies
from tests.explorer.mutant_tables.message import NOT_TRIED
from tests.explorer.mutant_tables.names import CHUNKS, MAILBOX, RACE
from tests.explorer.mutation import Edit, Mutant

FILE = "kernels/collectives/all_reduce_two_shot_quantized.py"

EITHER = frozenset({"race", "wrong_result", "rank_mismatch"})
DIFFERENT = frozenset({"rank_mismatch"})


def _mutant(name: str, title: str, bug: str, *edits: Edit, expect: frozenset[str] = RACE) -> Mutant:
    """Three chunks, then a call of one element, then two chunks, by tiles of 512 elements."""
    return Mutant(
        name, title, bug, edits, (("all_reduce", "two_shot_fp8", "simple"),), expect, tile=64, sizes=(6300, 1, 3300),
        dtype=torch.bfloat16, body=bodies.quantised, processes=NOT_TRIED,
    )  # fmt: skip


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
)  # fmt: skip
