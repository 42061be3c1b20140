"""Calls at the same time: over a second communicator of the same ranks, in another thread."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ranks
from tests.core.bodies import second_bodies as bodies

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


def test_every_collective_in_two_threads_is_exact(url):
    """Each rank begins with the other communicator than the rank before it."""
    assert ranks.run(3, bodies.every_collective, url) == [[]] * 3


def test_begun_in_another_order_on_every_rank_both_go_on(url):
    assert ranks.run(2, bodies.in_another_order, url, True) == [[10.0, 30.0]] * 2


def test_without_the_turns_of_the_interpreter_they_wait_for_each_other(url):
    outcomes = ranks.run(2, bodies.in_another_order, url, False)
    assert all("CollectiveTimeout" in str(o) or "GroupAborted" in str(o) for o in outcomes), outcomes


def test_a_fault_of_one_costs_the_other_nothing(url):
    for kind, text, total in ranks.run(2, bodies.one_is_lost, url):
        assert kind == "CollectiveMismatch" and "count=8" in text and "count=9" in text
        assert total == 2.0


def test_the_page_on_it_is_right(url):
    [example] = re.findall(r"```python\n(second = .*?)```", PAGE.read_text(), re.DOTALL)
    assert ranks.run(2, bodies.as_documented, url, example) == [([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])] * 2
