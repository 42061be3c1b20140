"""Topologies of real machines."""

from collections.abc import Callable
from functools import cache

from tricomm.errors import InvalidArgument
from tricomm.topology.mesh import DGX1V_LINKS
from tricomm.topology.model import MAX_DEVICES, Topology


def nvswitch(count: int, links: int = 18) -> Topology:
    """`count` GPUs joined by NVSwitches, each with `links` NVLinks (Volta 6, Ampere 12, Hopper and Blackwell 18)."""
    return _make(count, lambda i, j: links, lambda i, j: True, switched=count > 1)


@cache
def dgx1v() -> Topology:
    """A DGX-1 with 8 V100: quads {0..3} and {4..7}, relay of i is i + 4. Only linked GPUs reach each other."""
    return _make(8, lambda i, j: DGX1V_LINKS[i][j], lambda i, j: DGX1V_LINKS[i][j] > 0)


def pcie(count: int, peers: bool = True) -> Topology:
    """`count` GPUs without NVLink; `peers`: whether they reach each other's memory over PCIe."""
    return _make(count, lambda i, j: 0, lambda i, j: peers)


def pairs(count: int, links: int = 4, peers: bool = True) -> Topology:
    """`count` GPUs, an even number, bridged in pairs (0 with 1, 2 with 3...) by `links` NVLinks.

    `peers`: whether those that are not bridged reach each other over PCIe.
    """
    if count % 2:
        raise InvalidArgument(f"{count} GPUs cannot be bridged in pairs; an even number can")
    bridged = [i ^ 1 for i in range(count)]
    return _make(count, lambda i, j: links * (j == bridged[i]), lambda i, j: peers or j == bridged[i])


def _make(
    count: int, links: Callable[[int, int], int], peers: Callable[[int, int], bool], switched: bool = False
) -> Topology:
    if not 1 <= count <= MAX_DEVICES:
        raise InvalidArgument(f"{count} devices; there may be 1 to {MAX_DEVICES}")
    size = range(count)
    return Topology(
        links=tuple(tuple(0 if i == j else links(i, j) for j in size) for i in size),
        peers=tuple(tuple(i == j or peers(i, j) for j in size) for i in size),
        switched=switched,
    )
