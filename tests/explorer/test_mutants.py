"""Every mutant is caught, for the reason that it was made for; and each rule of the detector is needed to catch one."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.explorer.mutants import MUTANTS
from tests.explorer.mutation import Edit, Mutant, explore
from tests.marks import most, odd, some
from tricomm.explorer import Report
from tricomm.explorer.memory_model.shadow import LastByKind


@functools.cache
def first_report(name: str) -> Report:
    return explore(MUTANTS[name])


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def calls(mutant: Mutant) -> Mutant:
    """What the mutant runs, without what is changed: the same for all that make the same calls."""
    return replace(mutant, name="", title="", bug="", edits=(), expect=frozenset(), advice="", schedules=0)


_SAMPLE = set(list(MUTANTS)[::9])


def _few(number: int, name: str) -> bool:
    return name in _SAMPLE


ALIKE: dict[Mutant, list[str]] = {}
for _mutant in MUTANTS.values():
    ALIKE.setdefault(calls(_mutant), []).append(_mutant.name)


def _quick(number: int, names: list[str]) -> bool:
    """A few of which one or two mutants are made: each is explored to learn how many schedules showed it."""
    return number % 12 == 1 and len(names) < 3


def test_every_known_bug_has_a_mutant():
    assert {f"K{n:02}" for n in range(1, 33)} | {"K33a", "K33b"} <= set(MUTANTS)
    assert all(m.edits and m.expect and m.bug for m in MUTANTS.values())


@pytest.mark.parametrize("name", some(MUTANTS, _few))
def test_a_mutant_is_caught(name):
    report = first_report(name)
    assert kinds(report) & MUTANTS[name].expect, str(report)


@pytest.mark.parametrize("name", some([name for name, mutant in MUTANTS.items() if mutant.advice], _few, most))
def test_the_advice_names_what_is_missing(name):
    assert any(MUTANTS[name].advice in finding.advice for finding in first_report(name).findings), str(
        first_report(name)
    )


@pytest.mark.parametrize("names", some(map(list, ALIKE.values()), _quick, odd), ids=lambda names: "-".join(names))
def test_the_unchanged_kernel_is_clean_under_the_same_schedules(names):
    mutant = MUTANTS[names[0]]
    report = explore(mutant, changed=False, schedules=max(first_report(name).ran for name in names))
    assert kinds(report) == mutant.clean, str(report)


# Without one of its rules the explorer misses a mutant.


def only(patch: pytest.MonkeyPatch, written: bool) -> None:
    late = LastByKind.late
    patch.setattr(LastByKind, "late", lambda self, *given: late(self, *given) if self._written == written else None)


def test_a_report_says_which_flag_a_lost_word_should_have():
    sent = "words, flag, lane < count, PTX)"
    edit = Edit("kernels/primitives.py", sent, sent.replace("count", "count - 1"))
    key = ("all_reduce", "one_shot", "ll")
    (finding,) = explore(Mutant("lost", "", "", (edit,), (key,), frozenset({"deadlock"}), sizes=(5,))).findings
    assert finding.kind == "deadlock"
    assert [(waiter["expected"], waiter["found"]) for waiter in finding.accesses] == [(1, 0)] * 2
    assert all("ll mailbox" in waiter["place"] and "byte 64" in waiter["place"] for waiter in finding.accesses)
