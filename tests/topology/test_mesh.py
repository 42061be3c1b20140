"""The hybrid cube mesh: the link tables that form one, and the consistency of all ranks' positions."""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest

from tests.topology import shapes
from tricomm.topology.mesh import MeshPosition, positions
from tricomm.topology.model import Topology

REACH = ((True,) * 8,) * 8
Edges = frozenset[tuple[int, int]]

# `nvidia-smi topo -m` of three V100 boxes: a DGX-1, one rented from Alibaba, one from Azure.
REAL = {
    "dgx1": ("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120"),
    "alibaba": ("01120020", "10210002", "12021000", "21200100", "00100212", "00012021", "20001201", "02002110"),
    "azure": ("02120010", "20210001", "12012000", "21100200", "00200112", "00021021", "10001202", "01002120"),
}


def graph(edges: Edges, size: int = 8) -> list[list[int]]:
    links = [[0] * size for _ in range(size)]
    for i, j in edges:
        links[i][j] = links[j][i] = 1
    return links


def edges_of(quads: tuple[tuple[int, ...], tuple[int, ...]]) -> Edges:
    """Two quads, and a link from each rank to the one at its position in the other."""
    near, far = quads
    inside = [pair for quad in quads for pair in combinations(sorted(quad), 2)]
    return frozenset(inside + [(min(pair), max(pair)) for pair in zip(near, far, strict=True)])


def labellings() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for others in combinations(range(1, 8), 3):
        near = (0, *others)
        for far in permutations(sorted(set(range(8)) - set(near))):
            yield near, far


def cubic(chosen: Edges = frozenset(), degree: tuple[int, ...] = (0,) * 8) -> Iterator[Edges]:
    """Every labelled graph in which 8 vertices have 3 neighbours each; their complements have 4 each."""
    first = next((v for v in range(8) if degree[v] < 3), None)
    if first is None:
        yield chosen
        return
    # Vertices before `first` are full, so its missing neighbours are above it, and each graph is made once.
    open_ones = [v for v in range(first + 1, 8) if degree[v] < 3]
    for others in combinations(open_ones, 3 - degree[first]):
        more = frozenset((first, other) for other in others)
        after = tuple(3 if v == first else degree[v] + (v in others) for v in range(8))
        yield from cubic(chosen | more, after)


def quad(position: MeshPosition) -> list[int]:
    """The 3 peers in the quad by edge colour, in the order of `kernels/device/mesh.py`."""
    return [position.quad_by_position[position.position ^ step] for step in (1, 2, 3)]


def check(mesh: tuple[MeshPosition, ...], links: Sequence[Sequence[int]]) -> None:
    """Check everything that kernels rely on."""
    assert [position.rank for position in mesh] == list(range(8))
    for position in mesh:
        x, peers = position.rank, quad(position)
        assert sorted([x, *peers]) == sorted(position.quad_by_position) == list(position.order)
        assert position.quad_by_position[position.position] == x
        for k, y in enumerate(peers):
            assert quad(mesh[y])[k] == x, "an edge colour is the same from both ends"
            assert mesh[y].quad_by_position == position.quad_by_position
            assert links[x][y]
        other = mesh[position.relay]
        assert other.relay == x and other.position == position.position and links[x][other.rank]
        assert set(other.order) == set(range(8)) - set(position.order)
        assert sum(count > 0 for count in links[x]) == 4, "three in the quad, and the relay: every link is used"


def test_all_840_labellings_are_one_and_every_place_is_right() -> None:
    seen = set()
    for near, far in labellings():
        edges = edges_of((near, far))
        seen.add(edges)
        links = graph(edges)
        mesh = positions(links)
        assert mesh is not None
        check(mesh, links)
        assert mesh[0].quad_by_position == near and mesh[far[0]].quad_by_position == far
        assert [mesh[rank].relay for rank in near] == list(far)
    assert len(seen) == 840


def test_of_all_4_regular_graphs_exactly_those_pass() -> None:
    meshes = {edges_of(quads) for quads in labellings()}
    pairs = frozenset(combinations(range(8), 2))
    passed, count = set(), 0
    for complement in cubic():
        count += 1
        edges = pairs - complement
        if positions(graph(edges)) is not None:
            passed.add(edges)
    assert count == 19355
    assert passed == meshes


def test_a_link_more_or_less_is_no_mesh() -> None:
    whole = edges_of(((0, 1, 2, 3), (4, 5, 6, 7)))
    for pair in combinations(range(8), 2):
        assert positions(graph(whole ^ {pair})) is None, pair


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_fewer_than_8_devices_are_no_mesh(size: int) -> None:
    assert positions(graph(frozenset(combinations(range(size), 2)), size)) is None


@pytest.mark.parametrize("shape", [shapes.nvswitch(8), shapes.pcie(8), shapes.pairs(8), shapes.nvswitch(16)])
def test_other_shapes_are_no_mesh(shape: Topology) -> None:
    assert positions(shape.links) is None


def test_two_meshes_are_not_one() -> None:
    mesh = edges_of(((0, 1, 2, 3), (4, 5, 6, 7)))
    assert positions(graph(mesh | {(i + 8, j + 8) for i, j in mesh}, 16)) is None
    assert positions(graph(mesh, 9)) is None


def test_ranks_that_share_devices_are_no_mesh() -> None:
    assert positions(shapes.dgx1v().of([0, 1, 2, 3, 4, 5, 6, 6]).links) is None
    assert positions(shapes.nvswitch(4).of([0, 1, 2, 3] * 2).links) is None


@pytest.mark.parametrize("name", REAL)
def test_real_boxes(name: str) -> None:
    links = tuple(tuple(map(int, row)) for row in REAL[name])
    assert all(sum(row) == 6 for row in links), "a V100 has 6 links"
    assert Topology(links, REACH).kind == "hybrid_cube_mesh"
    mesh = positions(links)
    assert mesh is not None
    check(mesh, links)
    relays = {"dgx1": [4, 5, 6, 7], "alibaba": [6, 7, 4, 5], "azure": [6, 7, 4, 5]}[name]
    assert [mesh[rank].relay for rank in range(4)] == relays
    assert mesh[0].quad_by_position == (0, 1, 2, 3)


def test_the_dgx_1_as_shipped() -> None:
    topology = shapes.dgx1v()
    assert topology.links == tuple(tuple(map(int, row)) for row in REAL["dgx1"])
    mesh = positions(topology.links)
    assert mesh is not None
    assert mesh[0] == MeshPosition(0, 0, (0, 1, 2, 3), (0, 1, 2, 3), 4)
    assert mesh[6] == MeshPosition(6, 2, (4, 5, 6, 7), (4, 5, 6, 7), 2)
    assert [quad(position) for position in mesh[:4]] == [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    assert [position.relay for position in mesh] == [4, 5, 6, 7, 0, 1, 2, 3]
