"""The model of the mailbox protocol: every order of events, each rule taken away, and the model's own checks."""

import pytest

from devtools import mailbox_model
from devtools.mailbox_model import __main__ as command
from devtools.mailbox_model import replace, residency, shrink, shrink_calls
from devtools.mailbox_model.explore import LOSES, SAFE, WRONG, Case, barrier, calls, explore, poll, push, read

CASES = mailbox_model.cases()


@pytest.mark.parametrize(("want", "find"), [pytest.param(*case[1:], id=case[0]) for case in residency.cases()])
def test_kernels_that_overlap_have_room(want, find):
    assert find(want)[0] == want


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_each_case_has_the_expected_verdict(case):
    assert explore(case.ranks, case.want)[0] == case.want


AGREEMENTS = [*shrink.cases(), *replace.cases()]


@pytest.mark.parametrize(("want", "find"), [pytest.param(*case[1:], id=case[0]) for case in AGREEMENTS])
def test_all_survivors_have_the_smaller_group_or_all_raise(want, find):
    assert find(want)[0] == want


@pytest.mark.parametrize(("want", "find"), [pytest.param(*case[1:], id=case[0]) for case in shrink_calls.cases()])
def test_one_death_makes_a_call_of_each_survivor_fail_once_at_most(want, find):
    assert find(want)[0] == want


def test_the_names_of_the_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_word_is_lost_if_it_is_overwritten_before_its_poll():
    sender = push(0, [1], 1, "a") + push(0, [1], 3, "a")
    assert explore([[[sender]], [[poll(1, [0], 1, "a")]]])[0] == LOSES
    assert explore([[[sender]], [[poll(1, [0], 3, "a")]]])[0] == SAFE


def test_a_read_does_not_wait():
    ranks = [[[push(0, [1], 1, "a") + barrier(0, [1], 1)]], [[barrier(1, [0], 1) + read(1, [0], 1, "a")]]]
    assert explore(ranks)[0] == SAFE
    assert explore([[[push(0, [1], 1, "a")]], [[read(1, [0], 1, "a")]]])[0] == WRONG


def test_blocks_run_concurrently_and_launches_in_turn():
    poller, pusher = poll(0, [0], 1, "a"), push(0, [0], 1, "a")
    assert explore([[[poller, pusher]]]) == (SAFE, 3)
    assert explore([[[pusher], [], [poller]]]) == (SAFE, 3)
    assert explore([[[poller], [pusher]]]) == (LOSES, 1)


def test_the_expected_fault_is_found_after_another_one():
    reads, waits = [read(0, [1], 1, "a")], [poll(0, [1], 1, "a")]
    assert explore([[waits]], WRONG)[0] == LOSES
    assert explore([[reads], [[push(1, [0], 1, "a") + poll(1, [0], 1, "a")]]], LOSES)[0] == LOSES


def test_too_many_states_are_an_error():
    ranks = calls(3, lambda rank, n, epoch: [push(rank, range(n), epoch, "ab")])
    with pytest.raises(RuntimeError, match="more than 20 states"):
        explore(ranks, limit=20)


def test_the_command_fails_if_a_verdict_is_not_the_expected_one(monkeypatch, capsys):
    wrong = Case("a poll without a push", SAFE, [[[poll(0, [1], 1, "a")]]])
    for cases, status in (([wrong._replace(want=LOSES)], 0), ([wrong], 1)):
        monkeypatch.setattr(command, "cases", lambda cases=cases: cases)
        monkeypatch.setattr(command.residency, "cases", tuple)
        monkeypatch.setattr(command.shrink, "cases", tuple)
        monkeypatch.setattr(command.shrink_calls, "cases", tuple)
        monkeypatch.setattr(command.replace, "cases", tuple)
        with pytest.raises(SystemExit) as end:
            command.main()
        assert end.value.code == status
    assert capsys.readouterr().out.splitlines()[1] == "BAD a poll without a push: loses a word (1 states)"
