"""Every mutant is caught for the expected reason, and each rule of the detector is needed to catch one."""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.explorer.mutants import MUTANTS
from tests.explorer.mutation import Edit, Mutant, explore, loaded
from tests.marks import most, odd, some
from tricomm.core import launch_plan
from tricomm.core.group import Group
from tricomm.explorer import Report
from tricomm.explorer.campaign import Campaign
from tricomm.explorer.interpreted import detector
from tricomm.explorer.interpreted.detector import Detector
from tricomm.explorer.memory_model import clocks
from tricomm.explorer.memory_model.clocks import Thread
from tricomm.explorer.memory_model.shadow import LastByKind, Shadow
from tricomm.explorer.world.oracle import Oracle
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import triton_adapter


@functools.cache
def first_report(name: str) -> Report:
    return explore(MUTANTS[name])


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def calls(mutant: Mutant) -> Mutant:
    """The mutant's calls without its change: equal for all mutants that make the same calls."""
    return replace(mutant, name="", title="", bug="", edits=(), expect=frozenset(), advice="", schedules=0)


_SAMPLE = set(list(MUTANTS)[::9])


def _few(number: int, name: str) -> bool:
    return name in _SAMPLE


ALIKE: dict[Mutant, list[str]] = {}
for _mutant in MUTANTS.values():
    ALIKE.setdefault(calls(_mutant), []).append(_mutant.name)


def _quick(number: int, names: list[str]) -> bool:
    """A few mutants: each is explored to count the schedules that show it."""
    return number % 12 == 1 and len(names) < 3


def test_every_known_bug_has_a_mutant():
    assert {f"K{n:02}" for n in range(1, 33)} | {"K33a", "K33b"} <= set(MUTANTS)
    assert all(m.edits and m.expect and m.bug for m in MUTANTS.values())


@pytest.mark.parametrize("name", some(MUTANTS, _few))
def test_a_mutant_is_caught(name):
    report = first_report(name)
    assert kinds(report) & MUTANTS[name].expect, str(report)


@pytest.mark.parametrize("name", some([name for name, mutant in MUTANTS.items() if mutant.advice], _few, most))
def test_the_advice_names_the_missing_order(name):
    assert any(MUTANTS[name].advice in finding.advice for finding in first_report(name).findings), str(
        first_report(name)
    )


@pytest.mark.parametrize("names", some(map(list, ALIKE.values()), _quick, odd), ids=lambda names: "-".join(names))
def test_the_unchanged_kernel_is_clean_under_the_same_schedules(names):
    mutant = MUTANTS[names[0]]
    report = explore(mutant, changed=False, schedules=max(first_report(name).ran for name in names))
    assert kinds(report) == mutant.clean, str(report)


def test_a_mutant_leaves_nothing():
    methods = dict(vars(Group))
    with loaded(MUTANTS["K29"].edits) as pads:
        name, folder = pads.__package__, Path(pads.__file__).parent
        assert (
            launch_plan.registry.__name__ == f"{name}.collectives.registry"
            and dict(vars(Group)) != methods
            and folder.is_dir()
        )
    assert launch_plan.registry is registry and dict(vars(Group)) == methods and not folder.exists()
    assert not [m for m in sys.modules if m.startswith(name)]
    assert not [f for f in (*triton_adapter.substitutes, *triton_adapter._plain) if f.__module__.startswith(name)]


# Without one of its rules the explorer misses a mutant.


def every_flag_releases_and_acquires(patch: pytest.MonkeyPatch) -> None:
    publish, observe = Thread.publish, Thread.observe
    patch.setattr(Thread, "publish", lambda self, sem, *rest: publish(self, "acq_rel", *rest))
    patch.setattr(Thread, "observe", lambda self, message, sem, *rest: observe(self, message, "acq_rel", *rest))
    patch.setattr(detector, "RELEASES", ("relaxed", "acquire", "release", "acq_rel"))


def every_scope_is_the_system(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clocks, "_includes", lambda *given: True)
    patch.setattr(detector, "SCOPES", dict.fromkeys(detector.SCOPES, detector.SCOPES["sys"]))


def a_block_is_one_thread(patch: pytest.MonkeyPatch) -> None:
    publish, observe = Thread.publish, Thread.observe

    def publishing(self: Thread, *given: object) -> object:
        self.barrier()
        return publish(self, *given)

    def observing(self: Thread, *given: object) -> None:
        observe(self, *given)
        self.barrier()

    patch.setattr(Thread, "publish", publishing)
    patch.setattr(Thread, "observe", observing)


def only(patch: pytest.MonkeyPatch, written: bool) -> None:
    late = LastByKind.late
    patch.setattr(LastByKind, "late", lambda self, *given: late(self, *given) if self._written == written else None)


def reads_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    only(patch, written=True)


def writes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shadow, "unordered_write", lambda self, index, known: self.written[index] < 0)
    only(patch, written=False)


def sizes_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(detector, "same_size", lambda *given: True)


def ll_words_are_overwritten_freely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Detector, "_ll_overwritten", lambda *given: None)


def no_check_for_unread_flags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Detector, "leftovers", lambda *given: None)


def results_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Oracle, "findings", lambda self: [])
    patch.setattr(Campaign, "_compared", lambda *given: [])


NEEDED_FOR: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    every_flag_releases_and_acquires: "K01 K02",
    every_scope_is_the_system: "K03 K25",
    a_block_is_one_thread: "K33a K33b",
    reads_are_forgotten: "K16 M17",
    writes_are_forgotten: "K24",
    sizes_do_not_matter: "M25",
    ll_words_are_overwritten_freely: "M05 M09",
    no_check_for_unread_flags: "M29",
    results_are_not_compared: "K26",
}
RULES = [(rule, name) for rule, names in NEEDED_FOR.items() for name in names.split()]


@pytest.mark.parametrize(("rule", "name"), some(RULES, 5, odd), ids=lambda value: getattr(value, "__name__", value))
def test_each_rule_is_needed(rule, name, monkeypatch):
    """Under the very schedules that show the mutant, nothing is found without the rule."""
    number = first_report(name).ran
    rule(monkeypatch)
    report = explore(MUTANTS[name], schedules=number)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["K27", "K28"])
def test_too_few_places_for_the_grid_are_needed(name):
    assert explore(MUTANTS[name], residency=None).ok


@pytest.mark.parametrize("name", ["K18", "M17", "M32"])
def test_epochs_before_the_limits_are_needed(name):
    assert explore(replace(MUTANTS[name], first_epoch=1), schedules=1).ok


def test_late_stores_are_needed():
    assert explore(MUTANTS["M37"], schedules=first_report("M37").ran, faults=()).ok


def test_more_than_one_schedule_is_needed():
    mutant = replace(MUTANTS["K20"], strategy="random")
    assert explore(mutant, schedules=1).ok
    assert not explore(mutant, schedules=60).ok


def test_a_report_says_which_flag_a_lost_word_should_have():
    sent = "words, flag, lane < count, PTX)"
    edit = Edit("kernels/primitives.py", sent, sent.replace("count", "count - 1"))
    key = ("all_reduce", "one_shot", "ll")
    (finding,) = explore(Mutant("lost", "", "", (edit,), (key,), frozenset({"deadlock"}), sizes=(5,))).findings
    assert finding.kind == "deadlock"
    assert [(waiter["expected"], waiter["found"]) for waiter in finding.accesses] == [(1, 0)] * 2
    assert all("ll mailbox" in waiter["place"] and "byte 64" in waiter["place"] for waiter in finding.accesses)
