"""Tuning for groups with `Options(wire=)`: their rows decide for these groups alone; results are checked as codes."""

from dataclasses import replace
from typing import Any

import pytest

import tricomm
from tests import forked
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.options import Options
from tricomm.perf.tuner import points
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.worker import Sampler
from tricomm.policy import selection, tuning_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_POINT = Point("all_reduce", 16, "eager", 6000, wire="fp8")
_CODED = Candidate("two_shot_fp8", "simple", 2, 8, 1024)
_H100 = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), layout.MAX_BLOCKS, wire="fp8")


def _chosen(row: TableRow, nbytes: int, wire: str = "fp8") -> tuple[str, int, int, int]:
    facts = replace(_H100, tuned=(row,), tuned_name="tuned", wire=wire)
    choice = selection.choose(facts, "all_reduce", nbytes, bits=16)
    return choice.algorithm, choice.blocks, choice.warps, choice.block


def test_a_row_decides_for_groups_that_ask_for_its_wire_and_for_no_others() -> None:
    coded = Candidate("two_shot_fp8", "simple", 24, 4, 256)
    row = coded.row(_POINT, 8, 1 << 20, 1 << 19)
    assert row.wire == "fp8" and _chosen(row, 1 << 20) == ("two_shot_fp8", 24, 4, 256)
    assert _chosen(row, 1 << 18)[0] != "two_shot_fp8" and _chosen(row, 4 << 20)[0] == "two_shot_fp8"  # by the rule
    for wire in ("", "int8"):
        assert _chosen(row, 1 << 19, wire)[0] not in ("two_shot_fp8", "two_shot_int8")
    plain = Candidate("two_shot", "simple", 24, 8, 512).row(_POINT, 8, 4 << 20)
    assert _chosen(plain, 4 << 20)[:2] == ("two_shot", 24) and _chosen(plain, 8 << 20)[0] == "two_shot_fp8"
    assert _chosen(replace(plain, blocks=12), 4 << 20, "")[:2] != ("two_shot", 12)
    every = replace(plain, wire=None)  # tuned without the option: the rule comes first
    assert _chosen(every, 4 << 20)[0] == "two_shot_fp8" and _chosen(every, 4 << 20, "")[:2] == ("two_shot", 24)


def test_a_row_that_quantises_names_the_wire_and_a_file_keeps_it() -> None:
    row = _CODED.row(_POINT, 2, 8000)
    table = TunedTable(Fingerprint("cpu", "", 2), (row,))
    assert tuning_tables.loads(tuning_tables.dumps(table), "here").rows == (row,)
    for wire in (None, "int8", "fp8_gather"):
        with pytest.raises(InvalidArgument, match="two_shot_fp8 is for groups with wire fp8"):
            replace(row, wire=wire)
    plain = TableRow("all_reduce", 2, None, "two_shot", "ll", wire="fp4")
    with pytest.raises(InvalidArgument, match="wire 'fp4' is not one of fp8, int8, fp8_gather"):
        tuning_tables.check_row(plain, "rows[0]")


def test_results_are_checked_as_the_kernel_quantises_them() -> None:
    def body(comm: Any) -> list[int]:
        sampler = Sampler(comm)
        right = [sampler.check(_POINT, each) for each in (_CODED, Candidate("two_shot", "ll", 1, 8, 1024))]
        call: Any = sampler._call
        sampler.check(_POINT, _CODED)
        call._wire = ""  # as if its codes were exact
        call._x.zero_()
        return [*right, sampler.check(_POINT, _CODED)]

    for coded, plain, unaware in tricomm.simulate(body, 2, options=Options(wire="fp8")):
        assert coded == plain == 0 and unaware > 0


def test_every_kernel_of_the_wire_is_a_candidate_and_its_name_says_so() -> None:
    request = points.parse("all_reduce", "16,32", "1K,4K", "eager", "9s", wire="int8")
    assert [p.name for p in request.points(cpu=False)][0] == "all_reduce 16 bit int8 eager 1024 B"
    assert request.key() != replace(request, wire="fp8").key() and points.parse("all", "16", "1K", "eager", "9s")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--bits", "16"), "--wire fp8: only all_reduce of 16 or 32 bits is quantised"),
        (("--collective", "all_reduce", "--bits", "16,64"), "only all_reduce of 16 or 32 bits"),
        (("--collective", "all_reduce", "--beside-compute"), "no kernel that quantises leaves room for others"),
    ],
)
def test_what_cannot_be_quantised_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = forked.command("tune", "--wire", "fp8", *arguments)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr


def test_ranks_tune_a_wire(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    asked = ("--collective", "all_reduce", "--bits", "32", "--sizes", "8K", "--wire", "int8", "--budget", "4s")
    done = forked.command("tune", "--device", "cpu", "--simulated", *asked)
    assert done.returncode == 0 and "decisions change" in done.stdout and "left out" not in done.stderr, done.stderr
    assert "two_shot_int8" in next(tmp_path.glob("tuning-*.jsonl")).read_text()
