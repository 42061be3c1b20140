"""The facts about a communicator that selection needs."""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.kernels.layout import Layout
from tricomm.policy.tuning_tables import TableRow


@dataclass(frozen=True)
class SelectionFacts:
    """The same on all ranks."""

    device: str  # "cpu" or "sm_90" and so on
    world_size: int
    layout: Layout
    max_blocks: int
    blocks: int | None = None
    tile: int | None = None
    topology: str = ""  # `Topology.kind` of the ranks' devices; empty if unknown
    reachable: bool = True  # every rank's memory is mapped on every other
    tuned: tuple[TableRow, ...] = ()  # of the user's own table, or of a tuner's candidate
    tuned_name: str = ""
    batch_invariant: bool = False  # only kernels that reduce in rank order
    beside: bool = False  # the group's calls overlap other kernels, so only compact forms are chosen
    wire: str = ""  # how calls that get faster by it are quantised on the links; empty: none is
    no_dependent_launch: str = "no group has agreed on it"  # why no kernel is a dependent launch
    no_multicast: str = "its memory has no multicast address"  # why not through the switch; empty if that is possible
    most_fused: int = 2 << 20  # bytes of a fused call; above this a separate all-reduce and norm are faster
