"""Topologies: derived facts, groups, JSON, and refusals of impossible ones."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topology import shapes
from tricomm.errors import InvalidArgument
from tricomm.topology.model import MAX_DEVICES, MAX_JSON_BYTES, MAX_LINKS, Topology

KNOWN = {
    "nvswitch": shapes.nvswitch(8),
    "ampere": shapes.nvswitch(4, links=12),
    "dgx1v": shapes.dgx1v(),
    "pcie": shapes.pcie(4),
    "no peers": shapes.pcie(4, peers=False),
    "pairs": shapes.pairs(4),
    "one": shapes.pcie(1),
    "shared": shapes.dgx1v().of([0, 0, 4, 1]),
}


def direct(rows: list[list[int]]) -> Topology:
    return Topology(tuple(map(tuple, rows)), ((True,) * len(rows),) * len(rows))


@pytest.mark.parametrize(
    ("topology", "kind", "full"),
    [
        (shapes.nvswitch(8), "nvswitch", True),
        (shapes.nvswitch(2), "nvswitch", True),
        (shapes.nvswitch(1), "fully_connected", True),
        (shapes.nvswitch(8).of([3, 3]), "fully_connected", True),
        (shapes.nvswitch(8).of([3, 3, 5]), "nvswitch", True),
        (shapes.dgx1v(), "hybrid_cube_mesh", False),
        (shapes.dgx1v().of([7, 2, 5, 0, 1, 3, 6, 4]), "hybrid_cube_mesh", False),
        (shapes.dgx1v().of([0, 1, 2, 3]), "fully_connected", True),
        (shapes.dgx1v().of([0, 0, 1, 1, 2, 2, 3, 3]), "fully_connected", True),
        (shapes.dgx1v().of([0, 4]), "fully_connected", True),
        (shapes.dgx1v().of([0, 5]), "pcie", False),
        (shapes.dgx1v().of([0, 1, 4, 5]), "partial", False),
        (shapes.dgx1v().of([0, 1, 6, 7]), "pairs", False),
        (shapes.dgx1v().of([0, 1, 2, 3, 4, 5, 6]), "partial", False),
        (shapes.dgx1v().of([0, 1, 2, 3, 4, 5, 6, 7, 0]), "partial", False),
        (shapes.pcie(4), "pcie", False),
        (shapes.pcie(1), "fully_connected", True),
        (shapes.pairs(2), "fully_connected", True),
        (shapes.pairs(4), "pairs", False),
        (shapes.pairs(8).of([0, 1, 0, 3, 2, 1]), "pairs", False),
        (shapes.pairs(4).of([0, 1, 2]), "partial", False),
        (direct([[0, 1, 0], [1, 0, 1], [0, 1, 0]]), "partial", False),
    ],
)
def test_kind_and_full_connection(topology: Topology, kind: str, full: bool) -> None:
    assert (topology.kind, topology.fully_connected) == (kind, full)


def test_peer_access_is_apart_from_links() -> None:
    assert shapes.pcie(4).all_peers and not shapes.pcie(4, peers=False).all_peers
    assert shapes.pairs(4).all_peers and not shapes.pairs(4, peers=False).all_peers
    assert shapes.pairs(4, peers=False).of([2, 3]).all_peers
    linked = Topology(((0, 4), (4, 0)), ((True, True), (False, True)))
    assert linked.fully_connected and not linked.all_peers


def test_a_group_is_in_rank_order_and_may_share_devices() -> None:
    box = Topology(shapes.dgx1v().links, shapes.dgx1v().peers, names=tuple("abcdefgh"))
    group = box.of([5, 1, 5, 7])
    assert group.links == ((0, 2, 0, 1), (2, 0, 2, 0), (0, 2, 0, 1), (1, 0, 1, 0))
    assert group.peers[0] == (True, True, True, True) and group.peers[1] == (True, True, True, False)
    assert group.names == ("f", "b", "f", "h") and group.devices == (0, 1, 0, 2)
    assert group.of([3, 0, 2]) == box.of([7, 5, 5])
    assert box.of([4, 4]) == box.of([4, 4]).of([1, 0])
    assert box.of(range(8)) == box


@pytest.mark.parametrize("devices", [[], [8], [-1], [True, 0], ["0"], [0] * (MAX_DEVICES + 1)])
def test_a_group_of_unknown_devices(devices: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="not in this topology|1 to 64"):
        shapes.dgx1v().of(devices)


def test_the_digest_covers_everything_but_the_names() -> None:
    base = shapes.pairs(4)
    named = Topology(base.links, base.peers, names=("x",) * 4)
    assert named.digest == base.digest and named != base
    different = [*KNOWN.values(), base.of([0, 2, 1, 3]), base.of([0, 1, 2, 2]), shapes.pairs(4, links=5)]
    different += [shapes.pcie(2), shapes.pcie(1).of([0, 0]), Topology(shapes.nvswitch(8).links, ((True,) * 8,) * 8)]
    assert len({t.digest for t in different}) == len({t.canonical for t in different}) == len(different)
    assert all(len(t.digest) == 16 and int(t.digest, 16) >= 0 for t in different)


def test_a_digest_is_stable() -> None:
    """Tuned tables are stored under the digest."""
    assert shapes.dgx1v().digest == "44450c3780dc100f"
    assert shapes.pcie(1).canonical == "devices 0; links 0; peers 1; direct"


@pytest.mark.parametrize("name", KNOWN)
def test_json_there_and_back(name: str, tmp_path: Path) -> None:
    text = KNOWN[name].dumps()
    assert Topology.loads(text) == KNOWN[name]
    (tmp_path / "box.json").write_text(text)
    assert Topology.load(tmp_path / "box.json") == KNOWN[name]
    assert json.loads(text)["schema"] == "tricomm-topology-1" and json.loads(text)["kind"] == KNOWN[name].kind


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 2**32), st.data())
def test_any_group_of_any_box_goes_through_json(count: int, seed: int, data: st.DataObject) -> None:
    chance = random.Random(seed)
    links = [[0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            links[i][j] = links[j][i] = chance.choice([0, 0, 1, 2, MAX_LINKS])
    peers = [[i == j or chance.random() < 0.7 for j in range(count)] for i in range(count)]
    box = Topology(tuple(map(tuple, links)), tuple(map(tuple, peers)), names=("Ünï GPU",) * count)
    ranks = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    group = box.of(ranks)
    assert Topology.loads(group.dumps()) == group
    for a, i in enumerate(ranks):
        for b, j in enumerate(ranks):
            assert group.links[a][b] == links[i][j] and group.peers[a][b] == peers[i][j]
            assert (group.devices[a] == group.devices[b]) == (i == j)


def changed(**fields: Any) -> str:
    """A bridged pair's JSON with some fields changed, or taken away where they are None."""
    whole = {**json.loads(shapes.pairs(2).dumps()), **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not None})


GOOD = [[True, True], [True, True]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ('{"schema": 1, "schema": 1}', "schema is given twice"),
        ("[]", "a JSON object is needed, not a list"),
        ("3", "not a int"),
        (" " * (MAX_JSON_BYTES + 1), "more than 1048576 characters"),
        (changed(schema=None), "schema None is not known; it must be 'tricomm-topology-1'"),
        (changed(schema="tricomm-topology-2"), "schema 'tricomm-topology-2' is not known"),
        (changed(schema=[1]), "is not known"),
        ('{"schema": "tricomm-topology-1", "unknown": "no GPU"}', "of a machine whose links are not known: no GPU"),
        (changed(links=None), "there is no links; needed: links, peers, switched"),
        (changed(peers=None, switched=None), "there is no peers, switched"),
        (changed(link=[[0]]), "link is not known"),
        (changed(links=3), "links must be a list of rows"),
        (changed(links=[0, 4]), "links must be a list of rows"),
        (changed(peers=[[True], 1]), "peers must be a list of rows"),
        (changed(names="ab"), "names must be a list"),
        (changed(devices={"0": 1}), "devices must be a list"),
        (changed(links=[]), "0 devices; there may be 1 to 64"),
        (changed(links=[[0] * 65] * 65), "65 devices; there may be 1 to 64"),
        (changed(links=[[0, 4], [4]]), r"links has rows of \[2, 1\] entries; 2 rows of 2 are needed"),
        (changed(links=[[0, 4, 1], [4, 0, 1]]), r"rows of \[3, 3\]"),
        (changed(peers=[[True, True]]), r"peers has rows of \[2\] entries"),
        (changed(links=[[0, 4], [3, 0]]), r"links\[0\]\[1\]=4 and links\[1\]\[0\]=3: an NVLink joins both"),
        (changed(links=[[1, 4], [4, 0]]), r"links\[0\]\[0\]=1, .* device 0, which needs no link to itself"),
        (changed(peers=[[True, True], [True, False]]), r"peers\[1\]\[1\]=False: device 1"),
        (changed(links=[[0, -1], [-1, 0]]), r"links\[0\]\[1\]=-1: a pair has 0 to 64"),
        (changed(links=[[0, 65], [65, 0]]), "=65: a pair has 0 to 64"),
        (changed(links=[[0, 4.0], [4.0, 0]]), r"links\[0\]\[1\]=4.0 is not a whole number"),
        (changed(links=[[0, True], [True, 0]]), "=True is not a whole number"),
        (changed(links=[[0, "4"], ["4", 0]]), "='4' is not a whole number"),
        (changed(links=[[0, [4]], [[4], 0]]), "is not a whole number"),
        (changed(peers=[[1, 1], [1, 1]]), r"peers\[0\]\[0\]=1 is not true or false"),
        (changed(switched=1), "switched=1 must be true or false"),
        (changed(switched=True, links=[[0, 0], [0, 0]]), "switched, but 0 and 1 have no links"),
        (changed(switched=True, links=[[0]], peers=[[True]]), "switched, but there is one device only"),
        (changed(names=["a"]), "names must be 2 printable strings"),
        (changed(names=["a", 1]), "names must be 2 printable strings"),
        (changed(names=["a", "\x1b[2J"]), "names must be 2 printable strings"),
        (changed(devices=[0]), "devices must be 2 whole numbers"),
        (changed(devices=[0, False]), "devices must be 2 whole numbers"),
        (changed(devices=[0, 0]), r"links\[0\]\[1\]=4, peers\[0\]\[1\]=True: 0 and 1 on one device"),
        (changed(devices=[0, 0], links=[[0, 0], [0, 0]], peers=[[True, False], [True, True]]), "on one device"),
        (
            changed(devices=[0, 1, 0], links=[[0, 1, 0], [1, 0, 2], [0, 2, 0]], peers=[[True] * 3] * 3),
            "row 1, column 2 is not as row 1, column 0, which are the same devices",
        ),
        (
            changed(
                devices=[0, 1, 0],
                links=[[0, 1, 0], [1, 0, 1], [0, 1, 0]],
                peers=[[True] * 3, [True] * 3, [True, False, True]],
            ),
            "row 2, column 1 is not as row 0, column 1",
        ),
        (changed(kind="pcie"), "says kind 'pcie', but its links make it 'fully_connected'"),
        (changed(kind=["fully_connected"]), "says kind"),
    ],
)
def test_an_invalid_topology_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        Topology.loads(text, "box 7")
    assert "box 7" in str(caught.value)


def test_optional_fields() -> None:
    result = Topology.loads(changed(kind=None))
    assert result == shapes.pairs(2) and result.names == () and result.devices == (0, 1)
    assert Topology.loads(changed(devices=[7, -3])) == result


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none", tmp_path / "binary", "a\0b"):
        with pytest.raises(InvalidArgument, match="topology file .* cannot be read"):
            Topology.load(path)
    with pytest.raises(InvalidArgument, match="none' cannot be read: No such file or directory$"):
        Topology.load(tmp_path / "none")
    (tmp_path / "empty").write_text("")
    with pytest.raises(InvalidArgument, match="empty' is not JSON"):
        Topology.load(tmp_path / "empty")


def test_lists_are_taken_and_nothing_can_be_changed() -> None:
    result = Topology([[0, 1], [1, 0]], GOOD)  # type: ignore[arg-type]
    assert result == direct([[0, 1], [1, 0]]) and hash(result) == hash(direct([[0, 1], [1, 0]]))
    assert len(result) == 2
    with pytest.raises(AttributeError):
        result.switched = True  # type: ignore[misc]
