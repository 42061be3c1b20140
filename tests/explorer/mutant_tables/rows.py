"""The table of mutants: kernels of rows, which arrive at the end of their launch before their epilogue."""

from tests.explorer.mutant_tables.names import ARRIVAL, CHUNKS, RACE, SCOPE
from tests.explorer.mutation import Edit, Mutant
from tricomm.kernels.collective_specs import FUSED

L, W = ((next(iter(FUSED)), "one_shot", protocol) for protocol in ("ll", "ll128"))

ONE_SHOT = "kernels/collectives/all_reduce_rows_one_shot.py"

_ARRIVE = "    before = tl.zeros([LANES], tl.int64)\n"
_BARRIER = (
    "    tl.debug_barrier()  # one thread has acquired; the barrier orders the stores of all threads after that\n"
)
_COUNTED = 'before + 1, mask=lane == 0, sem="acq_rel", scope="gpu")'
_POLLED = "        prepared = SPEC.PREPARE(first + this, operands, SPEC)\n"
_DONE = "before = arrive_if(chunk, last & (row + stride >= count), before, SPEC)\n"


def _mutant(
    name: str, title: str, bug: str, edits: tuple[Edit, ...], key: tuple[str, str, str], expect: frozenset[str] = RACE
) -> Mutant:
    return Mutant(name, title, bug, edits, (key,), expect, blocks=2, tile=32 if key is W else 16, sizes=(1, 1, 1))


ROWS = (
    _mutant(
        "R01", "rows: arrives without order", "the last block does not know that the others have read",
        (Edit(ARRIVAL, _COUNTED, _COUNTED.replace("acq_rel", "acquire")),), L,
    ),
    _mutant(
        "R02", "rows: arrives at scope cta", "the blocks of a launch are in several",
        (Edit(ARRIVAL, _COUNTED, _COUNTED.replace('"gpu"', '"cta"')),), W, SCOPE,
    ),
    _mutant(
        "R03", "rows: no block barrier before the arrival", "the block's other threads may still read",
        (Edit(ARRIVAL, f"{_ARRIVE}    tl.debug_barrier()", f"{_ARRIVE}    pass"),), L,
    ),
    _mutant(
        "R04", "rows: no block barrier behind the arrival", "other threads store before one has acquired",
        (Edit(ARRIVAL, _BARRIER, ""),), L,
    ),
    _mutant(
        "R05", "rows: arrives before its last row is polled", "a poll reads the busy word that the last block resets",
        (Edit(ONE_SHOT, f"            {_DONE}", ""), Edit(ONE_SHOT, _POLLED, f"        {_DONE}{_POLLED}")), L,
    ),
    _mutant(
        "R06", "rows: departs with one epoch, whatever the chunks", "the next call takes this one's epochs again",
        (Edit(CHUNKS, "depart(group, start, chunks, before,", "depart(group, start, 1, before,"),), W,
    ),
)  # fmt: skip
