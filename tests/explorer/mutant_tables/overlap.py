"""The table of mutants, fifth part: chunks that overlap (`kernels/device/chunks.py`), three in a call or more."""

from tests.explorer.mutant_tables.names import AS, BT, CHUNKS, DS, GS, RACE, UNEVEN, VS, S, T
from tests.explorer.mutation import Edit, Mutant

# Of one hop.
_PUSH = "            open_epoch(ahead, 1, SPEC)\n            PUSH(tensors, ahead, SPEC)\n"
_TAKE = """\
        if number > 0:
            status = TAKE(tensors, nth(whole, number - 1, chunk_words), status, SPEC)
"""
_MEET = "        if number < chunks:\n            status = synchronize(ahead, 0, SPEC)\n"
_NEXT = "        number += 1\n"
_EARLY = """\
            open_epoch(ahead, 1, SPEC)
            if number == 0:
                PUSH(tensors, ahead, SPEC)
            if number + 1 < chunks:
                PUSH(tensors, nth(whole, number + 1, chunk_words), SPEC)
"""
# Of two hops.
_PUSH_FIRST, _EARLY_FIRST = (text.replace("ahead, 1, SPEC", "ahead, 2, SPEC") for text in (_PUSH, _EARLY))
_PASS_ON = (
    "        if (number > 0) & (number <= chunks):\n"
    "            PASS_ON(tensors, nth(unknown(whole, SPEC), number - 1, chunk_words), SPEC)\n"
)
_TAKE_LAST = (
    "        if number > 1:\n            TAKE(tensors, nth(unknown(whole, SPEC), number - 2, chunk_words), SPEC)\n"
)
_MET = "            status = synchronize(ahead, 0, SPEC)\n        elif"
_END = "            status = synchronize(behind, 1, SPEC)\n"
_UNEVEN_TAKE = """\
            if number > 0:
                status = _take(y_ptr, numel, recv_counts, buffer, nth(whole, number - 1, buffer), status, SPEC)
"""
_UNEVEN_NEXT = "            number += 1\n    leave"

_LONG = (1300,)  # words of a row: six chunks, or three where all buffers are one stage


def _mutant(
    name: str, title: str, bug: str, edits: tuple[Edit, ...], key: tuple[str, str, str], sizes: tuple[int, ...] = _LONG
) -> Mutant:
    return Mutant(name, title, bug, edits, (key,), RACE, sizes=sizes, tile=256)


OVERLAPS = (
    _mutant(
        "O01", "one hop: a chunk pushed before the barrier of the one before", "it overwrites what peers still take",
        (Edit(CHUNKS, _PUSH, _EARLY),), DS, (2100,),
    ),
    _mutant(
        "O02", "one hop: read after the next barrier", "the next push lands on what is being taken",
        (Edit(CHUNKS, _TAKE + _MEET, _MEET + _TAKE),), AS, (2100,),
    ),
    _mutant(
        "O03", "one hop: only the first chunk has a barrier", "each chunk needs its own",
        (Edit(CHUNKS, _MEET + _NEXT, _MEET.replace("number < chunks", "number == 0") + _NEXT),), GS, (2100,),
    ),
    _mutant(
        "O04", "staged: read after the next barrier", "the stage is filled again under a reader",
        (Edit(CHUNKS, _TAKE + _MEET, _MEET + _TAKE),), S, (4200,),
    ),
    _mutant(
        "O05", "uneven parts: read after the next barrier", "the next push lands on what is being taken",
        (Edit(UNEVEN, _UNEVEN_TAKE, ""), Edit(UNEVEN, _UNEVEN_NEXT, _UNEVEN_TAKE + _UNEVEN_NEXT)), VS, (2100,),
    ),
    _mutant(
        "O06", "two hops: a chunk pushed before the barrier of the one before", "it overwrites shards that are reduced",
        (Edit(CHUNKS, _PUSH_FIRST, _EARLY_FIRST),), T,
    ),
    _mutant(
        "O07", "two hops: only the first chunk has a barrier", "each chunk needs its own",
        (Edit(CHUNKS, _MET, f"            if number == 0:\n    {_MET}"),), T,
    ),
    _mutant(
        "O08", "two hops: results read after the next barrier", "results of the chunk after next land on them",
        (Edit(CHUNKS, _TAKE_LAST, ""), Edit(CHUNKS, _END, _END + _TAKE_LAST)), T,
    ),
    _mutant(
        "O09", "two hops: results taken before their barrier", "they are copied before they have come",
        (Edit(CHUNKS, "nth(unknown(whole, SPEC), number - 2, chunk_words), SPEC)", "behind, SPEC)"),), BT,
    ),
    _mutant(
        "O10", "two hops: passed on before the barrier", "shards are passed on before they have come",
        (Edit(CHUNKS, _PASS_ON, _PASS_ON.replace("number > 0", "number >= 0").replace("number - 1", "number")),), BT,
    ),
)  # fmt: skip
