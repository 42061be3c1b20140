"""Selection is a pure function: equal inputs, equal choices, and a reason that names what decided."""

import json
from importlib.resources import files

import pytest

from tricomm import selection
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout, registry
from tricomm.kernels.collectives import COLLECTIVES
from tricomm.selection import Site, choose

WORLDS = [1, 2, 3, 4, 5, 8]
DEVICES = ["cpu", "sm_80", "sm_90", "sm_100"]
SIZES = [0, 1, 8, 4096, 16384, 16385, 65536, 1 << 20, 1 << 24, 1 << 31]


def site(device="sm_90", world_size=4, arena=64 << 20, **more):
    return Site(device, world_size, layout.plan(world_size, arena), more.pop("max_blocks", 64), **more)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_size_has_a_kernel_whose_tile_fits_its_room(device, world_size):
    for collective in COLLECTIVES:
        for nbytes in SIZES:
            choice = choose(site(device, world_size), collective, nbytes)
            kernel = registry.find(collective, choice.algorithm, choice.protocol)
            assert 1 <= choice.blocks <= layout.MAX_BLOCKS
            assert choice.block <= layout.plan(world_size, 64 << 20).largest_tile(kernel.algorithm, kernel.protocol)
            assert choice.block & (choice.block - 1) == 0
            assert choice == choose(site(device, world_size), collective, nbytes)


def test_small_goes_by_ll_and_large_by_simple_two_shot():
    assert (choose(site(), "all_reduce", 1024).algorithm, choose(site(), "all_reduce", 1024).protocol) == (
        "one_shot",
        "ll",
    )
    large = choose(site(), "all_reduce", 1 << 26)
    assert (large.algorithm, large.protocol) == ("two_shot", "simple")


def test_the_reason_names_table_and_row_or_who_forced_it():
    choice = choose(site(), "all_reduce", 1024)
    assert "'hopper' row 2" in choice.reason and choice.table == "hopper" and choice.row == 2
    forced = choose(site(), "all_reduce", 1024, algorithm="two_shot")
    assert "algorithm=two_shot forced" in forced.reason and forced.row is None
    assert forced.protocol in ("ll", "simple")


@pytest.mark.parametrize(
    ("collective", "algorithm", "protocol", "words"),
    [
        ("all_reduce", "ring", None, "no ring/any kernel; there is one_shot/ll"),
        ("all_reduce", None, "ll128", "no any/ll128 kernel"),
        ("all_gather", "two_shot", "ll", "no two_shot/ll kernel; there is one_shot/ll, one_shot/simple"),
        ("all_to_nobody", None, None, "unknown; there is all_reduce"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(collective, algorithm, protocol, words):
    with pytest.raises(InvalidArgument, match=words):
        choose(site(), collective, 1024, algorithm, protocol)


def test_the_grid_is_never_larger_than_what_is_resident():
    assert choose(site(max_blocks=3), "all_reduce", 1 << 24).blocks == 3
    assert choose(site(max_blocks=3, blocks=9), "all_reduce", 1 << 24).blocks == 3


def test_the_shipped_table_is_sound():
    data = json.loads(files("tricomm").joinpath("tables/default.json").read_text())
    for table in data["tables"]:
        for row in table["rows"]:
            registry.find(row["collective"], row["algorithm"], row["protocol"])
        for collective in set(COLLECTIVES) - {"barrier"}:
            last = [r for r in table["rows"] if r["collective"] == collective][-1]
            everywhere = table.get("topology") != "hybrid_cube_mesh"
            assert last["max_bytes"] is None
            assert last["world_size"] == layout.MAX_WORLD_SIZE or not everywhere


def test_a_kernel_of_a_cube_mesh_is_picked_on_one_only():
    for kind in ("", "nvswitch", "fully_connected", "pairs", "pcie", "partial", "hybrid_cube_mesh"):
        for nbytes in SIZES:
            for collective in ("all_reduce", "all_gather"):
                choice = choose(site("sm_70", 8, topology=kind), collective, nbytes)
                assert choice.algorithm.startswith("hybrid_cube_mesh") == (kind == "hybrid_cube_mesh"), (kind, choice)


def test_where_not_all_ranks_reach_each_other_only_what_goes_around_that_is_left():
    here = site("sm_70", 8, topology="hybrid_cube_mesh", reachable=False)
    assert choose(here, "all_gather", 1024).algorithm == "hybrid_cube_mesh"
    for collective, algorithm in (("broadcast", None), ("all_reduce", "one_shot"), ("barrier", None)):
        with pytest.raises(InvalidArgument, match="reach|cube mesh"):
            choose(here, collective, 1024, algorithm)


def test_a_cube_mesh_of_fewer_ranks_is_refused_with_how_many_it_needs():
    with pytest.raises(InvalidArgument, match="needs 8 ranks on a hybrid cube mesh; here are 4 ranks"):
        choose(site(), "all_reduce", 1024, "hybrid_cube_mesh")


def test_the_runner_up_is_named():
    assert choose(site(), "all_reduce", 1024).runner_up == "two_shot/ll"
    assert choose(site(), "all_reduce", 1 << 30).runner_up == ""


def test_a_row_may_be_for_graphs_only(monkeypatch):
    row = {"collective": "all_reduce", "world_size": 16, "max_bytes": None, "algorithm": "one_shot"}
    rows = [{**row, "protocol": "simple", "mode": "graph"}, {**row, "protocol": "ll"}]
    monkeypatch.setattr(selection, "_tables", lambda: [{"name": "mine", "device": "cpu", "rows": rows}])
    found = [choose(site("cpu"), "all_reduce", 8, mode=mode).protocol for mode in ("graph", "eager")]
    assert found == ["simple", "ll"]
