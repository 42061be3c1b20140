"""The cost model: it is made of the registry's counts, close to what others have published, and says what it is."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.kernels import multimem, wide_words
from tricomm.kernels.collectives import registry
from tricomm.perf.cost_model import forecast, kernel_time
from tricomm.perf.cost_model.machines import MACHINES, MachineSpec

_H100 = MACHINES["h100"]
_ONE_SHOT = registry.find("all_reduce", "one_shot", "ll")
_TWO_SHOT = registry.find("all_reduce", "two_shot", "simple")
# Every cost is another power of ten, so that a prediction spells its own formula.
_DIGITS = MachineSpec("digits", "any", 1e-3, 1e-3, 1e-3, 1e9, hop=1.0, barrier=10.0, launch=100.0, eager=1000.0)


def test_time_is_launch_hops_barriers_and_bytes() -> None:
    assert kernel_time.predict(_DIGITS, _ONE_SHOT, 4, 0).time_us == 100 + 1
    assert kernel_time.predict(_DIGITS, _TWO_SHOT, 4, 0).time_us == 100 + 2 + 20
    assert kernel_time.predict(_DIGITS, _TWO_SHOT, 4, 0, "eager").time_us == 1000 + 100 + 2 + 20
    assert kernel_time.predict(_DIGITS, _TWO_SHOT, 4, 1000).wire == pytest.approx(1500)  # 2 (N-1)/N n
    assert kernel_time.predict(_DIGITS, _ONE_SHOT, 4, 1000).wire == pytest.approx(6000)  # 2 (N-1) n
    assert kernel_time.predict(_DIGITS, _ONE_SHOT, 4, 1000, share=0.5).wire == pytest.approx(3000)


@given(
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from(registry.KERNELS),
    st.integers(2, 8),
    st.integers(0, 1 << 34),
    st.sampled_from(["graph", "eager"]),
)
def test_more_bytes_never_take_less_and_nothing_beats_the_limit(
    gpu: str, kernel: registry.Kernel, world_size: int, nbytes: int, mode: str
) -> None:
    machine = MACHINES[gpu]
    less = kernel_time.predict(machine, kernel, world_size, nbytes // 2, mode).time_us
    time_us = kernel_time.predict(machine, kernel, world_size, nbytes, mode).time_us
    assert 0 < less <= time_us
    if not kernel.needs_cube and kernel.collective != "barrier":
        assert time_us > kernel_time.limit(machine, kernel.collective, world_size, nbytes)


def test_half_of_the_published_times_are_met_within_16_per_cent() -> None:
    rows = kernel_time.check()
    free = [row for row in rows if not row.row.calibrates]
    assert len(rows) >= 40 and len(free) >= 35
    assert kernel_time.median_error(rows) <= 0.16 and kernel_time.median_error(free) <= 0.16
    assert kernel_time.losses(rows).count(0) >= 0.9 * len(kernel_time.losses(rows)) > 50
    lines = kernel_time.report(rows)
    assert len(lines) == len(rows) + 5 and lines[-3].startswith("median error ") and "not measured" in lines[0]


def test_a_cube_mesh_runs_what_goes_around_its_missing_links() -> None:
    assert all(k.needs_cube for k in kernel_time.kernels(MACHINES["v100"], "all_reduce", 8))
    assert not any(k.needs_cube for k in kernel_time.kernels(MACHINES["v100"], "all_reduce", 4))
    assert not any(k.needs_cube for k in kernel_time.kernels(_H100, "all_reduce", 8))
    assert not any(k.wide for n in (4, 8) for k in kernel_time.kernels(MACHINES["v100"], "all_reduce", n))
    narrow = wide_words.why_not(80) is not None
    assert any(k.wide for k in kernel_time.kernels(MACHINES["a100"], "all_reduce", 8)) != narrow
    with pytest.raises(InvalidArgument, match="broadcast: 8 v100 are a hybrid cube mesh.*fewer ranks"):
        kernel_time.kernels(MACHINES["v100"], "broadcast", 8)


def test_the_switch_spares_the_links_and_handles_spare_the_copies() -> None:
    kernels = (registry.MULTICAST[0], registry.MULTICAST_ZERO_COPY[0])

    def over_two_shots(nbytes: int) -> list[float]:
        times = [kernel_time.predict(_H100, kernel, 8, nbytes).time_us for kernel in (_TWO_SHOT, *kernels)]
        return [round(time / times[0], 2) for time in times[1:]]

    # Two barriers and a launch are 13.5 of 18 us of the smallest; with a switch their alias fences are 3 us more.
    assert [over_two_shots(n << 20) for n in (1, 4, 8, 64)] == [[1.13, 0.97], [0.92, 0.8], [0.84, 0.74], [0.75, 0.66]]


def _predict(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["predict", *arguments])


def _any_triton(patch: pytest.MonkeyPatch, reasons: dict[ModuleType, str | None]) -> None:
    """This Triton compiles kernels of wide words, and through a switch, unless there is a reason."""
    for module, reason in reasons.items():
        patch.setattr(module, "why_not", lambda architecture, version="", why=reason: why)


def test_the_command_says_that_nothing_was_measured_and_marks_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    _any_triton(monkeypatch, {wide_words: None, multimem: None})
    done = _predict("--gpu", "H100", "--sizes", "1K,64M")
    assert done.exit_code == 0 and forecast.LABEL in done.output.splitlines()[0]
    best = [line.split()[:2] for line in done.output.splitlines() if line.endswith("*")]
    assert best == [["1024", "one_shot/ll128"], ["67108864", "multicast/simple"]]
    *_, error, publications, implementations = _predict("--check").output.splitlines()
    assert error.startswith("median error") and "one publication" in publications
    assert "one implementation" in implementations


def test_what_the_gpus_or_this_triton_lack_is_left_out_by_name_and_never_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _any_triton(monkeypatch, {wide_words: "no wide words", multimem: "no multimem"})
    asked = ("--collective", "all_reduce,all_reduce_rms_norm", "--sizes", "1K,64M", "--json")
    result = json.loads(_predict(*asked).output)
    wide = [f"{name}_{form}_ll128" for name in asked[1].split(",") for form in ("one_shot", "two_shot")]
    assert result["left_out"] == {**dict.fromkeys(wide, "no wide words"), "all_reduce_multicast_simple": "no multimem"}
    assert {row["protocol"] for row in result["results"]} == {"ll", "simple"}
    assert {row["algorithm"] for row in result["results"]} == {"one_shot", "two_shot"}
    assert _predict(*asked[:-1]).output.splitlines()[-3:] == [
        "#",
        f"# left out: {', '.join(wide)}: no wide words",
        "# left out: all_reduce_multicast_simple: no multimem",
    ]


def test_the_check_as_json_has_the_rows_of_the_table() -> None:
    result = json.loads(_predict("--check", "--json").output)
    rows = kernel_time.check()
    assert result["median_error"] == kernel_time.median_error(rows) and result["predicted"] is True
    assert [(r["gpu"], r["nbytes"], r["measured_us"], r["time_us"], r["error"]) for r in result["results"]] == [
        (c.row.gpu, c.row.nbytes, c.row.time_us, c.time_us, c.error) for c in rows
    ]


def test_json_of_every_collective() -> None:
    predicted = json.loads(_predict("--collective", "all", "--sizes", "64K", "--world-size", "4", "--json").output)
    assert predicted["predicted"] is True and predicted["machine"]["name"] == "h100"
    assert len({row["collective"] for row in predicted["results"]}) == 9
    assert all(row["limit_us"] < row["time_us"] for row in predicted["results"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h10"), "gpu 'h10' is unknown (did you mean h100?); there is v100"),
        (("--collective", "allreduce"), "collective 'allreduce' is unknown (did you mean all_reduce?)"),
        (("--gpu", "abacus"), "gpu 'abacus' is unknown; there is"),
        (("--gpu", "v100", "--collective", "broadcast"), "broadcast: 8 v100 are a hybrid cube mesh"),
        (("--sizes", "0"), "size '0'"),
        (("--check", "--gpu", "h100", "--json", "--sizes", "1K"), "so --gpu, --sizes would not be looked at"),
        (("--quantize", "fp8"), "--quantize: only rows of all_reduce_rms_norm have that, and asked for is all_reduce;"),
        (
            ("--collective", "all_reduce_rms_norm", "--hidden", "1000", "--quantize", "nvfp4"),
            "all_reduce_rms_norm: rows of 1000 elements; nvfp4 needs a multiple of 16",
        ),
    ],
)
def test_bad_arguments_are_usage_errors_with_the_nearest_match(arguments: tuple[str, ...], said: str) -> None:
    done = _predict(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output
