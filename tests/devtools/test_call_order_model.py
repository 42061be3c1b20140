"""The calls of c10d groups in every order of events, and each rule of their order taken away."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from devtools import call_order_model
from devtools.call_order_model import __main__ as command
from devtools.call_order_model.events import Case, explore
from devtools.call_order_model.random_programs import random_program
from devtools.call_order_model.ranks import WRONG, Rules
from devtools.call_order_model.scenarios import program, sync, taken_away
from devtools.every_order import SAFE
from tests.marks import some

CASES = call_order_model.cases()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_verdict_is_as_wanted(case):
    assert explore(case, case.want)[0] == case.want


def test_each_rule_is_taken_away_in_each_way():
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


def test_the_command_compares_the_verdicts(monkeypatch, capsys):
    alone = Case("one call", SAFE, (program(*sync("a")),), {"g": (0,)})
    for want, status in ((SAFE, 0), (WRONG, 1)):
        monkeypatch.setattr(command, "cases", lambda want=want: [alone._replace(want=want)])
        with pytest.raises(SystemExit) as end:
            command.main()
        assert end.value.code == status
    assert capsys.readouterr().out.splitlines()[1] == "BAD one call: safe (4 states)"
