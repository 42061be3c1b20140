"""Accesses by a plain and by a multicast address: what orders them, and what does not (PTX ISA, 8.9.5)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.explorer.compiled.litmus import Litmus
from tricomm.explorer.compiled.thread_clocks import Clocks

DATA, FLAG = 0, 64
PLAIN, SWITCH = ("st.b32", "ld.b32"), ("multimem.st.relaxed.sys.b32", "multimem.ld_reduce.relaxed.sys.b32")
FENCES = {
    "none": None,
    "before the store": ("one", "before"),
    "behind the store": ("one", "behind"),
    "before the load": ("other", "behind"),
    "behind the load": ("other", "late"),
    "another thread": ("third", "behind"),
}


def passed(store, load, place=None, flag=("st.release.sys.b32", "ld.acquire.sys.b32")):
    """Message passing with an alias fence at `place`: the findings."""
    litmus = Litmus()
    blocks = {"one": litmus.block(0), "other": litmus.block(1, number=1), "third": litmus.block(1, number=2)}

    def at(name, moment):
        if place == (name, moment):
            blocks[name].fence(0, "alias", "sys")

    at("one", "before")
    blocks["one"](0, store, DATA, 7)
    at("one", "behind")
    at("third", "behind")
    blocks["one"](0, flag[0], FLAG, 1)
    blocks["other"](0, flag[1], FLAG, 0)
    at("other", "behind")
    assert blocks["other"](0, load, DATA) == [7]
    at("other", "late")
    return litmus.detector.findings


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize(("one", "other"), [(PLAIN, SWITCH), (SWITCH, PLAIN)], ids=["plain first", "switch first"])
def test_a_flag_orders_two_addresses_only_through_an_alias_fence(fence, one, other):
    """Anywhere between the two, in a thread that the order goes through."""
    result = passed(one[0], other[1], FENCES[fence])
    assert bool(result) == (fence not in ("behind the store", "before the load"))
    assert all("put fence.proxy.alias between the two" in finding.advice for finding in result)


@pytest.mark.parametrize("one", [PLAIN, SWITCH])
def test_one_address_needs_no_alias_fence(one):
    assert not passed(one[0], one[1])


@pytest.mark.parametrize("place", [None, ("other", "behind")])
def test_an_alias_fence_orders_nothing_by_itself(place):
    result = passed(PLAIN[0], SWITCH[1], place, ("st.relaxed.sys.b32", "ld.acquire.sys.b32"))
    assert [finding.kind for finding in result] == ["race"]
    assert "make it sem='release'" in result[0].advice


def test_a_thread_of_its_own_needs_one_too():
    for fenced in (False, True):
        litmus = Litmus()
        block = litmus.block()
        block(0, PLAIN[0], DATA, 7)
        if fenced:
            block.fence(0, "alias", "sys")
        block(0, SWITCH[1], DATA)
        assert litmus.kinds == ([] if fenced else ["race"])
        block(0, PLAIN[0], DATA, 8)  # after the load through the switch, and no fence
        assert litmus.kinds == (["race"] if fenced else ["race", "race"])


def test_the_fence_of_one_thread_is_not_that_of_another():
    """A barrier hands on what its threads know through a fence, and no more."""
    for fences in ((), (0,), (1,), (0, 1)):
        litmus = Litmus()
        block = litmus.block(threads=3)
        block([0, 1], PLAIN[0], [DATA, DATA + 4], [7, 8])
        for thread in fences:
            block.fence(thread, "alias", "sys")
        block.barrier()
        block(2, SWITCH[1], DATA)
        assert litmus.kinds == ([] if 0 in fences else ["race"])
        block(2, SWITCH[1], DATA + 4)
        assert len(litmus.kinds) == 2 - len(fences)


def test_the_fence_of_another_thread_serves_if_the_order_goes_through_it():
    """Barrier, fence in one thread, barrier: so the block's threads need none of their own."""
    for fenced in (False, True):
        litmus = Litmus()
        block = litmus.block(threads=3)
        block(2, PLAIN[0], DATA, 7)
        block.barrier()
        if fenced:
            block.fence(0, "alias", "sys")
        block.barrier()
        for thread in range(3):
            block(thread, SWITCH[1], DATA)
        assert litmus.kinds == ([] if fenced else ["race"] * 3)


def test_the_end_of_a_launch_is_an_alias_fence():
    litmus = Litmus()
    block = litmus.block()
    block(0, SWITCH[0], DATA, 7)
    block.end()
    after = litmus.block()
    after(0, PLAIN[1], DATA)
    after(1, PLAIN[1], DATA)
    assert litmus.kinds == []


def test_a_relaxed_store_hands_on_what_earlier_launches_did_through_the_switch():
    litmus = Litmus()
    block = litmus.block()
    block(0, SWITCH[0], DATA, 7)
    block.end()
    after, other = litmus.block(), litmus.block(1)
    after(0, "st.relaxed.sys.b32", FLAG, 1)
    other(0, "ld.acquire.sys.b32", FLAG)
    other(0, PLAIN[1], DATA)
    assert litmus.kinds == []


def test_strong_accesses_may_meet_by_two_addresses():
    """As in CUDA's own example: all add to a flag by its multicast address, and poll it by the plain one."""
    for one, other in (
        (SWITCH[0], SWITCH[1]),
        ("st.relaxed.sys.b32", SWITCH[1]),
        (SWITCH[0], "ld.relaxed.sys.b32"),
        (SWITCH[0], "st.relaxed.sys.b32"),
    ):
        litmus = Litmus()
        litmus.block(0)(0, one, DATA, 7)
        litmus.block(1)(0, other, DATA, 8)
        assert litmus.kinds == [], (one, other)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_flag_that_all_add_to_by_the_multicast_address_hands_data_on(fenced):
    litmus = Litmus()
    one, other = litmus.block(0), litmus.block(1)
    one(0, SWITCH[0], DATA, 7)
    one(0, "multimem.red.add.release.sys.b32", FLAG, 1)
    other(0, "ld.acquire.sys.b32", FLAG)
    if fenced:
        other.fence(0, "alias", "sys")
    other(0, PLAIN[1], DATA)
    assert litmus.kinds == ([] if fenced else ["race"])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_has_fenced_learns_on(threads):
    litmus = Litmus()
    one, other = litmus.block(0, threads=threads), litmus.block(1, threads=threads)
    other.fence(0, "alias", "sys")
    one(0, PLAIN[0], DATA, 7)
    one(0, "st.release.sys.b32", FLAG, 1)
    other(0, "ld.acquire.sys.b32", FLAG)
    other(0, PLAIN[1], DATA)
    assert litmus.kinds == []


@pytest.mark.parametrize(("one", "other"), [(PLAIN, SWITCH), (SWITCH, PLAIN)], ids=["plain first", "switch first"])
@pytest.mark.parametrize("readers", [1, 14])
def test_a_read_is_not_forgotten_for_a_later_one_of_the_same_thread_by_the_other_address(one, other, readers):
    """Both weak. What is stored then is ordered behind both, but by no fence behind the first."""
    weak = [name.replace("relaxed.sys", "weak") for name in (one[1], other[1])]
    litmus = Litmus()
    block = litmus.block(threads=readers + 1)
    for name in weak:
        block(list(range(readers)), name, [DATA] * readers)
    block.barrier()
    assert litmus.kinds == []
    block(readers, other[0].replace("relaxed.sys", "weak"), DATA, 7)
    assert litmus.kinds == ["race"]


def test_a_strong_store_is_not_forgotten_for_a_later_one_by_the_other_address():
    for fenced in (False, True):
        litmus = Litmus()
        block = litmus.block()
        block(0, "st.relaxed.sys.b32", DATA, 7)
        if fenced:
            block.fence(0, "alias", "sys")
        block(0, SWITCH[0], DATA, 8)
        block(0, "multimem.ld_reduce.weak.b32", DATA)
        assert litmus.kinds == ([] if fenced else ["race"])


@pytest.mark.parametrize("readers", [1, 12])
def test_a_read_is_not_forgotten_for_a_later_one_by_the_other_address(readers):
    """The plain reads lie before those through the switch, but no fence is between; then a store through the switch."""
    litmus = Litmus()
    block = litmus.block(threads=readers)
    block(list(range(readers)), PLAIN[1], [DATA] * readers)
    block.barrier()
    block(0, SWITCH[1], DATA)
    block.barrier()
    assert litmus.kinds == []
    block(0, SWITCH[0], DATA, 7)
    assert litmus.kinds == ["race"]


def test_clocks_that_grow_keep_both_halves():
    clocks = Clocks()
    one, other = clocks.team(0, 2), clocks.team(1, 2)
    clocks.fence_aliases(one, one.slots[:1])
    given, fenced = clocks.row(one), int(clocks.time[one.slots[0]]) - 2
    clocks.team(0, 3 * clocks.size)
    clocks.learn(other, np.arange(2), given)
    asked = np.repeat(one.slots[:1], 2)
    known = [clocks.known(other, other.slots, asked, apart) for apart in (None, np.array([True, False]))]
    assert known[0].tolist() == [fenced + 1] * 2 and known[1].tolist() == [fenced, fenced + 1]
    assert clocks.known_of_all(other, other.slots).shape == (2, clocks.size)
