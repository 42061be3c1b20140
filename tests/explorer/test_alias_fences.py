"""The order of accesses by a plain and by a multicast address (PTX ISA, 8.9.5)."""

import numpy as np
import pytest

from tests.explorer.compiled.litmus import Litmus, kinds
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
BOTH_WAYS = pytest.mark.parametrize(
    ("one", "other"), [(PLAIN, SWITCH), (SWITCH, PLAIN)], ids=["plain first", "switch first"]
)


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
@BOTH_WAYS
def test_a_flag_orders_two_addresses_only_through_an_alias_fence(fence, one, other):
    """The fence may be anywhere between the two accesses, in a thread on the path that orders them."""
    result = passed(one[0], other[1], FENCES[fence])
    assert bool(result) == (fence not in ("behind the store", "before the load"))
    assert all("put fence.proxy.alias between the two" in finding.advice for finding in result)


@pytest.mark.parametrize("one", [PLAIN, SWITCH])
def test_one_address_needs_no_alias_fence(one):
    assert not passed(one[0], one[1])


@pytest.mark.parametrize("place", [None, ("other", "behind")])
def test_an_alias_fence_alone_orders_nothing(place):
    result = passed(PLAIN[0], SWITCH[1], place, ("st.relaxed.sys.b32", "ld.acquire.sys.b32"))
    assert [finding.kind for finding in result] == ["race"]
    assert "make it sem='release'" in result[0].advice


PUT, GET, WEAK_GET = "multimem.st.relaxed", "multimem.ld_reduce.relaxed", "multimem.ld_reduce.weak"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        # A single thread needs a fence as well; and another one for a store after the load through the switch.
        (f"A st d; A fence.alias; A {GET} d", 0),
        (f"A st d; A fence.alias; A {GET} d; A st d", 1),
        (f"A st d; A {GET} d", 1),
        (f"A st d; A {GET} d; A st d", 2),
        # A barrier orders only accesses that one of its threads has ordered by a fence.
        (f"A st d; A1 st e; A bar; A2 {GET} d; A2 {GET} e", 2),
        (f"A st d; A1 st e; A fence.alias; A bar; A2 {GET} d; A2 {GET} e", 1),
        (f"A st d; A1 st e; A fence.alias; A bar; A2 {GET} d", 0),
        (f"A st d; A1 st e; A1 fence.alias; A bar; A2 {GET} e", 0),
        (f"A st d; A1 st e; A fence.alias; A1 fence.alias; A bar; A2 {GET} d; A2 {GET} e", 0),
        # The fence of another thread is enough if the order passes through that thread, so not every thread needs one.
        (f"A2 st d; A bar; A fence.alias; A bar; A {GET} d; A1 {GET} d; A2 {GET} d", 0),
        (f"A2 st d; A bar; A bar; A {GET} d; A1 {GET} d; A2 {GET} d", 3),
        # The end of a launch is an alias fence, and a relaxed store orders the accesses of earlier launches.
        (f"A {PUT} d; A end; B ld d; B1 ld d", 0),
        (f"A {PUT} d; A end; B st.relaxed f; C ld.acquire f; C ld d", 0),
        # All may add to a flag by its multicast address, as in CUDA's example; it orders the data.
        (f"A {PUT} d; A multimem.red.add.release f; C ld.acquire f; C fence.alias; C ld d", 0),
        (f"A {PUT} d; A multimem.red.add.release f; C ld.acquire f; C ld d", 1),
        # A fence before the acquire is enough for a thread's plain accesses.
        ("C fence.alias; A st d; A st.release f; C ld.acquire f; C ld d", 0),
        # A strong store is not forgotten for a later one by the other address.
        (f"A st.relaxed d; A {PUT} d; A {WEAK_GET} d", 1),
        (f"A st.relaxed d; A fence.alias; A {PUT} d; A {WEAK_GET} d", 0),
    ],
)
def test_accesses_that_an_alias_fence_orders(program, found):
    assert kinds(program, "001", threads=3) == ["race"] * found


def test_an_acquire_after_an_alias_fence_orders_a_thread_that_is_alone_in_its_block():
    assert kinds("A fence.alias; B st d; B st.release f; A ld.acquire f; A ld d", "10", threads=1) == []


@pytest.mark.parametrize(("one", "other"), [(PUT, GET), ("st.relaxed", GET), (PUT, "ld.relaxed"), (PUT, "st.relaxed")])
def test_strong_accesses_may_meet_by_two_addresses(one, other):
    assert kinds(f"A {one} d; B {other} d") == []


def _all(count):
    return f"A{','.join(map(str, range(count)))}"


@BOTH_WAYS
@pytest.mark.parametrize("readers", [1, 14])
def test_a_read_is_not_forgotten_for_a_later_one_of_the_same_thread_by_the_other_address(one, other, readers):
    """Both reads are weak. The store is ordered after both, but after the first one not by a fence."""
    first, second, store = (name.replace("relaxed.sys", "weak") for name in (one[1], other[1], other[0]))
    read = f"{_all(readers)} {first} d; {_all(readers)} {second} d; A bar"
    assert kinds(read, threads=readers + 1) == []
    assert kinds(f"{read}; A{readers} {store} d", threads=readers + 1) == ["race"]


@pytest.mark.parametrize("readers", [1, 12])
def test_a_read_is_not_forgotten_for_a_later_one_by_the_other_address(readers):
    """Plain reads, then reads through the switch without a fence between them, then a store through the switch."""
    read = f"{_all(readers)} ld d; A bar; A {GET} d; A bar"
    assert kinds(read, threads=readers) == []
    assert kinds(f"{read}; A {PUT} d", threads=readers) == ["race"]


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
