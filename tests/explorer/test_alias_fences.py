"""Accesses by a plain and by a multicast address: what orders them, and what does not (PTX ISA, 8.9.5)."""

from __future__ import annotations

import pytest

from tests.explorer.compiled.litmus import Litmus

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
