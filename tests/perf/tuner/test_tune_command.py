"""`tricomm tune` with real ranks on a CPU: what it refuses, what it writes, what it keeps when a rank dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests import forked
from tests.perf.test_workers import gone
from tricomm.cli import cli
from tricomm.policy import tuning_tables, user_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_SMALL = ("--device", "cpu", "--collective", "all_reduce", "--bits", "32", "--sizes", "1K")
_BOX = Fingerprint("cpu", "", 2)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "tables"))
    return tmp_path / "tables"


def _tune(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = forked.command("tune", *_SMALL, *arguments, **more)
    return done


def _rounds(folder: Path) -> int:
    files = list(folder.glob("tuning-*.jsonl"))
    return max(0, len(files[0].read_bytes().split(b"\n")) - 2) if files else 0


def test_simulated_times_are_refused_before_ranks_start_unless_requested(_folder: Path) -> None:
    ranks: list[Any] = []
    done = _tune("--budget", "5s", started=ranks)
    assert (
        not ranks and done.returncode == 3 and "--simulated makes a table of them that no GPU ever uses" in done.stderr
    )
    assert not list(_folder.glob("*.json"))


def test_a_mode_that_a_cpu_does_not_have_is_refused(_folder: Path) -> None:
    ranks: list[Any] = []
    done = _tune("--simulated", "--mode", "graph", started=ranks)
    assert not ranks
    assert done.returncode == 3 and "mode 'graph' needs CUDA graphs" in done.stderr, done.stderr


def test_an_interrupted_run_resumes_and_its_table_is_used(_folder: Path) -> None:
    first = _tune("--simulated", "--budget", "1s")
    assert first.returncode == 0, first.stderr
    plan = [line for line in first.stderr.splitlines() if line.startswith("# ")]
    assert plan[0] == "# 1 decision for 2 ranks: all_reduce, 1 KiB"
    assert plan[1].startswith("# at most 1 s, with the start of the ranks") and str(_folder) in plan[2]
    assert all(line.startswith("simulated: ") for line in first.stdout.splitlines() if "decisions change" in line)
    known = _rounds(_folder)
    assert known > 0  # the first round is run whatever the budget
    second = _tune("--simulated", "--budget", "2s")
    assert second.returncode == 0, second.stderr
    assert "going on from" in second.stderr and "samples are known" in second.stderr
    # A busy machine may show no certain gain, which is not what is tested here, so force one.
    if not list(_folder.glob("*.json")):
        user_tables.save(TunedTable(_BOX, (TableRow("all_reduce", 2, 1024, "two_shot", "ll", mode="eager", bits=32),)))
    (file,) = _folder.glob("*.json")
    result = user_tables.read(file)
    assert result.simulated and result.fingerprint == _BOX and all(row.world_size == 2 for row in result.rows)
    shown = CliRunner().invoke(cli, ["info", "--json"])
    reasons = {c["reason"] for c in json.loads(shown.output)["selection"] if c["ranks"] == 2 and c["nbytes"] == 1024}
    assert any(f"tuned {_BOX.digest} (simulated)" in reason for reason in reasons)


def test_measurements_are_kept_when_a_rank_dies(_folder: Path) -> None:
    ranks: list[Any] = []

    def kill() -> None:
        end = time.monotonic() + 90
        while _rounds(_folder) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        os.kill(ranks[1].pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    done = _tune("--simulated", "--budget", "10m", "--sizes", "1K:4K:4", started=ranks)
    killing.join()
    assert done.returncode == 1 and "rank 1" in done.stderr and "What was measured is kept in" in done.stderr, done
    kept = _rounds(_folder)
    assert kept >= 2 and len(ranks) == 2 and all(gone(rank.pid) for rank in ranks)
    again = _tune("--simulated", "--budget", "1s", "--sizes", "1K:4K:4")
    assert again.returncode == 0 and "samples are known" in again.stderr, again.stderr


def test_measurements_are_kept_after_an_interrupt(_folder: Path) -> None:
    command = [sys.executable, "-m", "tricomm", "tune", *_SMALL, "--simulated"]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + 90
        while _rounds(_folder) < 1 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(timeout=60) == 130
    assert "what was measured is kept" in said and _rounds(_folder) >= 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("")
    done = _tune("--simulated", "--budget", "60s")
    assert done.returncode == 3 and "TRICOMM_TUNING_DIR names another directory" in done.stderr, done.stderr


@pytest.mark.exhaustive
def test_the_ranks_of_torchrun_tune_together(_folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tricomm")
    asked = ("tune", *_SMALL, "--simulated", "--budget", "1s")
    done = forked.script(*torchrun, *asked, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("decisions change") == 1 and _rounds(_folder) > 0  # rank 0 alone prints


# Commands for tables


def _tuned(*rows: TableRow, **more: Any) -> TunedTable:
    return TunedTable(more.pop("box", _BOX), rows, "2026-11-21T12:00:00+00:00", {"tricomm": "0.1.0"})


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", *arguments])


_LL = TableRow("all_reduce", 2, 4096, "one_shot", "ll", mode="eager", bits=32, blocks=1, warps=8, tile=512)
_SIMPLE = TableRow("all_reduce", 2, 1 << 20, "two_shot", "simple", mode="eager", bits=32)


def test_tables_are_shown_with_the_boxes_that_they_are_for(_folder: Path) -> None:
    assert f"no tables in {_folder}" in _run("show").output
    user_tables.save(_tuned(_LL, _SIMPLE))
    (_folder / "broken.json").write_text("{}")
    done = _run("show")
    assert done.exit_code == 1 and "2 ranks on cpu (cpu), simulated: no GPU uses it" in done.output
    assert (
        "tricomm 0.1.0" in done.output
        and "4097 to 1048576" in done.output
        and "one_shot/ll 1x8 tile 512" in done.output
    )
    assert "broken.json: not a tuning table" in done.output
    assert _run("show", str(_folder / "broken.json")).exit_code == 2, "as merge"


def test_undo_reverts_the_last_change_and_then_removes_the_table(_folder: Path) -> None:
    assert "nothing to undo" in _run("undo").output
    file = user_tables.save(_tuned(_LL))
    user_tables.save(_tuned(_SIMPLE))
    assert user_tables.found() == [file]  # the earlier one is no table that a communicator may find
    done = _run("undo")
    assert done.exit_code == 0 and done.output == f"{file}: the table before the last change\n"
    assert user_tables.load(_BOX) == _tuned(_LL)
    done = _run("undo", str(file))
    assert done.exit_code == 0 and "removed; the shipped tables decide" in done.output
    assert user_tables.load(_BOX) is None and user_tables.found() == []
    assert _run("undo", str(file)).exit_code == 2  # the file does not exist
    user_tables.save(_tuned(_SIMPLE))
    assert _run("undo").output.endswith("removed; the shipped tables decide\n")  # nothing older comes back


def test_undo_removes_no_file_that_tune_has_not_saved(tmp_path: Path, _folder: Path) -> None:
    file, mine = user_tables.save(_tuned(_LL)), tmp_path / "mine.txt"
    mine.write_text("mine")
    done = _run("undo", str(file), str(mine))
    assert done.exit_code == 2 and "save no table under such a name; nothing was changed" in " ".join(
        done.output.split()
    )
    assert mine.read_text() == "mine" and user_tables.load(_BOX) == _tuned(_LL)
    (_folder / "package.json").write_text("{}")
    assert _run("undo").exit_code == 0 and list(_folder.glob("*.json")) == [_folder / "package.json"]
    assert "nothing to undo" in _run("undo").output


def test_undo_without_anything_to_change_exits_with_3(_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    user_tables.save(_tuned(_LL))
    monkeypatch.setattr(user_tables.files, "locked", refused)
    done = _run("undo")
    assert done.exit_code == 3 and "cannot be changed" in done.output and user_tables.load(_BOX) == _tuned(_LL)


def test_tables_of_one_kind_of_box_are_merged_and_the_last_counts(tmp_path: Path, _folder: Path) -> None:
    other = TableRow("all_gather", 2, 64, "one_shot", "ll", mode="eager")
    files = [tmp_path / name for name in ("one.json", "two.json", "else.json")]
    for file, result in zip(
        files, (_tuned(_LL, other), _tuned(_SIMPLE), _tuned(box=Fingerprint("cpu", "", 4))), strict=True
    ):
        file.write_bytes(tuning_tables.dumps(result))
    done = _run("merge", str(files[0]), str(files[1]))
    assert done.exit_code == 0 and user_tables.load(_BOX).rows == (other, _SIMPLE)  # type: ignore[union-attr]
    _run("merge", str(files[1]), str(files[0]), "-o", str(tmp_path / "out.json"))
    assert user_tables.read(tmp_path / "out.json").rows == (replace(_SIMPLE, min_bytes=_LL.max_bytes + 1), _LL, other)
    refused = _run("merge", str(files[0]), str(files[2]))
    assert refused.exit_code == 2 and "different boxes cannot be merged" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--collective", "allreduce"), "collective 'allreduce' is unknown (did you mean all_reduce?)"),
        (("--collective", "all_to_all_v"), "collective 'all_to_all_v' is unknown"),
        (("--bits", "12"), "bits '12' is unknown"),
        (("--mode", "kernel"), "mode 'kernel' is unknown; there is eager, graph"),
        (("--budget", "soon"), "budget 'soon': a time like 90s, 5m or 1h is needed"),
        (("--budget", "2000h"), "of a day at most"),
        (("--nproc", "9"), "1<=x<=8"),
        (("--collective", "all_reduce_rms_norm", "--hidden", "8k"), "'norm@8k': rows are named like norm@8192"),
        (("--collective", "all_reduce_rms_norm", "--hidden", "0"), "rows of a multiple of 8 elements, up to 16384"),
        (
            ("--collective", "all_reduce_rms_norm", "--hidden", "24", "--quantize", "nvfp4"),
            "nvfp4 needs a multiple of 16",
        ),
        (("--quantize", "fp8"), "--quantize: only rows of all_reduce_rms_norm have that"),
        (("--collective", "all_reduce_rms_norm", "--quantize", "fp6"), "quantization 'fp6' is unknown (did you mean"),
        (("--collective", "all_reduce_rms_norm", "--bits", "64"), "nothing to tune at these widths and sizes"),
        (("--collective", "all_reduce_rms_norm", "--beside-compute"), "no fused kernel leaves room for others"),
        (("shw",), "No such command 'shw'"),
        (("--nproc", "4", "--hidden", "8", "show"), "--nproc, --hidden: for tuning alone, so tune show would not look"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments: tuple[str, ...], said: str) -> None:
    done = _run(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output
