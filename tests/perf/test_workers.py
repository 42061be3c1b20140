"""Worker processes: their messages arrive, a failed one is named, and none is left running."""

import os
import time
from pathlib import Path

import pytest

from tricomm.perf.workers import RankFailed, run_workers


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def children(task: Path) -> list[int]:
    try:
        return [int(p) for p in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def _failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    (tmp_path / "bad_rank.py").write_text(
        "import os, sys, time\n"
        "def main(emit, rank, world_size, url, settings):\n"
        "    emit('pid', pid=os.getpid())\n" + "".join(f"    {line}\n" for line in body.splitlines())
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    return "bad_rank:main"


def _pids_and_error(module: str, timeout: float) -> tuple[list[int], str]:
    pids = []
    with pytest.raises(RankFailed) as failed:
        for _, record in run_workers(module, 3, {}, timeout):
            pids.append(record["pid"])
    return pids, str(failed.value)


@pytest.mark.parametrize(
    ("body", "timeout", "said"),
    [
        ("if rank == 1: raise ValueError('no good')\ntime.sleep(60)", 40.0, "rank 1: ValueError: no good"),
        (
            "time.sleep(0.3)\nif rank == 2: print('last words', file=sys.stderr, flush=True); os._exit(7)\n"
            "time.sleep(60)",
            40.0,
            "rank 2: exit code 7; its last output: last words",
        ),
        ("time.sleep(60)", 5.0, "rank 0, 1, 2: no message for 5 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_bad_rank_is_named_and_all_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout: float, said: str
) -> None:
    start = time.monotonic()
    pids, error = _pids_and_error(_failing(tmp_path, monkeypatch, body), timeout)
    assert said in error
    assert len(pids) >= 1 and all(gone(pid) for pid in pids)
    assert time.monotonic() - start < 60


def test_the_output_of_a_rank_does_not_mix_with_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _failing(tmp_path, monkeypatch, "print('{not json'); os.write(1, b'noise\\n')\nemit('value', value=rank)")
    records = [record for _, record in run_workers(module, 2, {}, 60.0)]
    assert sorted(r["value"] for r in records if r["event"] == "value") == [0, 1]
