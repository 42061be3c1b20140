"""The table of mutants: NVLS kernels."""

from tests.explorer.mutant_tables.names import CHUNKS, RACE, WRONG
from tests.explorer.mutation import Edit, Mutant

R = ("all_reduce", "multicast", "simple")
S = ("reduce_scatter", "multicast", "simple")

MULTICAST = "kernels/device/multicast.py"
ALL_REDUCE = "kernels/collectives/all_reduce_multicast.py"

_FIRST = "            status = synchronize(ahead, 0, SPEC)\n        elif"
_LAST = "status = synchronize(behind, 1, SPEC)"
_MEET = "            status = synchronize(ahead, 0, SPEC)\n        number += 1\n    leave"
_GIVEN = "given = buffer_at_all(chunk, heads, chunk.me, 0, SPEC)"
_RESULTS = "results = buffer_at_all(chunk, heads, chunk.me, half, SPEC)"
_ALL = "simple_buffer(chunk, heads[n], number, SPEC) + OFFSET"


SWITCHED = (
    Mutant(
        "N01", "switch: adds before the ranks have met", "stages are read before their ranks say that they are full",
        (Edit(CHUNKS, _FIRST, _FIRST.replace("synchronize(ahead, 0, SPEC)", "0")),),
        (R,), RACE,
    ),
    Mutant(
        "N02", "switch: results are taken before the ranks have met", "a multicast store has not arrived everywhere",
        (Edit(CHUNKS, _LAST, "status = 0"),),
        (R,), RACE,
    ),
    Mutant(
        "N03", "switch: a scatter without its barrier", "no flag says that all have staged",
        (Edit(CHUNKS, _MEET, _MEET.replace("synchronize(ahead, 0, SPEC)", "0")),),
        (S,), RACE,
    ),
    Mutant(
        "N04", "switch: the next rank's share is added", "each rank adds another share",
        (Edit(ALL_REDUCE, _GIVEN, _GIVEN.replace("chunk.me,", "(chunk.me + 1) % SPEC.WORLD_SIZE,")),),
        (R,), WRONG,
    ),
    Mutant(
        "N05", "switch: results are stored over stages", "a sum is stored over what a later rank has not added yet",
        (Edit(ALL_REDUCE, _RESULTS, _RESULTS.replace("half", "0")),),
        (R,), frozenset({"race", "wrong_result"}),
    ),
    Mutant(
        "N06", "switch: always the same mailbox", "a stage is filled again before all have added it",
        (Edit(MULTICAST, _ALL, _ALL.replace("chunk,", "chunk._replace(epoch=chunk.epoch * 0),", 1)),),
        (S,), frozenset({"race", "wrong_result"}),
    ),
)  # fmt: skip
