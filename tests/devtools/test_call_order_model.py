"""The model of the order of c10d calls: every order of events, and every rule taken away."""

from collections import defaultdict
from typing import get_args, get_type_hints

import pytest

from devtools import call_order_model
from devtools.call_order_model import __main__ as command
from devtools.call_order_model.events import Case, explore
from devtools.call_order_model.random_programs import random_program
from devtools.call_order_model.ranks import DEADLOCK, MISMATCH, WRONG, Call, Rank, Rules, Then, Wait
from devtools.call_order_model.scenarios import PROGRAMS, program, sync, taken_away
from devtools.every_order import SAFE
from tests.marks import some

CASES = call_order_model.cases()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_each_case_has_the_expected_verdict(case):
    assert explore(case, case.want)[0] == case.want


def test_the_names_of_the_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_alternative_to_every_rule_is_tested():
    hints = get_type_hints(Rules)
    ways = {
        (rule, value)
        for rule, kept in Rules()._asdict().items()
        for value in {False if kept is True else kept, *(v for v in get_args(hints[rule]) if isinstance(v, str))}
        if value is not None and value != kept
    }
    seen = {(rule, value) for case in taken_away() for rule, value in case.rules._asdict().items() if case.want != SAFE}
    assert ways <= seen


@pytest.mark.parametrize("seed", some(range(120), keep=8))
def test_random_programs_are_safe_in_every_order(seed):
    each = random_program(seed, calls=5, callbacks=3)
    assert explore(Case("", SAFE, (each, each), {"g": (0, 1)}), SAFE)[0] == SAFE


def names(scenario):
    """The names of each call of a one-rank group, over all orders of events."""
    made = defaultdict(set)

    def rank(state=None):
        return Rank(0, PROGRAMS[scenario], {"g": (0,)}, Rules(), state)

    seen, stack = set(), [rank().frozen()]
    while stack:
        now = rank(stack.pop())
        for name, call in now.calls.items():
            made[name].add(call.identity)
        after = {*now.moves(), *(state for _, state in now.finishes())} - seen
        seen |= after
        stack += after
    return dict(made)


@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        ("a late callback", {"a": "1", "b": "2", "x": "1/1/1"}),
        ("PowerSGD", {"a": "1", "p": "1/1/1", "q": "1/1.1/1", "b": "2", "r": "2/1/1", "s": "2/1.1/1"}),
        ("collect_all", {"a": "1", "b": "2", "d": "3", "x": "1/1.1/1", "y": "1/2/1"}),
        ("nested callbacks", {"a": "1", "x": "1/1/1", "y": "1/1/1/1/1", "b": "2"}),
        ("two lines attach to one future", {"a": "1", "b": "2", "x": "2/(1/1)1/1", "y": "2/1/1"}),
        (
            "asynchronous calls in callbacks",
            {"a": "1", "x1": "1/1/1", "x2": "1/1/2", "b": "2", "y1": "2/1/1", "y2": "2/1/2"},
        ),
    ],
)
def test_a_call_has_the_same_name_in_every_order(scenario, wanted):
    assert names(scenario) == {call: {name} for call, name in wanted.items()}


def of_two(first, second, want):
    return explore(Case("", want, (first, second), {"g": (0, 1)}), want)[0]


def test_the_model_checks_which_calls_are_paired():
    both = (Call("a"), Call("b"))
    assert of_two(program(*both), program(*both), SAFE) == SAFE
    assert of_two(program(*both), program(*both[::-1]), SAFE) == WRONG
    assert of_two(program(*both), program(both[0]), SAFE) == MISMATCH


def test_a_wait_for_a_call_that_never_completes_is_a_deadlock():
    crossed = program(Call("a"), Then("a", "x", "fx"), Wait("fx"), x=(Wait("b"),))
    assert of_two(crossed, crossed, SAFE) == DEADLOCK


def test_the_command_compares_the_verdicts(monkeypatch, capsys):
    alone = Case("one call", SAFE, (program(*sync("a")),), {"g": (0,)})
    for want, status in ((SAFE, 0), (WRONG, 1)):
        monkeypatch.setattr(command, "cases", lambda want=want: [alone._replace(want=want)])
        with pytest.raises(SystemExit) as end:
            command.main()
        assert end.value.code == status
    assert capsys.readouterr().out.splitlines()[1] == "BAD one call: safe (4 states)"
