"""Selection is a pure function: equal inputs, equal choices, and a reason that names what decided."""

import re
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.marks import compiles
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout, multimem, wide_words
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.policy import row_shapes, selection
from tricomm.policy.launch_shapes import check_grid, has_compact_form
from tricomm.policy.selection import choose
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import ShippedTable, TableRow

_ANY = ("all_reduce", 16, None)

WORLDS = [1, 2, 3, 4, 5, 8]
DEVICES = ["cpu", "sm_80", "sm_90", "sm_100"]
SIZES = [0, 1, 8, 4096, 16384, 16385, 65536, 1 << 20, 1 << 24, 1 << 31]


def site(device="sm_90", world_size=4, arena=64 << 20, **more):
    return SelectionFacts(device, world_size, layout.plan(world_size, arena), more.pop("max_blocks", 64), **more)


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


def test_small_calls_use_ll_and_large_ones_simple_two_shot():
    assert (choose(site(), "all_reduce", 1024).algorithm, choose(site(), "all_reduce", 1024).protocol) == (
        "one_shot",
        "ll",
    )
    large = choose(site(), "all_reduce", 1 << 26)
    assert (large.algorithm, large.protocol) == ("two_shot", "simple")


def test_the_reason_names_the_table_row_or_the_option_that_forced_it():
    choice = choose(site(), "all_reduce", 1024)
    assert "'hopper' row 6" in choice.reason and choice.table == "hopper" and choice.row == 6
    forced = choose(site(), "all_reduce", 1024, algorithm="two_shot")
    assert "algorithm=two_shot forced" in forced.reason and forced.row is None
    assert forced.protocol in ("ll", "ll128", "simple")


@pytest.mark.parametrize(
    ("collective", "algorithm", "protocol", "words"),
    [
        ("all_reduce", "ring", None, "no ring kernel; there is one_shot/ll"),
        ("all_reduce", None, "ll64", "no ll64 kernel"),
        ("all_gather", "two_shot", "ll", "no two_shot/ll kernel; there is one_shot/ll, (one_shot/ll128, )?one_shot"),
        ("all_to_nobody", None, None, "unknown; there is all_reduce"),
    ],
)
def test_an_unknown_kernel_is_refused_with_a_list_of_kernels(collective, algorithm, protocol, words):
    with pytest.raises(InvalidArgument, match=words):
        choose(site(), collective, 1024, algorithm, protocol)


def test_the_grid_never_exceeds_the_resident_blocks():
    assert choose(site(max_blocks=3), "all_reduce", 1 << 24).blocks == 3
    check_grid(3, 3, None)
    for limit, words in ((None, "processors"), (3, "Options.max_blocks")):
        with pytest.raises(InvalidArgument, match=rf"blocks=9: at most 3 .*{words}.*force 1 to 3"):
            check_grid(9, 3, limit)


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_a_forced_tile_that_a_kernel_cannot_use_is_refused_with_those_that_it_can(device):
    for kernel in (
        k for k in registry.of("all_reduce", 4) if device == "cpu" or not k.wide or wide_words.COMPILES.value
    ):
        here = site(device, arena=1 << 20)
        for tile in (1 << n for n in range(1, 21)):
            names = (kernel.collective, 1 << 20, kernel.algorithm, kernel.protocol)
            try:
                assert choose(replace(here, tile=tile), *names).block == tile
            except InvalidArgument as error:
                least, most = map(int, re.findall(r"tiles of (\d+) to (\d+) words", str(error))[0])
                assert not least <= tile <= most
                for good in (least, most):
                    assert choose(replace(here, tile=good), *names).block == good
    few = site("sm_90", tile=512, beside=True)
    with pytest.raises(InvalidArgument, match="tiles of 32 to 256 words .* fit into 128 registers"):
        choose(few, "all_reduce", 1024, protocol="ll")
    with pytest.raises(InvalidArgument, match="tile=4096: .* of send one_shot/simple"):
        choose(site(arena=1 << 20, tile=4096), "send", 1 << 20, protocol="simple")


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_a_forced_tile_of_rows_is_the_one_that_runs_or_is_refused(device):
    """Also a tile longer than a row; without a forced protocol a kernel that supports the tile is chosen."""
    here, refused = site(device, arena=1 << 20), 0
    wide = ("ll128",) * (device == "cpu" or wide_words.COMPILES.value)
    for tile in (1 << n for n in range(1, 21)):
        for names in ((None, None), ("one_shot", "ll"), *(("two_shot", protocol) for protocol in wide)):
            asked = (FUSED, 16, 256, 3, names)
            try:
                choice = row_shapes.choose(replace(here, tile=tile), *asked)
                assert choice.block == tile and (device == "cpu" or choice.warps * 32 <= tile)
            except InvalidArgument as error:
                refused += 1
                least, most = map(
                    int, re.findall(r"tiles of (\d+) to (\d+) words .* of all_reduce_rms_norm", str(error))[0]
                )
                assert not least <= tile <= most
                for good in (least, most):
                    assert row_shapes.choose(replace(here, tile=good), *asked).block == good
    assert refused > 10


def shapes_of_rows(hidden, here, quantize=""):
    """The tiles and warps of all fused kernels that take rows of `hidden` elements, of 16 and 32 bits."""
    for bits in (16, 32):
        for kernel in filter(compiles, registry.of(FUSED, here.world_size)):
            choice = row_shapes.choose(here, FUSED, bits, hidden, 3, (kernel.algorithm, kernel.protocol), quantize)
            if not isinstance(choice, str):
                yield choice


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
@pytest.mark.parametrize("quantize", ["", "nvfp4"])
def test_tiles_and_warps_of_rows_are_powers_of_two(device, quantize):
    """Triton supports no others."""
    count = 0
    for world_size in (2, 3, 8, 15, 16):
        for hidden in range(16, row_shapes.MOST_HIDDEN + 1, 16 * 61):
            for choice in shapes_of_rows(hidden, site(device, world_size), quantize):
                count += 1
                assert choice.block.bit_count() == choice.warps.bit_count() == 1
    assert count > 300


def test_a_forced_tile_that_makes_too_many_of_a_row_is_refused():
    """A row's tiles are unrolled in the code, and too many take the compiler minutes."""
    two_shots = "tile=32: tiles of 128 to .* make at most 32 of a row of 16384"
    with pytest.raises(InvalidArgument, match=two_shots):
        row_shapes.choose(site(tile=32, world_size=8), FUSED, 16, 16384, 3, ("two_shot", "ll"))
    with pytest.raises(InvalidArgument, match="tiles of 256 to .* make at most 16 of a row of 16384"):
        row_shapes.choose(site(tile=32, world_size=8), FUSED, 16, 16384, 3, (None, None))
    assert row_shapes.choose(site(tile=128, world_size=8), FUSED, 16, 16384, 3, (None, None)).block == 128
    assert row_shapes.choose(site("cpu", tile=32, world_size=8), FUSED, 16, 16384, 3, (None, None)).block == 32


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16])
def test_plain_data_of_a_megabyte_or_more_keep_half_a_megabyte_in_flight(world_size):
    for nbytes in (1 << 20, 3 << 20, 8 << 20, 64 << 20):
        choice = choose(site(world_size=world_size), "all_reduce", nbytes, "two_shot", "simple")
        assert choice.blocks * choice.block * 8 * world_size >= 512 << 10, "a tile of every rank"
        shard = site(world_size=world_size).layout.buffer_words("two_shot", "simple", "all_reduce")
        tiles = -(-min(layout.alike(n := nbytes // 8 // world_size, shard, choice.block)[1], n) // choice.block)
        rounds = -(-tiles // choice.blocks)
        assert 0 <= rounds * choice.blocks - tiles < rounds, "nearly all blocks have the same number of tiles"


def test_the_grid_of_a_long_message_is_that_of_equal_chunks():
    for kernel in ("two_shot", "multicast"):
        blocks = choose(site(world_size=8, no_multicast=""), "all_reduce", 16 << 20, kernel, "simple").blocks
        assert blocks == 64, "of two chunks of 8 MiB, though 8.75 fit"


def test_the_shipped_table_is_sound():
    for table in selection.shipped_tables():
        for collective in set(COLLECTIVES) - {"barrier"}:
            last = [r for r in table.rows if r.collective == collective][-1]
            assert last.max_bytes is None
            assert last.world_size == layout.MAX_WORLD_SIZE or table.topology == "hybrid_cube_mesh"


def test_a_kernel_of_a_cube_mesh_is_picked_on_one_only():
    for kind in ("", "nvswitch", "fully_connected", "pairs", "pcie", "partial", "hybrid_cube_mesh"):
        for nbytes in SIZES:
            for collective in ("all_reduce", "all_gather"):
                choice = choose(site("sm_70", 8, topology=kind), collective, nbytes)
                assert choice.algorithm.startswith("hybrid_cube_mesh") == (kind == "hybrid_cube_mesh"), (kind, choice)


def test_only_cube_mesh_kernels_are_left_if_ranks_do_not_all_reach_each_other():
    here = site("sm_70", 8, topology="hybrid_cube_mesh", reachable=False)
    assert choose(here, "all_gather", 1024).algorithm == "hybrid_cube_mesh"
    for collective, algorithm in (("broadcast", None), ("all_reduce", "one_shot"), ("barrier", None)):
        with pytest.raises(InvalidArgument, match="reach|cube mesh"):
            choose(here, collective, 1024, algorithm)


def test_a_cube_mesh_of_fewer_ranks_is_refused_with_how_many_it_needs():
    with pytest.raises(InvalidArgument, match="needs 8 ranks on a hybrid cube mesh; here are 4 ranks"):
        choose(site(), "all_reduce", 1024, "hybrid_cube_mesh")


def test_the_runner_up_is_named():
    narrow = wide_words.why_not(90) is not None
    assert choose(site(), "all_reduce", 1024).runner_up == ("two_shot/ll" if narrow else "one_shot/ll128")
    assert choose(site(), "all_reduce", 1 << 30).runner_up == ""


def test_a_row_may_be_for_graphs_only(monkeypatch):
    rows = (TableRow(*_ANY, "one_shot", "simple", mode="graph"), TableRow(*_ANY, "one_shot", "ll"))
    monkeypatch.setattr(selection, "shipped_tables", lambda: (ShippedTable("mine", "cpu", rows),))
    results = [choose(site("cpu"), "all_reduce", 8, mode=mode).protocol for mode in ("graph", "eager")]
    assert results == ["simple", "ll"]


# The user's rows


def tuned(*rows, **more):
    return site(tuned=rows, tuned_name="tuned abc", **more)


def test_a_tuned_row_comes_before_the_shipped_ones_which_take_the_rest():
    here = tuned(TableRow("all_reduce", 4, 4096, "two_shot", "simple", blocks=5, warps=16, tile=1024))
    choice = choose(here, "all_reduce", 4096)
    assert (choice.algorithm, choice.protocol) == ("two_shot", "simple")
    assert (choice.blocks, choice.warps, choice.block) == (5, 16, 1024)
    assert choice.reason == "table 'tuned abc' row 0: all_reduce, up to 4 ranks, up to 4096 bytes"
    assert (choice.table, choice.row) == ("tuned abc", 0)
    assert choose(here, "all_reduce", 4097).table == "hopper"
    assert choose(here, "all_gather", 1).table == "hopper"


def test_a_tuned_row_may_be_for_a_width_and_a_mode():
    narrow = TableRow("all_reduce", 4, None, "two_shot", "simple", mode="graph", bits=16)
    names = [choose(tuned(narrow), "all_reduce", 8, mode=m, bits=b).table for m in ("graph", "eager") for b in (16, 32)]
    assert names == ["tuned abc", "hopper", "hopper", "hopper"]


def test_a_tuned_kernel_that_cannot_run_here_is_passed_over():
    cube = TableRow("all_reduce", 4, None, "hybrid_cube_mesh", "ll")
    assert choose(tuned(cube), "all_reduce", 8).table == "hopper"
    assert choose(tuned(cube), "all_reduce", 8, algorithm="one_shot").algorithm == "one_shot"


def test_a_tuned_grid_exceeds_neither_the_resident_blocks_nor_the_number_of_tiles():
    greedy = TableRow("all_reduce", 4, None, "one_shot", "ll", blocks=64, warps=32, tile=1 << 20)
    choice = choose(tuned(greedy, max_blocks=7), "all_reduce", 8)
    assert choice.blocks == 7 and choice.block == layout.plan(4, 64 << 20).largest_tile("one_shot", "ll")
    small = choose(tuned(TableRow("all_reduce", 4, None, "one_shot", "ll", warps=32, tile=512)), "all_reduce", 8)
    assert (small.block, small.warps) == (512, 16)  # a word a thread: every thread has a part of each tile


def test_wide_words_are_refused_by_name_where_there_are_none():
    for device, version in (("sm_90", "3.8.0"), ("sm_70", "3.9.0")):
        reason = wide_words.why_not(int(device[3:]), version)
        with patch.object(wide_words, "why_not", lambda architecture, version=None, reason=reason: reason):
            told = f"all_gather: protocol=ll128, 16-byte words with a flag: {reason}; protocol=ll works everywhere"
            with pytest.raises(InvalidArgument, match=re.escape(told)):
                choose(site(device), "all_gather", 1024, protocol="ll128")
            fits = {choose(site(device), "all_reduce", 1 << n, algorithm="two_shot").protocol for n in range(4, 26)}
            assert "ll128" not in fits


def test_forced_wide_words_have_planes_that_span_all_threads():
    for kernel in (k for k in registry.KERNELS if k.wide):
        ranks = registry.CUBE_RANKS if kernel.needs_cube else 3
        for power in range(3, 26):
            for device in ("cpu",) if wide_words.why_not(90) else ("cpu", "sm_90"):
                choice = choose(site(device, ranks), kernel.collective, 1 << power, kernel.algorithm, "ll128")
                assert device == "cpu" or choice.block // 2 >= 32 * choice.warps


@pytest.mark.parametrize(
    ("collective", "wide", "narrow"),
    [
        ("all_reduce", {16 << 10: "one_shot/ll128", 96 << 10: "two_shot/ll", 256 << 10: "two_shot/ll128"},
         {16 << 10: "one_shot/ll", 64 << 10: "two_shot/ll", 256 << 10: "two_shot/ll"}),
        ("all_gather", {4096: "one_shot/ll128", 768 << 10: "one_shot/ll128", 1 << 20: "one_shot/simple"},
         {4096: "one_shot/ll", 192 << 10: "one_shot/ll", 256 << 10: "one_shot/simple"}),
        ("reduce_scatter", {256 << 10: "one_shot/ll", 2 << 20: "one_shot/ll128", 3 << 20: "one_shot/simple"},
         {256 << 10: "one_shot/ll", 512 << 10: "one_shot/ll", 1 << 20: "one_shot/simple"}),
        ("all_to_all", {256 << 10: "one_shot/ll", 2 << 20: "one_shot/ll128", 3 << 20: "one_shot/simple"},
         {256 << 10: "one_shot/ll", 512 << 10: "one_shot/ll", 768 << 10: "one_shot/simple"}),
        ("broadcast", {64 << 10: "one_shot/ll128", 128 << 10: "one_shot/ll128", 512 << 10: "two_shot/simple"},
         {64 << 10: "one_shot/ll", 128 << 10: "one_shot/simple", 512 << 10: "two_shot/simple"}),
    ],
)  # fmt: skip
def test_eight_hoppers_take_wide_words_where_they_are_modelled_faster_and_there_are_any(collective, wide, narrow):
    """devtools/notes/performance.md has the times. Without wide words the next matching row decides."""
    for reason, wanted in ((None, wide), ("no wide words", narrow)):
        with patch.object(wide_words, "why_not", lambda architecture, version=None, reason=reason: reason):
            results = {n: choose(site(world_size=8), collective, n) for n in wanted}
        assert {n: f"{c.algorithm}/{c.protocol}" for n, c in results.items()} == wanted


def test_four_hoppers_have_their_own_rows_and_fall_through_without_wide_words():
    def of(collective, *sizes):
        return [choose(site(), collective, n << 10).protocol for n in sizes]

    for reason, wide in ((None, "ll128"), ("no wide words", "ll")):
        with patch.object(wide_words, "why_not", lambda architecture, version=None, reason=reason: reason):
            assert of("all_gather", 32, 256, 1024) == ["ll", wide, "simple"]
            for collective in ("reduce_scatter", "all_to_all"):
                assert of(collective, 64, 512, 1024) == [wide, wide, "simple"]
            assert of("broadcast", 128, 256) == [wide, "simple"]


def test_eight_hoppers_broadcast_through_a_switch_where_that_is_modelled_faster_and_do_not_gather():
    def of(collective, nbytes, **facts):
        choice = choose(site(world_size=8, no_multicast="", **facts), collective, nbytes)
        return choice.algorithm

    assert {of("all_gather", n << 10) for n in (64, 256, 512, 1024)} == {"one_shot"}, "an alias fence takes too long"
    assert [of("broadcast", n << 10) for n in (128, 192, 8192)] == ["one_shot", "multicast", "multicast"]
    assert of("broadcast", 256 << 10, batch_invariant=True) == "multicast", "nothing is reduced"


# Room for other kernels


def test_a_group_with_few_registers_gets_compact_forms_in_its_grid():
    few = site(world_size=8, max_blocks=16, beside=True)
    for collective in set(COLLECTIVES) - {"barrier"}:
        for nbytes in SIZES:
            choice = choose(few, collective, nbytes)
            kernel = registry.find(collective, choice.algorithm, choice.protocol)
            assert choice.registers == 128 and choice.blocks <= 16
            assert has_compact_form(kernel, "sm_90", 8)
    assert "beside other kernels, at most 128 registers a thread and 16 blocks" in choice.reason
    assert choose(site(world_size=8), "all_reduce", 1 << 20).registers == 255


def test_a_kernel_without_a_compact_form_is_refused_with_those_that_have_one():
    few = site(world_size=8, beside=True)
    with pytest.raises(InvalidArgument, match="two_shot/ll takes more than 128 .* is one_shot/simple, two_shot/simple"):
        choose(few, "all_reduce", 1024, "two_shot", "ll")
    with pytest.raises(InvalidArgument, match="over symmetric memory: .* other kernels take handle.local"):
        choose(few, "all_reduce", 1024, zero_copy=("two_shot",))


def test_rows_for_concurrent_calls_are_used_by_such_groups_only():
    rows = (
        TableRow("all_reduce", 4, None, "two_shot", "simple", blocks=4, registers=128, beside=True),
        TableRow("all_reduce", 4, None, "one_shot", "ll", beside=False),
    )
    results = [choose(tuned(*rows, beside=beside), "all_reduce", 8) for beside in (True, False)]
    assert [(c.protocol, c.registers) for c in results] == [("simple", 128), ("ll", 255)]
    assert results[0].blocks == 4


def test_devices_or_compilers_of_several_kinds_have_no_wide_words():
    assert choose(site("cuda"), "all_reduce", 1024).protocol == "ll"
    told = "all_gather: protocol=ll128, .*: the ranks' GPUs are of several architectures, .*; protocol=ll works"
    with pytest.raises(InvalidArgument, match=told):
        choose(site("cuda"), "all_gather", 1024, protocol="ll128")


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
def test_nvls_is_picked_if_all_ranks_have_it_and_it_supports_the_reduction():
    def of(nbytes, dtype="bfloat16", op="sum", collective="all_reduce", **facts):
        here = site(world_size=8, **{"no_multicast": "", **facts})
        return choose(selection.for_reduction(here, collective, DTYPES[dtype], op), collective, nbytes).algorithm

    assert [of(n << 20) for n in (1, 3, 4, 64)] == ["two_shot", "two_shot", "multicast", "multicast"]
    assert of(1 << 20, collective="broadcast") == "multicast"
    unfit = {"dtype": "float64"}, {"op": "avg"}, {"op": "max"}, {"batch_invariant": True}, {"no_multicast": "no"}
    for others in unfit:
        assert of(64 << 20, **others) == "two_shot", others
    for facts, told in (
        ({"no_multicast": "the probe said no"}, "needs NVLS (multimem), and here the probe said no; there is one_shot"),
        ({"no_multicast": "", "batch_invariant": True}, "adds in the switch's order"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(told)):
            choose(site(world_size=8, **facts), "all_reduce", 64, "multicast")

    assert selection.why_not_multicast("sm_90", "") == "" and "several" in selection.why_not_multicast("cuda", "")
    assert "sm_80" in selection.why_not_multicast("sm_80", "") and selection.why_not_multicast("cpu", "why") == "why"


def test_handles_use_nvls_from_the_size_that_pays_for_two_barriers():
    def over(nbytes, *fitting, world_size=8, **facts):
        here = site(world_size=world_size, **{"no_multicast": "", **facts})
        return choose(here, "all_reduce", nbytes, zero_copy=fitting).algorithm

    in_place, into_another = ("two_shot", "multicast"), ("one_shot", "multicast")
    for fitting, ends in ((in_place, {8: 1 << 18, 4: 1 << 20}), (into_another, {8: 1 << 15, 4: 1 << 16})):
        for world_size, end in ends.items():
            results = [over(nbytes, *fitting, world_size=world_size) for nbytes in (8, end, end + 1, 64 << 20)]
            assert results == [fitting[0]] * 2 + ["multicast"] * 2
        assert over(64 << 20, *fitting, world_size=2) == fitting[0]
        assert over(64 << 20, *fitting, no_multicast="no") == fitting[0]
        assert over(64 << 20, *fitting, batch_invariant=True) == fitting[0]
    assert over(64 << 20, "one_shot") == "one_shot"
