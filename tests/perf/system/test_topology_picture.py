"""`tricomm info --topology`: the picture of a file or this machine, and the message without a topology."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.topology import shapes
from tricomm.cli import cli
from tricomm.perf.system import info
from tricomm.perf.system.topology_picture import draw
from tricomm.topology import discovery
from tricomm.topology.discovery import Discovery
from tricomm.topology.model import Topology

DGX1V = """\
        GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7
  GPU0     X   NV1   NV1   NV2   NV2     -     -     -
  GPU1   NV1     X   NV2   NV1     -   NV2     -     -
  GPU2   NV1   NV2     X   NV2     -     -   NV1     -
  GPU3   NV2   NV1   NV2     X     -     -     -   NV1
  GPU4   NV2     -     -     -     X   NV1   NV1   NV2
  GPU5     -   NV2     -     -   NV1     X   NV2   NV1
  GPU6     -     -   NV1     -   NV1   NV2     X   NV2
  GPU7     -     -     -   NV1   NV2   NV1   NV2     X

X itself; NV# so many NVLinks; - no peer access

8 devices
kind    hybrid_cube_mesh: two linked quads, joined GPU by GPU
digest  44450c3780dc100f

    0 --- 1       4 --- 5
    | \\ / |       | \\ / |
    | / \\ |       | / \\ |
    2 --- 3       6 --- 7

relays  0 =NV2= 4, 1 =NV2= 5, 2 =NV1= 6, 3 =NV1= 7
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["info", *arguments])


@pytest.fixture
def box(tmp_path: Path) -> Path:
    path = tmp_path / "box.json"
    path.write_text(shapes.dgx1v().dumps())
    return path


def test_a_file_is_drawn(box: Path) -> None:
    done = run("--topology", str(box))
    assert (done.exit_code, done.output) == (0, DGX1V)


def test_the_squares_follow_the_links_not_the_numbers() -> None:
    drawn = draw(shapes.dgx1v().of([7, 2, 5, 0, 1, 3, 6, 4])).splitlines()
    # Rank 0 is on GPU 7 with 5, 6 and 4 around it: ranks 2, 6, 7. Its relay is on GPU 3: rank 5.
    assert "    0 --- 2       5 --- 4" in drawn and "    6 --- 7       1 --- 3" in drawn
    assert "relays  0 =NV1= 5, 2 =NV2= 4, 6 =NV1= 1, 7 =NV2= 3" in drawn


MIXED = """\
        GPU0  GPU1  GPU2  GPU3
  GPU0     X   NV2   PCI     -
  GPU1  NV2!     X   NV3     -
  GPU2   PCI   NV3     X   PCI
  GPU3     -   PCI   PCI     X

X itself; NV# so many NVLinks; PCI peer access without NVLink (PIX to SYS; which one is unknown); - no peer access; \
! linked, but without peer access

4 devices (A, B)
kind    partial: NVLink between some pairs
digest  ad4379d40f8b6d20
fabric  completed, not told
note    beware"""


def test_every_way_to_be_connected() -> None:
    links = ((0, 2, 0, 0), (2, 0, 3, 0), (0, 3, 0, 0), (0, 0, 0, 0))
    reach = ("1110", "0110", "1111", "0111")
    peers = tuple(tuple(mark == "1" for mark in row) for row in reach)
    mixed = Topology(links, peers, names=("B", "A", "B", ""))
    assert draw(mixed, ["beware"], ["completed", "not told"]) == MIXED


def test_switches_and_shared_devices() -> None:
    drawn = draw(shapes.nvswitch(12)).splitlines()
    assert drawn[1] == "   GPU0      X" + "    NVS" * 11 and "12 devices, 18 NVLinks a pair" in drawn
    assert draw(shapes.nvswitch(2).of([0, 0, 1])).splitlines()[:4] == [
        "          0:GPU0  1:GPU0  2:GPU1",
        "  0:GPU0       X       =     NVS",
        "  1:GPU0       =       X     NVS",
        "  2:GPU1     NVS     NVS       X",
    ]
    assert "3 ranks on 2 devices" in draw(shapes.nvswitch(2).of([0, 0, 1]))
    assert "kind    fully_connected: NVLink between every pair" in draw(shapes.pcie(1))


@pytest.mark.parametrize("topology", [shapes.pcie(2), shapes.pairs(4), shapes.dgx1v().of([0, 1, 2, 3])])
def test_every_kind_of_link_has_a_description(topology: Topology) -> None:
    assert f"kind    {topology.kind}: " in draw(topology)


def test_a_topology_printed_as_json_can_be_read(box: Path) -> None:
    done = run("--topology", str(box), "--json")
    assert done.exit_code == 0 and Topology.loads(done.output) == shapes.dgx1v()


@pytest.mark.parametrize(("text", "words"), [("{}", "schema None"), ("", "is not JSON"), (None, "No such file")])
def test_a_bad_file_is_a_usage_error(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    for more in ([], ["--json"]):
        done = run("--topology", str(path), *more)
        assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output


def test_a_machine_without_gpus_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.TorchCuda, "device_count", lambda _: 0)
    done = run("--topology")
    assert (done.exit_code, done.output) == (0, "no topology: this process sees no CUDA device\n")
    done = run("--topology", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output) == {"schema": "tricomm-topology-1", "unknown": "this process sees no CUDA device"}
    assert info.collect()["topology"] == "not available: this process sees no CUDA device"


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Discovery(shapes.pairs(4), notes=("look here",), fabric=("completed",) * 4)
    monkeypatch.setattr(discovery, "read", lambda: result)
    done = run("--topology")
    assert done.output == draw(shapes.pairs(4), ["look here"], ["completed"]) + "\n"
    done = run("--json", "--topology")
    assert Topology.loads(done.stdout) == shapes.pairs(4) and done.stderr == "look here\n"
    assert info.collect()["topology"] == "pairs"
