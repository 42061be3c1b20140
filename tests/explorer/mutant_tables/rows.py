"""The table of mutants: kernels of rows."""

from tests.explorer.mutant_tables.names import CHUNKS, RACE
from tests.explorer.mutation import Edit, Mutant
from tricomm.kernels.collective_specs import FUSED

ROWS = (
    Mutant(
        "R06", "rows: one epoch, whatever the chunks", "the next call takes this one's epochs again",
        (Edit(CHUNKS, "finish(group, start, chunks, status)", "finish(group, start, 1, status)"),),
        ((next(iter(FUSED)), "one_shot", "ll128"),), RACE, blocks=2, tile=32, sizes=(1, 1, 1),
    ),
)  # fmt: skip
