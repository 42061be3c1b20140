"""Shapes of each collective's input and output, whichever kernel runs it."""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.errors import InvalidArgument


@dataclass(frozen=True)
class Collective:
    """`takes` and `gives`: the rows of equal size in a rank's input and output, one or one for each rank.

    `root` is "src" if only one rank has an input, "dst" if only one rank has an output; else empty. `uneven`: rows have
    any length, which may change with every call and is not known to all ranks.
    """

    name: str
    takes: str = "one"
    gives: str = "one"
    reduces: bool = False
    root: str = ""
    uneven: bool = False

    def rows_in(self, world_size: int) -> int:
        """Rows of the input; of the root's input if there is a root."""
        return world_size if self.takes == "all" else 1

    def rows_out(self, world_size: int) -> int:
        """Rows of the output; of the root's output if there is a root."""
        return world_size if self.gives == "all" else 1


_ALL = (
    Collective("all_reduce", reduces=True),
    Collective("all_gather", gives="all"),
    Collective("reduce_scatter", takes="all", reduces=True),
    Collective("broadcast", root="src"),
    Collective("reduce", reduces=True, root="dst"),
    Collective("gather", gives="all", root="dst"),
    Collective("scatter", takes="all", root="src"),
    Collective("all_to_all", takes="all", gives="all"),
    Collective("all_to_all_v", takes="all", gives="all", uneven=True),
    Collective("barrier"),
)
COLLECTIVES = {collective.name: collective for collective in _ALL}
# An all-reduce of rows with an epilogue: residual, RMSNorm and quantisation, or a user's own.
FUSED = {name: Collective(name, reduces=True) for name in ("all_reduce_rms_norm", "all_reduce_rows")}
MESSAGES = {name: Collective(name) for name in ("send", "recv")}  # between two ranks


def find(name: str) -> Collective:
    """The collective of that name. Raises `InvalidArgument`, which lists the collectives that exist."""
    known = COLLECTIVES | FUSED | MESSAGES
    if not isinstance(name, str) or name not in known:
        raise InvalidArgument(f"collective {name!r} is unknown; there is {', '.join(known)}")
    return known[name]
