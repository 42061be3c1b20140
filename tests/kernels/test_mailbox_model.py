"""The mailbox protocol in every order of events, and each of its rules taken away; and that the model does look."""

from __future__ import annotations

import pytest

from devtools import mailbox_model
from devtools.mailbox_model import __main__ as command
from devtools.mailbox_model.explore import LOSES, SAFE, Case, calls, explore, poll, push

CASES = mailbox_model.cases()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_verdict_is_as_wanted(case):
    assert explore(case.ranks, case.want)[0] == case.want


def test_too_many_states_are_an_error():
    ranks = calls(3, lambda rank, n, epoch: [push(rank, range(n), epoch, "ab")])
    with pytest.raises(RuntimeError, match="more than 20 states"):
        explore(ranks, limit=20)


def test_the_command_fails_if_a_verdict_is_not_the_wanted_one(monkeypatch, capsys):
    wrong = Case("a poll without a push", SAFE, [[[poll(0, [1], 1, "a")]]])
    for cases, status in (([wrong._replace(want=LOSES)], 0), ([wrong], 1)):
        monkeypatch.setattr(command, "cases", lambda cases=cases: cases)
        with pytest.raises(SystemExit) as end:
            command.main()
        assert end.value.code == status
    assert capsys.readouterr().out.splitlines()[1] == "BAD a poll without a push: loses a word (1 states)"
