"""Names that several tables of mutants use: kernels, files and findings.

A kernel's letters are its collective (none: all_reduce, AG: all_gather, B: broadcast, G: gather, R: reduce, C: scatter,
A: all_to_all, V: all_to_all_v, D: reduce_scatter), then L for one_shot under `ll`, S for one_shot under `simple`, T for
two_shot under `simple`, TL for two_shot under `ll`; B alone is the barrier.
"""

from tests.explorer.mutation import Key


def both(collective: str, algorithm: str = "one_shot") -> tuple[Key, Key]:
    """The kernels of both protocols: `ll`, `simple`."""
    return (collective, algorithm, "ll"), (collective, algorithm, "simple")


L, S = both("all_reduce")
TL, T = both("all_reduce", "two_shot")
AGL, AGS = both("all_gather")
BL, BS = both("broadcast")
BT = ("broadcast", "two_shot", "simple")
GL, GS = both("gather")
RL, RS = both("reduce")
CL, CS = both("scatter")
AL, AS = both("all_to_all")
VL, VS = both("all_to_all_v")
DL, DS = both("reduce_scatter")
B = ("barrier", "one_shot", "simple")

PRIMITIVES = "kernels/primitives.py"
ARRIVAL, CHUNKS, MAILBOX, PLAIN, PUSH = (
    f"kernels/device/{name}.py" for name in ("arrival", "chunks", "mailbox", "plain_data", "push")
)
TWO_SHOT = "kernels/collectives/all_reduce_two_shot.py"
UNEVEN = "kernels/collectives/all_to_all_v_one_shot.py"

RACE, SCOPE, DEADLOCK = frozenset({"race"}), frozenset({"scope"}), frozenset({"deadlock"})
WRONG = frozenset({"wrong_result"})
