"""`tricomm bench` with real ranks: its table, JSON and exit codes, and that it leaves no process."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.perf.test_workers import children, gone
from tricomm.communicator import Communicator
from tricomm.perf import bench_row
from tricomm.perf.bench import check_data, session, table
from tricomm.perf.bench_row import CSV_HEADER, BenchRow, Measurement
from tricomm.perf.history import database

_HEAD = ["size", "kernel", *["time", "algbw", "busbw"] * 2, "#wrong", "p50", "max", "skew"]


@pytest.fixture(scope="module", autouse=True)
def _no_history_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield folder / "tricomm" / "history.sqlite"


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.command("bench", "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, _no_history_of_the_user: Path
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    given = "--nproc 3 --collective all_reduce,all_gather --algorithm all --protocol ll,simple --sizes 512,2K"
    done = _bench(*given.split(), *"--iters 1 --warmup 0 --dtype bfloat16 --json".split(), str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(file.read_text())


def test_the_table_has_the_columns_of_nccl_tests_and_is_grouped_by_size(run: Any) -> None:
    lines = run[0].stdout.splitlines()
    head = next(line for line in lines if line.startswith("#") and "algbw" in line)
    assert head.lstrip("# ").split() == _HEAD
    rows = [line.split() for line in lines if line.startswith("  ")]
    assert len(rows) == 12 and all(len(row) == len(_HEAD) + ("*" in row) for row in rows)
    assert [row[0] for row in rows] == ["512"] * 4 + ["2048"] * 4 + ["480"] * 2 + ["2016"] * 2
    assert ["*" in row for row in rows].count(True) == 4 and max(map(len, lines)) <= table.WIDEST
    assert lines[-3] == f"3 ranks, 6 kernels, 12 rows, 0 wrong ({table.SIMULATED})"
    assert (
        lines[-2].startswith("all_reduce bfloat16 sum, eager: busbw of the fastest kernel (*) ")
        and "links" not in lines[-2]
    )
    assert lines[-1].startswith("all_gather bfloat16, eager: ") and " GB/s on average, " in lines[-1]
    assert "\x1b" not in run[0].stdout  # no colour and no progress bar without a terminal


def test_the_table_names_its_origin(run: Any) -> None:
    head = [line for line in run[0].stdout.splitlines() if line.startswith("#")]
    assert "simulated" in head[0]
    text = "\n".join(head)
    for word in ("device", "topology", "3, memory shared by posix_shm", "tricomm", "python", "torch", "triton", "cuda"):
        assert word in text


def test_the_json_is_marked_and_follows_the_formulas(run: Any) -> None:
    data = run[1]
    assert data["header"]["simulated"] is True and data["header"]["kind"] == "posix_shm"
    assert len(data["results"]) == 12
    for row in data["results"]:
        assert row["simulated"] is True and row["ranks"] == 3 and row["dtype"] == "bfloat16"
        place = row["out_of_place"]
        assert place["wrong"] == 0 and 0 < place["avg_us"] <= place["time_us"]
        assert place["algbw_gbs"] == pytest.approx(row["size_bytes"] / place["time_us"] / 1e3)
        factor = 4 / 3 if row["collective"] == "all_reduce" else 2 / 3
        assert place["busbw_gbs"] == pytest.approx(place["algbw_gbs"] * factor)


def _part(place: str, time_us: float, wrong: int | None, library: str = "tricomm") -> BenchRow:
    names = (library, "all_reduce", "one_shot", "ll", "float32", "sum", "eager", place)
    measured = Measurement(*names, 1000, time_us, 2 * time_us, 3 * time_us, 0.0, library == "tricomm", 4, 8, 512)
    return BenchRow(measured, 250, 3, 1000, 4000.0, 1000.0, 1, 0, time_us=time_us, wrong=wrong)


def test_time_is_the_slowest_ranks_and_wrong_is_the_sum() -> None:
    ranks = [(_part("out_of_place", t, w), _part("in_place", 1.0, None)) for t, w in ((1.0, 0), (4.0, 2), (1.0, 3))]
    row, in_place = session.merged(ranks)
    assert in_place.wrong is None and in_place.measured.simulated is True
    assert (row.time_us, row.avg_us, row.wrong, row.algbw_gbs) == (4.0, 2.0, 5, 0.25)
    assert (row.measured.p99_us, row.measured.max_us, row.measured.skew_us, row.slowest_rank) == (8.0, 12.0, 3.0, 1)
    assert session.merged([session.merged([rank]) for rank in ranks]) == (row, in_place)


def test_a_row_is_the_same_in_csv_json_and_history() -> None:
    """The columns must not change, because earlier files have them."""
    row, gloo = _part("out_of_place", 4.0, 5), _part("in_place", 4.0, None, "gloo")
    columns = row.columns()
    assert (
        ",".join(columns)
        == ",".join(bench_row.CSV_HEADER)
        == (
            "library,collective,algorithm,protocol,dtype,op,mode,size_bytes,count,ranks,simulated,blocks,warps,tile_words,"
            "moved_bytes,least_bytes,hops,barriers,place,time_us,avg_us,p50_us,p99_us,max_us,skew_us,slowest_rank,"
            "algbw_gbs,busbw_gbs,wrong,input_bytes,reason"
        )
    )
    assert (columns["size_bytes"], columns["tile_words"], columns["p99_us"], columns["count"]) == (1000, 512, 8.0, 250)
    assert gloo.columns()["blocks"] is None and bench_row.to_json((gloo,))["out_of_place"] is None
    data = bench_row.to_json((row,))
    assert data["out_of_place"]["wrong"] == 5 and data["in_place"] is None and data["moved_bytes"] == 4000.0
    assert sorted([*data, *data["out_of_place"], "place"]) == sorted([*columns, "out_of_place", "in_place"])


def test_rows_are_in_the_history_and_in_csv(tmp_path: Path, _no_history_of_the_user: Path) -> None:
    file = tmp_path / "rows.csv"
    done = _bench(
        "--sizes", "1K", "--iters", "3", "--dtype", "float32,int8", "--against", "gloo,nccl", "--csv", str(file)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# nccl: these ranks run on a CPU; gloo is what to compare with there" in done.stdout
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(r["library"], r["dtype"], r["place"], r["simulated"], r["wrong"]) for r in rows] == [
        (library, dtype, place, str(library == "tricomm"), "0")
        for dtype in ("float32", "int8")
        for library, place in (("tricomm", "out_of_place"), ("tricomm", "in_place"), ("gloo", "in_place"))
    ]
    with database.open_history(_no_history_of_the_user) as past:  # type: ignore[union-attr]
        entries = past.read()[-len(rows) :]
    for row, entry in zip(rows, entries, strict=True):
        assert entry.run.versions["tricomm"] and entry.run.world_size == 2 and entry.measurement.mode == "eager"
        assert entry.measurement.library == row["library"] and entry.measurement.nbytes == int(row["size_bytes"])
        assert entry.measurement.p50_us == float(row["p50_us"]) <= entry.measurement.p99_us <= entry.measurement.max_us


def _ranks_of(command: int) -> set[int]:
    ranks = {c for task in Path(f"/proc/{command}/task").iterdir() for c in children(task)}
    assert len(ranks) >= 2
    return ranks


def test_rows_are_written_to_standard_output_and_the_table_to_standard_error() -> None:
    call = ("--sizes", "1K", "--iters", "1", "--warmup", "0", "--no-check")
    done = _bench(*call, "--json", "-")
    assert len(json.loads(done.stdout)["results"]) == 1 and "# tricomm bench" in done.stderr, done.stderr
    done = _bench(*call, "--csv", "-")
    lines = done.stdout.splitlines()
    assert lines[0] == ",".join(CSV_HEADER) and len(lines) == 3 and "# tricomm bench" in done.stderr, done.stdout


def _ended(ranks: set[int]) -> bool:
    end = time.monotonic() + 10
    while not all(map(gone, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    return all(map(gone, ranks))


def test_an_interrupt_keeps_all_measurements_and_leaves_no_rank(tmp_path: Path) -> None:
    data, rows_file = tmp_path / "rows.json", tmp_path / "rows.csv"
    command = [sys.executable, "-m", "tricomm", "bench", "--device", "cpu", "--sizes", "1K:1M:2", "--iters", "10"]
    command += ["--json", str(data), "--csv", str(rows_file)]
    past = tmp_path / "tricomm" / "history.sqlite"
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    with forked.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        said = ""
        while said.count("\n  ") < 2:
            said += process.stdout.readline()
        ranks = _ranks_of(process.pid)
        process.send_signal(signal.SIGINT)
        said += process.stdout.read()
        assert process.wait(timeout=30) == 130
    assert _ended(ranks)
    # A set: the signal may come while a row is being printed, which is then printed again.
    shown = len({line for line in said.splitlines() if line.startswith("  ")})
    assert 2 <= shown < 11 and f"{shown} rows of 11, 0 wrong" in said
    assert len(json.loads(data.read_text())["results"]) == shown
    assert len(rows_file.read_text().splitlines()) == 1 + 2 * shown
    with database.open_history(past) as history:  # type: ignore[union-attr]
        assert len(history) == 2 * shown


def test_a_graph_is_refused_without_a_gpu() -> None:
    done = _bench("--sizes", "1K", "--mode", "all")
    assert done.returncode == 3 and "mode 'graph' needs CUDA graphs" in done.stderr, done.stderr


def rank_with_other_data(emit: Any, rank: int, *rest: Any) -> None:
    """A rank; rank 1 has other data than its peers expect."""
    real = check_data.values

    def values(*a: Any) -> Any:
        return real(*a[:3], 0, *a[4:]) if a[3] == 1 else real(*a)

    if rank == 1:
        check_data.values = values  # type: ignore[assignment]
    session.rank_main(emit, rank, *rest)


def test_a_wrong_result_is_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_RANK", f"{__name__}:rank_with_other_data")
    done = _bench("--sizes", "1K", "--iters", "1")
    assert done.returncode == 4, done.stdout + done.stderr
    assert " wrong" in done.stdout and ", 0 wrong" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "9"], "1<=x<=8"),
        (["--nproc", "0"], "1<=x<=8"),
        (["--sizes", "4K:1K:2"], "first must not exceed last"),
        (["--dtype", "float8"], "there is float64, float32, float16, bfloat16, float8_e4m3fn"),
        (["--op", "xor"], "there is sum, avg, min, max, prod"),
        (["--collective", "all_to_nobody"], "there is all_reduce, all_gather, reduce_scatter"),
        (["--protocol", "ll256"], "there is ll, ll128, simple"),
        (["--iters", "0"], "1<=x"),
        (["-d", "fp8"], "dtype 'fp8' is unknown (did you mean"),
        (["-d", "flot32"], "dtype 'flot32' is unknown (did you mean float32?)"),
        (["-b", "1M", "-e", "1K"], "first must not exceed last"),
        (["-b", "1K", "-f", "1"], "x>=2"),
        (["--sizes", "1K", "-e", "1M"], "--sizes 1K and -b, -e or -f say the same; give one of the two"),
        (["--mode", "graphs"], "mode 'graphs' is unknown (did you mean graph?); there is eager, graph, kernel"),
        (["--against", "mpi"], "there is nccl, gloo, symm_mem"),
        (["--json", "/nowhere/rows.json"], "its directory is not there"),
        (["--csv", "/nowhere/rows.csv"], "No such file"),
        (["--json", "-", "--csv", "-"], "one of them can go to standard output"),
        (["--quantize", "fp8"], "--quantize: only rows of all_reduce_rms_norm have that, and asked for is all_reduce;"),
        (["--top-k", "8"], "--top-k: only rows of all_reduce_rms_norm have that"),
        (["--collective", "all_gather", "--op", "max"], "op 'max': all_gather reduces nothing; leave it out"),
        (["--collective", "all_reduce_rms_norm", "--op", "max"], "all_reduce_rms_norm has sums alone"),
        (["--collective", "all", "--hidden", "64"], "--hidden: only rows of all_reduce_rms_norm have that"),
        (
            ["--collective", "all_reduce_rms_norm", "--quantize", "nvfp4", "--hidden", "1000"],
            "rows of 1000 elements; nvfp4 needs a multiple of 16",
        ),
    ],
)
def test_bad_arguments_are_usage_errors(arguments: list[str], said: str) -> None:
    from click.testing import CliRunner

    from tricomm.cli import cli

    done = CliRunner().invoke(cli, ["bench", *arguments])
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_library_that_cannot_be_compared_here_is_refused_before_ranks_start(
    started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from tricomm.cli import cli

    for name, value in started.items():
        monkeypatch.setenv(name, value)
    for start in ("run_workers", "open_group"):
        monkeypatch.setattr(session, start, lambda *_: pytest.fail("it has begun"))
    done = CliRunner().invoke(cli, ["bench", "--device", "cpu", "--no-history", "--against", "nccl,kraken"])
    refused = "these ranks run on a CPU; gloo is what to compare with there"
    assert done.exit_code == 3, done.output
    assert done.stderr == f"tricomm bench: --against nccl: {refused}; kraken: {refused}\n"


def test_combinations_without_a_kernel_are_named_and_the_others_measured() -> None:
    lists = ("--algorithm", "two_shot,one_shot", "--protocol", "ll", "--collective", "all_gather")
    done = _bench(*lists, "--sizes", "4", "--iters", "1", "--warmup", "0", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "left out: all_gather two_shot/ll: all_gather has no such kernel; there is one_shot/ll, " in done.stderr
    assert "2 ranks, 1 kernel, 1 row" in done.stdout


def test_quantised_kernels_are_measured_by_name_and_checked_exactly(tmp_path: Path) -> None:
    lists = ("--nproc", "3", "--algorithm", "two_shot,two_shot_int8,two_shot_fp8,two_shot_fp8_gather")
    more = ("--protocol", "simple", "--sizes", "12K", "--iters", "1", "--warmup", "0", "--dtype", "bfloat16,int32")
    done = _bench(*lists, *more, "--op", "sum", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert "all_reduce two_shot_fp8/simple is not run: all_reduce: wire='fp8' quantises sums and averages of" in told
    rows = json.loads((tmp_path / "rows.json").read_text())["results"]
    moved = {(r["dtype"], r["algorithm"]): round(r["moved_bytes"] / r["least_bytes"], 4) for r in rows}
    assert moved == {
        ("bfloat16", "two_shot"): 1.0,
        ("bfloat16", "two_shot_fp8"): 0.5078,
        ("bfloat16", "two_shot_int8"): 0.5078,
        ("bfloat16", "two_shot_fp8_gather"): 0.7539,
        ("int32", "two_shot"): 1.0,
    }
    assert {row[place]["wrong"] for row in rows for place in ("in_place", "out_of_place")} == {0}


def rank_without_wide_words(emit: Any, rank: int, *rest: Any) -> None:
    """A rank whose compiler has no 16-byte words, as on some GPUs."""
    from tricomm.errors import InvalidArgument

    real = Communicator.explain

    def explain(self: Communicator, *args: Any, **how: Any) -> Any:
        if "ll128" in args or how.get("protocol") == "ll128":
            raise InvalidArgument("this Triton has no wide words")
        return real(self, *args, **how)

    Communicator.explain = explain
    session.rank_main(emit, rank, *rest)


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce_rms_norm"])
def test_kernels_that_these_devices_lack_are_named_and_the_others_measured(monkeypatch, collective) -> None:
    monkeypatch.setattr(session, "_RANK", f"{__name__}:rank_without_wide_words")
    few = ("--collective", collective, "--sizes", "1K,2K", "--iters", "1", "--warmup", "0", "--no-check")
    lists = ("--algorithm", "one_shot", "--protocol", "all")
    done = _bench(*few, *lists)
    assert done.returncode == 0, done.stderr
    said = f"{collective} one_shot/ll128 is not run: this Triton has no wide words"
    assert (done.stdout + done.stderr).count(said) == 1
    measured = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("   ")]
    assert any("one_shot/ll" in row for row in measured) and not any("one_shot/ll128" in row for row in measured)
    if collective == "all_gather":
        done = _bench(*few, "--algorithm", "one_shot", "--protocol", "ll128")
        assert done.returncode == 3 and "nothing was measured: none of the kernels" in done.stderr


def test_a_device_that_does_not_exist_is_reported() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = forked.command("bench", "--device", "cuda", "--sizes", "1K")
    assert done.returncode == 3 and "sees no CUDA device" in done.stderr, done.stderr


@pytest.mark.exhaustive
def test_the_ranks_of_torchrun_are_joined() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tricomm")
    asked = ("bench", "--device", "cpu", "--sizes", "1K", "--iters", "1", "--warmup", "0", "--collective", "all")
    done = forked.script(*torchrun, *asked, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, 9 kernels, 9 rows, 0 wrong") == 1  # rank 0 alone prints


def test_a_killed_command_leaves_no_rank() -> None:
    command = [sys.executable, "-m", "tricomm", "bench", "--device", "cpu", "--sizes", "1K", "--iters", "1000000"]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        while "#wrong" not in process.stdout.readline():
            assert process.poll() is None
        ranks = _ranks_of(process.pid)
        process.kill()
        assert process.wait(timeout=20) == -signal.SIGKILL
    assert _ended(ranks)
