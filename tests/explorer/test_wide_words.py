"""Wide words under the explorer: one access of 16 bytes, interpreted and compiled; each mistake is found."""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

import tricomm
from tests.explorer import wide_kernels
from tests.explorer.mutation import _keep
from tricomm.explorer import Report, campaign
from tricomm.explorer.interpreted import delays as delays_of_stores
from tricomm.explorer.interpreted.delays import Delays, Held
from tricomm.explorer.memory_model.regions import Place, Region
from tricomm.explorer.memory_model.source_lines import NOWHERE
from tricomm.explorer.schedule.contention import Contention
from tricomm.explorer.schedule.tasks import Task
from tricomm.kernels.launch.memory_access import Access
from tricomm.kernels.wide_words import why_not

compiles = pytest.mark.skipif(why_not(90) is not None, reason="this Triton is refused")


def explore(form: str, schedules: int, world_size: int = 2, **others: str) -> Report:
    """Three calls of `gather_sum`: of several tiles, of a single word, and of one tile."""
    body = partial(wide_kernels.sums, sizes=(17, 1, 6), form=form)
    with patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(body, world_size, schedules, **others)


def explore_compiled(form: str, schedules: int) -> Report:
    body = partial(wide_kernels.sums, sizes=(100, 1, 93), form=form, tile=32, ptx=True, num_warps=1)
    with patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(body, 2, schedules, compiled="sm_90")


@pytest.mark.parametrize("first", [1, (1 << 31) - 3, (1 << 32) - 6], ids=["first", "past 2^31", "last"])
def test_sums_of_odd_sizes_are_exact(first):
    tricomm.simulate(partial(wide_kernels.sums, sizes=(30, 1, 7, 12, 13, 25), first=first), 3)


@pytest.mark.parametrize(("world_size", "strategy"), [(3, "random"), (2, "pct")])
def test_wide_words_are_passed(world_size, strategy):
    report = explore("wide", 6, world_size, strategy=strategy)
    assert report.ok, report


def test_a_wide_word_that_is_overwritten_before_it_was_read_is_found():
    report = explore("one box", 4)
    assert "overwritten" in str(report), report


@compiles
def test_compiled_wide_words_are_passed():
    report = explore_compiled("wide", 4)
    assert report.ok, report


@compiles
def test_a_compiled_wide_word_that_is_overwritten_is_found():
    report = explore_compiled("one box", 12)
    assert "overwritten" in str(report), report


# The rule itself: an element of 16 bytes is two words of 64 bits, and is never torn.


def _access(kind: str, address: int, itemsize: int) -> Access:
    addresses = np.array([address], np.uint64)
    return Access(kind, np.ones(1, bool), addresses, itemsize, "relaxed", "sys", lambda lanes: None)


def _task(block: int) -> Task:
    return Task(0, block, lambda: None)


def test_a_late_wide_word_reaches_memory_before_an_access_to_its_second_half():
    task, late = _task(0), _access("store", 4096, 16)
    delays = Delays(0)
    delays.add(Held(task, late, [], np.ones(1, bool), None), 0)
    assert not delays.before(task, _access("load", 4096 + 16, 8))
    assert [held.access for held in delays.before(task, _access("load", 4096 + 8, 8))] == [late]


@pytest.mark.parametrize("kept", [True, False])
def test_two_late_stores_to_one_place_arrive_in_their_order(monkeypatch, kept):
    """The second store overlaps the first by a word. An access to its other word makes both visible."""
    task, other = _task(0), _task(1)
    first, second = _access("store", 4096, 8), _access("store", 4096, 16)
    if not kept:
        monkeypatch.setattr(delays_of_stores, "_same_place", lambda a, b: False)
    seen = set()
    for seed in range(40):
        delays = Delays(seed)
        delays.add(Held(task, first, [], np.ones(1, bool), None), 0)
        assert not delays._behind(other, second).any() and not delays._behind(task, _access("store", 4104, 8)).any()
        late = delays.hold(task, second)
        seen.add(late is not None)
        if late is None:
            assert [held.access for held in delays.before(task, second)] == [first]
            continue
        delays.add(Held(task, second, [], late, None), 0)
        assert delays.held[1].until >= delays.held[0].until
        brought = [held.access for held in delays.before(task, _access("load", 4104, 8))]
        assert (brought == [first, second]) == kept
    assert seen == {True, False}


def test_a_store_of_a_wide_word_wakes_a_poll_of_its_half():
    task = _task(0)
    task.note_read(_access("load", 4096 + 8, 8), NOWHERE, np.zeros(1, np.int64), 1)
    assert task.watches(4096, 4096)
    assert not task.watches(4096 + 16, 4096 + 16)


def test_blocks_that_access_the_two_halves_of_a_wide_word_contend():
    memory = np.zeros(8, np.int64)
    region = Region("symmetric", 0, memory.ctypes.data, memory.nbytes, "words")
    known = Contention(2)
    assert not known.contested(_task(0), [Place(region, np.array([16]))], 16)
    assert known.contested(_task(1), [Place(region, np.array([24]))], 8)
