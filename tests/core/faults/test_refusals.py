"""A thread, a file, a descriptor, memory or a tensor is refused at any call of the library: all ranks get a named error
in time, the processes go on, and a new group works."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import ranks
from tests.core.bodies import refusal_bodies as bodies
from tricomm.core import entry_guard
from tricomm.errors import ResourceError


def run(folder, *case):
    folder.mkdir(mode=0o700)
    return ranks.run(2, bodies.scenario, str(folder), *case, timeout=60)


def places(folder, route):
    """(rank, kind, place) of each call that both ranks' scenario makes over `route`."""
    recorded = run(folder, route)
    assert all(first[0] == again[0] == "" and left == [] for first, again, left, _, _ in recorded), recorded
    return [(rank, kind, place) for rank, (*_, seen, _) in enumerate(recorded) for kind, place in seen]


def wrong(results):
    """The promises that these results break."""
    found = []
    for rank, ((kind, text, slowest), (_, again), left, _, _) in enumerate(results):
        found += [f"rank {rank}: {text}"] * kind.startswith("bare")
        found += [f"rank {rank}: {slowest:.1f} s: {text}"] * (slowest > bodies.LIMIT + 1.0 + ranks.BUSY)
        found += [f"rank {rank}, another group: {again}"] * (again != "")
        found += [f"rank {rank}: left behind: {left}"] * (left != [])
    return found


def check(folder, route, cases):
    """Run each case in new processes, two cases at a time."""

    def one(numbered):
        number, (rank, kind, place, lasting) = numbered
        return [
            f"{kind} {place} {lasting}: {text}"
            for text in wrong(run(folder / str(number), route, kind, place, rank, lasting))
        ]

    with ThreadPoolExecutor(2) as pool:
        assert [text for found in pool.map(one, enumerate(cases)) for text in found] == []


@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_some_refusals_on_one_rank_are_named_on_both(route, tmp_path):
    found = places(tmp_path / "first", route)
    starts = [place for place in found if place[1] == "thread" and place[0] == 1]
    assert len(found) > 20 and len(starts) > 1
    chosen = [*starts, *random.Random(7).sample(found, 4)]
    check(tmp_path, route, [(*place, number % 2 == 1) for number, place in enumerate(chosen)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_every_refusal_on_one_rank_is_named_on_both(route, lasting, tmp_path):
    check(tmp_path, route, [(*place, lasting) for place in places(tmp_path / "first", route)])


@pytest.mark.parametrize("without, kind, at, seen", [
    ("names", "tensor", "core.group", "[init] RuntimeError"),
    ("last exchange", "thread", "core.watch.watcher", "[all_reduce] GroupAborted"),
])  # fmt: skip
def test_without_the_protection_it_shows(without, kind, at, seen, tmp_path):
    place = next(p for r, k, p in places(tmp_path / "first", "communicator") if r == 1 and k == kind and at in p)
    results = run(tmp_path / "hurt", "communicator", kind, place, 1, False, without)
    assert any(seen in text for (_, text, _), *_ in results), results


@pytest.mark.parametrize("error", [TimeoutError("alarm"), ConnectionResetError(104, "reset"), OSError("of a handler")])
def test_an_error_that_a_signal_handler_may_raise_keeps_its_class(error):
    assert entry_guard.name_refusal(error) is None


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), OSError(12, "no memory"), MemoryError("none")])
def test_a_refusal_of_the_system_is_named(error):
    with pytest.raises(ResourceError, match="a limit of this process"):
        entry_guard.name_refusal(error)
