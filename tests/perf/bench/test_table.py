"""The table of a benchmark: its columns, the best kernel, the speed-up over a library, the summary."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tricomm.perf.bench import outputs, table
from tricomm.perf.bench.measure import Rows
from tricomm.perf.bench.request import Case, Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench.table import BenchTable
from tricomm.perf.bench_row import BenchRow, Measurement

_BOX = json.dumps({"fingerprint": {"topology": "nvswitch"}})
_HEADER: dict[str, Any] = {"device": "NVIDIA H100 80GB HBM3", "topology": "8 GPUs", "ranks": 8, "kind": "cuda_vmm"}
_HEADER |= {"versions": {"torch": "2.13", "cuda": "not available: none"}, "simulated": False, "box": _BOX}
_OURS = (Case("all_reduce", "one_shot", "ll"), Case("all_reduce", "two_shot", "simple"))
_NCCL = Case("all_reduce", None, None, library="nccl")
_SETTINGS = Settings((*_OURS, _NCCL), (1024, 1 << 20))


def _row(case: Case, nbytes: int, *times: float) -> Rows:
    kernel = (case.algorithm or case.library, case.protocol or "-")
    places = ("out_of_place", "in_place")[-len(times) :]
    facts = (case.library, "all_reduce", *kernel, "float32", "sum", "eager")
    return tuple(
        BenchRow(
            Measurement(*facts, place, nbytes, us, us, us, 0.0, False),
            nbytes // 4,
            8,
            nbytes,
            time_us=us,
            algbw_gbs=nbytes / us / 1e3,
            busbw_gbs=1.75 * nbytes / us / 1e3,
            wrong=0,
        )
        for place, us in zip(places, times, strict=True)
    )


def _rows() -> list[Rows]:
    return [
        _row(_OURS[0], 1024, 5.0, 6.0),
        _row(_OURS[1], 1024, 9.0, 8.0),
        _row(_NCCL, 1024, 12.0),
        _row(_OURS[0], 1 << 20, 90.0, 80.0),
        _row(_OURS[1], 1 << 20, 40.0, 30.0),
        _row(_NCCL, 1 << 20, 24.0),
    ]


def _head(made: BenchTable) -> list[str]:
    return made.heading()[-2].lstrip("# ").split()


def test_the_best_kernel_of_a_size_is_marked_and_compared_with_the_library() -> None:
    rows, made = _rows(), BenchTable(_SETTINGS, _HEADER)
    lines = made.group(rows[:3])
    assert [line.split()[1] == "*" for line in lines] == [True, False, False]
    # In place, where NCCL was measured: 12 us over 6, over 8.
    assert [line.split()[-1] for line in lines[:2]] == ["2.00x", "1.50x"] and not lines[2].endswith("x")
    assert [line.split()[1] == "*" for line in made.group(rows[3:])] == [False, True, False]
    assert any(line.startswith("# vs nccl   the time of nccl over this kernel's") for line in made.heading())


@pytest.mark.parametrize(("iters", "has"), [(20, False), (99, False), (100, True)])
def test_a_99th_percentile_needs_a_hundred_samples(iters: int, has: bool) -> None:
    assert ("p99" in _head(BenchTable(replace(_SETTINGS, iters=iters), _HEADER))) == has


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_line_is_wider_than_the_terminal_or_120_columns(width: int) -> None:
    made = BenchTable(replace(_SETTINGS, iters=100, sizes=(8, 1 << 34)), _HEADER, width)
    lines = [*made.heading()[-3:], *made.group([_row(case, 1 << 34, 1e7, 1e7) for case in _SETTINGS.cases])]
    assert max(map(len, lines)) <= min(width, table.WIDEST)
    kept = {"size", "kernel", "time", "busbw", "#wrong", "vs", "nccl"}
    assert kept <= set(_head(made)) and ("max" in _head(made)) == (width > 80)


def test_several_libraries_are_compared_by_the_fastest_of_them() -> None:
    symm = Case("all_reduce", None, None, library="symm_mem")
    made = BenchTable(replace(_SETTINGS, cases=(*_SETTINGS.cases, symm)), _HEADER)
    (line, *_) = made.group([*_rows()[:3], _row(symm, 1024, 3.0)])
    assert line.split()[-1] == "0.50x" and _head(made)[-2:] == ["vs", "best"]


def test_the_summary_says_how_much_of_the_links_is_used_and_where_the_library_is_faster() -> None:
    first, best, faster = table.summary(Results(_HEADER, _rows()), _SETTINGS)
    assert first == "8 ranks, 3 kernels, 6 rows, 0 wrong"
    share = f"{1.75 * (1 << 20) / 30 / 1e3 / 371:.0%}"
    assert best == (
        "all_reduce float32 sum, eager: busbw of the fastest kernel (*) 30.76 GB/s on average, 61.17 at most "
        f"(1048576 B), {share} of the links' 371"
    )
    assert faster == "    0.80x to 2.00x as fast as nccl, slower at 1 of 2 sizes"
    elsewhere = _HEADER | {"box": json.dumps({"fingerprint": {"topology": "pcie"}})}
    assert "links" not in "".join(table.summary(Results(elsewhere, _rows()), _SETTINGS))
    assert table.summary(Results(), _SETTINGS) == ["nothing was measured"]


def test_rows_are_printed_when_those_of_their_size_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows()
    with outputs.Output(_SETTINGS, quiet=False, joined=False) as output:
        assert output.state == "0 of 6 rows; starting the ranks"
        output.header(_HEADER)
        assert output.state == "0 of 6 rows; measuring the first row"
        capsys.readouterr()
        for row in rows[:2]:
            output.row(row)
        assert capsys.readouterr().out == ""
        output.row(rows[2])
        assert capsys.readouterr().out.count("\n") == 5 and output.state.startswith("3 of 6 rows; all_reduce nccl, ")
        output.row(rows[3])  # a library alone, because the others may be unavailable
        output.summary(Results(_HEADER, rows[:4]))
    assert "1048576 * one_shot/ll" in capsys.readouterr().out
