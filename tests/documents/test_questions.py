"""The commands in the README answer its questions, here on CPU ranks instead of a GPU box."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests import forked
from tricomm.policy import user_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_PAGE = Path(__file__).parents[2] / "README.md"
_ROW = re.compile(r"^\| (.+\?) \| (.+) \|$", re.MULTILINE)
_HERE = {"8": "2", "nccl": "gloo"}  # a box without GPUs has two ranks, and Gloo to compare with
_FEW = {"bench": ("-n", "3", "--no-history")}


def _commands() -> dict[str, list[list[str]]]:
    rows = _ROW.findall(_PAGE.read_text())
    return {
        question: [shlex.split(c) for c in re.findall(r"`tricomm ([^`]+)`", commands)] for question, commands in rows
    }


def _answers(question: str) -> list[str]:
    """Run the commands for `question`; return their outputs."""
    outputs = []
    for words in _commands()[question]:
        here = [_HERE.get(word, word) for word in words] if words[0] == "bench" else words
        done = forked.command(*here, *_FEW.get(words[0], ()))
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    return outputs


def test_at_most_two_commands_answer_a_question() -> None:
    assert len(_commands()) == 5 and all(1 <= len(commands) <= 2 for commands in _commands().values())


def test_is_it_faster_than_nccl_at_64_kib() -> None:
    measured, predicted = _answers("Is it faster than NCCL at 64 KiB?")
    assert re.search(r"^ +65536 \* \S+/\S+ .* \d+\.\d\dx$", measured, re.MULTILINE)
    assert re.search(r"^    \d+\.\d\dx as fast as gloo, slower at [01] of 1 sizes$", measured, re.MULTILINE)
    assert re.search(r"^# worth it: \d\.\dx as fast as NCCL at 64 KiB$", predicted, re.MULTILINE)


def test_which_kernel_runs_my_2_mib_of_bf16() -> None:
    (measured,) = _answers("Which kernel runs my 2 MiB of bf16?")
    assert "# all_reduce bfloat16 sum, eager" in measured and re.search(r"2097152 \* two_shot/simple ", measured)


def test_how_do_i_undo_my_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    box, versions = Fingerprint("cpu", "", 2), {"tricomm": "0.1.0"}
    for algorithm in ("one_shot", "two_shot"):
        row = TableRow("all_reduce", 2, 4096, algorithm, "ll", min_bytes=1024)
        user_tables.save(TunedTable(box, (row,), f"2026-11-2{algorithm == 'two_shot':d}", versions))
    (undone,) = _answers("How do I undo my tuning?")
    assert "the table before the last change" in undone
    restored = user_tables.load(box)
    assert restored is not None and [row.algorithm for row in restored.rows] == ["one_shot"]
