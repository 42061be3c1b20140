"""An interrupt at any line of a c10d call: the caller gets it, the other rank is told, a new group works."""

import itertools

import pytest

from tests import ranks
from tests.c10d.bodies import interrupt_bodies as bodies


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return str(tmp_path)


def walk(folder, route, call, kind="KeyboardInterrupt", part=0, parts=1, first=False, without=False):
    results = ranks.run(2, bodies.walk, folder, route, call, kind, part, parts, first, without, timeout=280)
    return results[0][0], [wrong for _, both in results for wrong in both]


def test_without_the_guard_the_other_rank_is_not_told(folder):
    _, wrong = walk(folder, "gloo", "all_reduce", part=0, parts=12, without=True)
    assert any("the group still works" in text for text in wrong)


QUICK = {
    ("gloo", "all_reduce", "KeyboardInterrupt", False),
    ("kernels", "async", "Alarm", False),
    ("gloo", "all_gather", "Alarm", True),
    ("kernels", "barrier", "Alarm", True),
}


def cases():
    for case in itertools.product(["gloo", "kernels"], bodies.CALLS, ["KeyboardInterrupt", "Alarm"], [False, True]):
        name = "-".join([*case[:3], "first call" if case[3] else "later"])
        yield pytest.param(*case, id=name, marks=[] if case in QUICK else [pytest.mark.soak])


@pytest.mark.parametrize(("route", "call", "kind", "first"), list(cases()))
def test_every_line_of_a_call(route, call, kind, first, folder):
    count, wrong = walk(folder, route, call, kind, first=first)
    assert wrong == [] and count > 40
