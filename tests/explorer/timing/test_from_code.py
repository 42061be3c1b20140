"""Kernels modelled from their compiled code: one end to end, its invariants, the command; all published rows."""

import json
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from tests.marks import compiles, most, some
from tricomm.cli import cli
from tricomm.explorer.timing import code_forecast, from_code, timed_call
from tricomm.explorer.timing.from_code import LaunchShape
from tricomm.explorer.timing.warp_clock import PARTS
from tricomm.kernels import layout, multimem, wide_words
from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.cost_model import kernel_time, machines, published, published_time
from tricomm.perf.cost_model.machines import MACHINES

_H100 = MACHINES["h100"]
_LL = registry.find("all_reduce", "one_shot", "ll")
_SHAPE = LaunchShape(1, 8, 512)


def test_a_call_has_one_hop_and_its_parts_sum_up() -> None:
    result = from_code.predict(_H100, _LL, 2, 4096)
    parts = dict(zip(PARTS, result.parts, strict=True))
    assert result.shape == LaunchShape(16, 1, 32, dependent=True) and result.executed == 1.0
    assert result.time_us == pytest.approx(result.boundary + sum(parts.values()))
    assert parts["start"] > 0 and parts["tail"] > 0 and parts["poll"] > 0
    assert _H100.hop < sum(parts.values()) < 10
    # 4 KiB, tiles of one warp, in one load a thread; each is on its way for L2's latency at least.
    assert result.in_flight == 4096 and 10 < result.allows_gbs < 64 * 1.755


def test_a_dependent_launch_begins_sooner_and_takes_as_long() -> None:
    dependent, usual = (
        from_code.predict(_H100, _LL, 2, 1024, replace(_SHAPE, dependent=dependent)) for dependent in (True, False)
    )
    assert dependent.parts == pytest.approx(usual.parts, abs=0.01)
    assert dependent.boundary == pytest.approx(usual.boundary - _H100.overlap) and _H100.overlap > 0
    assert dependent.shares.latency == pytest.approx(usual.shares.latency - _H100.overlap, abs=0.05)


def test_slower_links_and_a_longer_hop_show() -> None:
    def path(**changes: float) -> float:
        return timed_call.run(replace(_H100, **changes), _LL, 2, 1024, _SHAPE, layout.plan(2, 64 << 20), False).time_us

    usual = path()
    assert path(hop=_H100.hop + 5) == pytest.approx(usual + 5, abs=1.0)  # a poll may look once more or less
    assert path(kernels=3.2) > usual + 2  # LL sends 8 KiB: 2.6 us at a hundredth of the bandwidth


@pytest.mark.parametrize(
    ("kernel", "nbytes", "changes", "limit"),
    [
        (_LL, 1024, {}, "latency"),
        (_LL, 8 * 4096, {}, "bytes in flight"),  # eight tiles of one block
        (_LL, 8 * 4096, {"kernels": 1.0}, "links"),
        (registry.find("all_reduce", "two_shot", "simple"), 4096, {}, "barriers"),
    ],
)
def test_a_row_names_its_limit(kernel: registry.Kernel, nbytes: int, changes: dict[str, float], limit: str) -> None:
    result = from_code.predict(replace(_H100, **changes), kernel, 2, nbytes, _SHAPE)
    assert result.shares.limit == limit, result
    assert min(asdict(result.shares).values()) >= 0
    assert sum(asdict(result.shares).values()) == pytest.approx(result.time_us)


def test_a_long_message_is_extrapolated_from_its_executed_part() -> None:
    shape = LaunchShape(2, 8, 512)
    rounds = 2 * 4096  # bytes
    exact = [from_code.predict(_H100, _LL, 2, n * rounds, shape) for n in (4, 8)]
    assert [each.executed for each in exact] == [1.0, 1.0]
    long = from_code.predict(_H100, _LL, 2, 64 * rounds, shape)
    assert long.executed == 8 / 64
    assert long.time_us == pytest.approx(exact[1].time_us + 14 * (exact[1].time_us - exact[0].time_us))


def _over_exact(ranks: int, rounds: int) -> float:
    """The extrapolated time of two shots of small tiles, over that of all their rounds."""
    kernel, shape = registry.find("all_reduce", "two_shot", "ll"), LaunchShape(32, 1, 32)
    elements = rounds * 32 * 2 * timed_call.words_of_tile(kernel, ranks, shape.tile)
    exact = timed_call.run(_H100, kernel, ranks, elements, shape, layout.plan(ranks, machines.ARENA_BYTES), False)
    return sum(from_code.predict(_H100, kernel, ranks, 4 * elements, shape).parts) / exact.time_us


def test_small_tiles_go_on_as_they_do_when_the_links_are_busy() -> None:
    assert _over_exact(8, 16) == pytest.approx(1, abs=0.03)


def test_without_enough_rounds_small_tiles_seem_faster_than_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_code, "_MOST_ROUNDS", 4)
    assert _over_exact(8, 16) < 0.7


def _over_slow_links(tiles: int) -> tuple[float, float]:
    """Microseconds that a link needs for `tiles` of four blocks, and those of the call."""
    elements = tiles * 1024
    slow, plan = replace(_H100, kernels=1.0), layout.plan(2, 64 << 20)
    time = timed_call.run(slow, _LL, 2, elements, LaunchShape(4, 8, 512), plan, False).time_us
    return units.moved(_LL, 2) * 4 * elements / 1e3, time


def test_blocks_with_another_round_have_the_links_of_those_without_one() -> None:
    for tiles in (1, 3, 4, 5, 7):
        wire, time = _over_slow_links(tiles)
        assert wire < time < wire + 5, tiles


def test_without_the_share_of_ended_blocks_a_last_round_takes_as_long_as_a_full_one(monkeypatch) -> None:
    monkeypatch.setattr(timed_call, "busy", lambda tiles, blocks: blocks)
    assert _over_slow_links(5)[1] == pytest.approx(_over_slow_links(8)[1], rel=0.01)


@pytest.mark.parametrize(
    ("algorithm", "protocol", "blocks", "error"),
    [("two_shot", "simple", 1, 0.01), ("two_shot", "ll", 1, 0.01), ("one_shot", "ll", 1, 0.2)],
)
def test_a_call_of_many_chunks_is_extrapolated_from_the_first_ones(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, protocol: str, blocks: int, error: float
) -> None:
    monkeypatch.setattr(machines, "ARENA_BYTES", 1 << 20)
    kernel, shape = registry.find("all_reduce", algorithm, protocol), LaunchShape(blocks, 8, 512)
    plan = layout.plan(2, 1 << 20)
    elements = 11 * kernel.chunk_words(2, plan)  # five chunks and a half
    result = from_code.predict(_H100, kernel, 2, 4 * elements, shape)
    exact = timed_call.run(_H100, kernel, 2, elements, shape, plan, False)
    assert (result.chunks, exact.epochs) == (6, 6) and result.executed < 0.7
    assert result.barriers == exact.barriers and (exact.barriers > 0) == (protocol == "simple")
    assert result.more_barriers is not None and result.more_barriers <= result.barriers / result.chunks
    assert sum(result.parts) == pytest.approx(exact.time_us, rel=error)


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
@pytest.mark.parametrize("kernel", registry.MULTICAST, ids=lambda kernel: kernel.name)
def test_chunks_through_a_switch_are_counted_as_the_kernel_makes_them(monkeypatch, kernel) -> None:
    monkeypatch.setattr(machines, "ARENA_BYTES", 1 << 20)
    words = 5 * kernel.chunk_words(2, layout.plan(2, 1 << 20)) // 2
    result = from_code.predict(_H100, kernel, 2, 8 * words * kernel.kind.rows_in(2), LaunchShape(2, 8, 512))
    assert result.chunks == 3


def test_a_kernel_that_divides_a_call_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.Kernel, "chunk_words", lambda kernel, world_size, plan: 4096)
    with pytest.raises(from_code.UnknownChunks, match="all_reduce_one_shot_ll: .* took 1 epochs and not 2"):
        from_code.predict(_H100, _LL, 2, 8 * 8192, _SHAPE)


@pytest.mark.parametrize(
    "kernel", [k for k in registry.ALL if k.collective == "all_reduce" and not k.needs_cube and compiles(k)]
)
def test_bytes_to_and_from_peers_are_the_formulas(kernel: registry.Kernel) -> None:
    elements = 12288 if kernel.wire else 3072  # whole planes of codes
    memory = layout.plan(4, 2 << 20)  # room for tiles of 512 wide words with scales
    result = timed_call.run(_H100, kernel, 4, elements, _SHAPE, memory, False)
    assert result.moved == units.moved(kernel, 4) * 4 * elements and result.headers > 0


def test_executed_instructions_are_those_of_the_steady_state() -> None:
    kernel = registry.find("all_reduce", "two_shot", "simple")
    long = [from_code.instructions(_H100, kernel, 2, nbytes) for nbytes in (32 << 20, 64 << 20)]
    # A load, the push, two loads and an addition for a half, its result, the copy of the other half: at least 10.
    assert 10 < long[0] < 100 and long[1] == pytest.approx(long[0], rel=0.2)
    assert from_code.instructions(_H100, kernel, 2, 1024) > 5 * long[0]  # all of a short call


@pytest.mark.parametrize("protocol", ["ll", "ll128"])
def test_uneven_rows_are_pushed_after_one_round_trip(protocol: str) -> None:
    kernel = registry.find("all_to_all_v", "one_shot", protocol)
    if not compiles(kernel):
        pytest.skip("refused by name")
    result = timed_call.run(_H100, kernel, 2, 3072, LaunchShape(1, 2, 128), layout.plan(2, 1 << 20), False)
    assert result.chain == (1, 1) and result.epochs == 1
    assert result.moved == units.moved(kernel, 2) * 2 * 4 * 3072


def test_the_command_labels_its_times_as_modelled_with_their_error() -> None:
    arguments = ["predict", "--from-code", "--world-size", "2", "--sizes", "4K"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert code_forecast.LABEL in done.output.splitlines()[0] and "modelled" in code_forecast.LABEL
    assert f"median error {code_forecast.MEDIAN_ERROR:.0%}" in done.output
    lines = [line.split()[1:] for line in done.output.splitlines() if line.strip().startswith("4096")]
    kernels = [words[words[0] in (">", "*", ">*")] for words in lines]
    usable = [k for k in kernel_time.kernels(_H100, "all_reduce", 2) if compiles(k)]
    assert kernels == [*(f"{k.algorithm}/{k.protocol}" for k in usable), "NCCL"] and len(kernels) >= 5
    marks = [words[0] for words in lines if words[0] in (">", "*", ">*")]
    assert "".join(sorted("".join(marks))) == "*>"
    result = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert "modelled" in result["modelled"] and len(result["results"]) == len(usable)
    counted = json.loads(CliRunner().invoke(cli, ["predict", *arguments[2:], "--json"]).output)
    assert result["nccl"] == counted["nccl"] and len(result["nccl"]) == 1
    names = [[row["algorithm"] + row["protocol"] for row in r["results"] if row["runs"]] for r in (result, counted)]
    assert names[0] == names[1]
    row = result["results"][0]
    assert row["time_us"] == pytest.approx(row["launch_us"] + sum(row[f"{part}_us"] for part in PARTS))
    assert row["time_us"] == pytest.approx(sum(row["shares_us"].values()))
    assert row["limit"].replace(" ", "_") in row["shares_us"] and f"  {row['limit']} " in done.output


def test_kernels_that_this_triton_does_not_compile_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_words, "why_not", lambda architecture: f"no wide words on {architecture}")
    monkeypatch.setattr(multimem, "why_not", lambda architecture: "no switch")
    arguments = ["predict", "--from-code", "--world-size", "2", "--sizes", "4"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-3:] == [
        "#",
        "# left out: all_reduce_one_shot_ll128, all_reduce_two_shot_ll128: no wide words on 90",
        "# left out: all_reduce_multicast_simple: no switch",
    ]
    result = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert len(result["left_out"]) == 3 and {row["protocol"] for row in result["results"]} == {"ll", "simple"}


@pytest.mark.parametrize(
    ("gpu", "compiled"),
    [("h100", None), ("v100", "v100 are sm_70"), ("pcie3", "pcie3 may be of any"), ("pcie4", "pcie4 may be of any")],
)
def test_the_header_says_what_is_not_compiled_for_such_gpus(gpu: str, compiled: str | None) -> None:
    row = code_forecast.CodeForecastRow("all_reduce", 4, _LL, from_code.predict(_H100, _LL, 2, 4), 0.0, 1.0, True, True)
    head = code_forecast.CodeForecast(MACHINES[gpu], 2, "graph", [row], [], {}).lines()[3:-3]
    wanted = compiled and f"# compiled for sm_75, the oldest architecture that Triton has; {compiled}"
    assert head[:-4] == [line for line in (wanted,) if line]


@pytest.mark.soak
def test_the_error_over_the_published_rows_is_the_one_that_is_printed() -> None:
    rows = code_forecast.check()
    assert len(rows) == code_forecast.ROWS
    assert round(kernel_time.median_error(rows), 2) == code_forecast.MEDIAN_ERROR
    assert (len(losses := kernel_time.losses(rows)), losses.count(0)) == (90, 81)
    assert kernel_time.median_error([row for row in rows if row.row.held_out]) <= 0.12
    biases = kernel_time.biases(rows)
    assert list(biases) == [10**n for n in range(2, 8)] and max(map(abs, biases.values())) <= 0.05, biases


def test_a_published_grid_is_the_one_that_is_modelled() -> None:
    row = next(row for row in published.MEASUREMENTS if row.grid == published_time.Grid(2, 1024))
    for grid, shape in ((row.grid, LaunchShape(2, 32, 2048)), (published_time.Grid(4, 512), LaunchShape(4, 16, 1024))):
        (checked,) = code_forecast.check((replace(row, grid=grid),))
        time = from_code.predict(_H100, row.kernel, row.world_size, row.nbytes, shape).time_us
        assert checked.time_us == time + row.more_us


_TIMED = [
    (kernel, world_size)
    for kernel in registry.ALL
    for world_size in ((registry.CUBE_RANKS,) if kernel.needs_cube else (2, 3, 8))
    if kernel.collective != "all_to_all_v" and not kernel.pairwise
]


@pytest.mark.parametrize(("kernel", "world_size"), some(_TIMED, lambda number, value: False, most))
def test_every_kernel_can_be_timed(kernel: registry.Kernel, world_size: int) -> None:
    result = timed_call.run(_H100, kernel, world_size, 2048, _SHAPE, layout.plan(world_size, 64 << 20), False)
    assert 0.5 < result.time_us < 100 and min(result.parts) > -1e-9
