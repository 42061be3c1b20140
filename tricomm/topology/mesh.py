"""The hybrid cube mesh, two fully linked quads of GPUs joined by one link per GPU, and every rank's position in it.

The test is PyTorch's first `IntraNodeComm` one: each of 8 devices has exactly 4 NVLink neighbours, and exactly one of
them shares no neighbour with it. That one is the relay, the other three are the quad. Of the 19355 labelled graphs in
which 8 vertices have 4 neighbours each 840 pass, and all of them are two complete quads joined by a perfect matching
(`tests/topology/test_mesh.py` counts them), so no other test is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RANKS = 8
_NEIGHBOURS = 4

Quad = tuple[int, int, int, int]

DGX1V_LINKS = (  # as `nvidia-smi topo -m` prints it on a DGX-1 with 8 V100, of 6 links each
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)


@dataclass(frozen=True)
class MeshPosition:
    """A rank's position in the mesh.

    rank              the rank itself
    position          0 to 3, in its quad; relay partners have the same one
    quad_by_position  the 4 ranks of its quad, itself among them, by position
    order             the same 4 ranks in ascending order, the order of summation, so that all 4 get the same bits
    relay             the only rank of the other quad to which it has links
    """

    rank: int
    position: int
    quad_by_position: Quad
    order: Quad
    relay: int


def positions(links: Sequence[Sequence[int]]) -> tuple[MeshPosition, ...] | None:
    """Every rank's position, by rank; None if `links`, an n x n table, do not make a hybrid cube mesh.

    It matters whether a pair has links, not how many. The ranks in the quad of rank 0 have ascending positions, and
    every other rank has its relay's position.
    """
    if len(links) != RANKS:
        return None
    neighbours = [frozenset(other for other, count in enumerate(row) if count) for row in links]
    relay = []
    for mine in neighbours:
        strangers = [other for other in mine if mine.isdisjoint(neighbours[other])]
        if len(mine) != _NEIGHBOURS or len(strangers) != 1:
            return None
        relay += strangers
    a, b, c, d = sorted({0} | neighbours[0] - {relay[0]})
    near, far = (a, b, c, d), (relay[a], relay[b], relay[c], relay[d])
    return tuple(_position(rank, near if rank in near else far, relay[rank]) for rank in range(RANKS))


def _position(rank: int, quad: Quad, relay: int) -> MeshPosition:
    a, b, c, d = sorted(quad)
    return MeshPosition(rank, quad.index(rank), quad, (a, b, c, d), relay)
