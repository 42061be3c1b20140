"""The hybrid cube mesh: two quads of GPUs, all linked inside, joined by one link per GPU. Who is what, for every rank.

The test is pytorch's first `IntraNodeComm` one: each of 8 devices has exactly 4 NVLink neighbours, and exactly one of
them shares no neighbour with it. That one is the relay, the other three are the quad. Of the 19355 labelled graphs in
which 8 vertices have 4 neighbours each 840 pass, and all of them are two complete quads joined by a perfect matching
(`tests/topology/test_mesh.py` counts them), so nothing else needs to be checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tricomm.topology.model import Topology

RANKS = 8
_NEIGHBOURS = 4

Quad = tuple[int, int, int, int]


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the mesh.

    rank              the rank itself
    position          0 to 3: its place in its quad; relay partners have the same one
    quad_by_position  the 4 ranks of its quad, itself among them, by position
    order             the same 4 in ascending order: the order to add in, so that all 4 get the same bits
    relay             the one rank of the other quad that it has links to
    """

    rank: int
    position: int
    quad_by_position: Quad
    order: Quad
    relay: int

    @property
    def quad(self) -> tuple[int, int, int]:
        """The 3 peers in the quad, by edge colour: `quad[k]` of X is Y if and only if `quad[k]` of Y is X.

        So if all ranks go through theirs in step, each link carries one pair's traffic at a time.
        """
        ranks, here = self.quad_by_position, self.position
        return ranks[here ^ 1], ranks[here ^ 2], ranks[here ^ 3]


def tables(topology: Topology) -> tuple[Place, ...] | None:
    """Every rank's place, by rank; None where the links are not those of a hybrid cube mesh.

    Only links count, not peer access, nor how many links a pair has. Positions: the quad of rank 0 in ascending order,
    and each of the others as its relay.
    """
    links = topology.links
    if len(links) != RANKS:
        return None
    neighbours = [frozenset(other for other, count in enumerate(row) if count) for row in links]
    relay = []
    for mine in neighbours:
        apart = [other for other in mine if mine.isdisjoint(neighbours[other])]
        if len(mine) != _NEIGHBOURS or len(apart) != 1:
            return None
        relay += apart
    a, b, c, d = sorted({0} | neighbours[0] - {relay[0]})
    near, far = (a, b, c, d), (relay[a], relay[b], relay[c], relay[d])
    return tuple(_place(rank, near if rank in near else far, relay[rank]) for rank in range(RANKS))


def _place(rank: int, quad: Quad, relay: int) -> Place:
    a, b, c, d = sorted(quad)
    return Place(rank, quad.index(rank), quad, (a, b, c, d), relay)
