"""The rules of the PTX memory model, one small program each: what orders two threads, and what does not."""

from __future__ import annotations

import pytest

from tests.explorer.compiled.litmus import Litmus

DATA, FLAG = 0, 64


def passed(store, load, *, ranks=(0, 1), before=lambda block: None, after=lambda block: None):
    """Message passing: kinds of finding if thread 0 stores data and a flag, and another rank's thread reads both."""
    litmus = Litmus()
    one, other = litmus.block(ranks[0]), litmus.block(ranks[1], number=1)
    one(0, "st.b32", DATA, 7)
    before(one)
    one(0, store, FLAG, 1)
    assert other(0, load, FLAG, 0) == [1]
    after(other)
    assert other(0, "ld.b32", DATA) == [7]
    return litmus.kinds


@pytest.mark.parametrize("store", ["st.release.sys.b32", "atom.exch.release.sys.b32", "red.add.release.sys.b32"])
@pytest.mark.parametrize("load", ["ld.acquire.sys.b32", "atom.add.acquire.sys.b32", "atom.add.acq_rel.sys.b32"])
def test_release_to_acquire_orders(store, load):
    assert passed(store, load) == []


@pytest.mark.parametrize(
    ("store", "load", "kinds"),
    [
        ("st.relaxed.sys.b32", "ld.acquire.sys.b32", ["race"]),
        ("st.volatile.b32", "ld.acquire.sys.b32", ["race"]),
        ("st.release.sys.b32", "ld.relaxed.sys.b32", ["race"]),
        ("st.release.sys.b32", "ld.volatile.b32", ["race"]),
        ("st.b32", "ld.acquire.sys.b32", ["race", "race"]),  # the flag itself, and the data
        ("st.release.sys.b32", "ld.b32", ["race", "race"]),
        ("st.release.gpu.b32", "ld.acquire.sys.b32", ["scope", "scope"]),
        ("st.release.sys.b32", "ld.acquire.gpu.b32", ["scope", "scope"]),
    ],
)
def test_less_than_that_does_not(store, load, kinds):
    assert passed(store, load) == kinds


def test_a_narrow_scope_will_do_for_threads_that_it_includes():
    assert passed("st.release.gpu.b32", "ld.acquire.gpu.b32", ranks=(0, 0)) == []
    assert passed("st.release.cta.b32", "ld.acquire.gpu.b32", ranks=(0, 0)) == ["scope", "scope"]


@pytest.mark.parametrize("sem", ["acq_rel", "sc"])
def test_a_fence_and_a_relaxed_store_are_a_release(sem):
    fence = {"before": lambda b: b.fence(0, sem, "sys"), "after": lambda b: b.fence(0, sem, "sys")}
    assert passed("st.relaxed.sys.b32", "ld.relaxed.sys.b32", **fence) == []
    assert passed("st.volatile.b32", "ld.volatile.b32", **fence) == []
    assert passed("st.relaxed.sys.b32", "ld.relaxed.sys.b32", before=fence["before"]) == ["race"]
    assert passed("st.relaxed.sys.b32", "ld.relaxed.sys.b32", after=fence["after"]) == ["race"]
    # Two `fence.sc` order by themselves; the flag is a race all the same.
    assert passed("st.b32", "ld.relaxed.sys.b32", **fence) == ["race"] * (1 if sem == "sc" else 2)


def test_a_fence_of_too_narrow_a_scope_is_none():
    narrow, wide = (lambda b: b.fence(0, "acq_rel", "gpu")), (lambda b: b.fence(0, "acq_rel", "sys"))
    for before, after in ((narrow, wide), (wide, narrow)):
        assert passed("st.relaxed.sys.b32", "ld.relaxed.sys.b32", before=before, after=after) == ["race"]


def test_a_fence_by_another_thread_is_none():
    assert passed("st.relaxed.sys.b32", "ld.acquire.sys.b32", before=lambda b: b.fence(1, "acq_rel", "sys")) == ["race"]


@pytest.mark.parametrize("sem", ["relaxed", "acq_rel"])
def test_a_read_modify_write_hands_a_release_on(sem):
    litmus = Litmus()
    one, between, other = litmus.block(0), litmus.block(1), litmus.block(1, number=1)
    one(0, "st.b32", DATA, 7)
    one(0, "red.add.release.sys.b32", FLAG, 1)
    between(0, f"atom.add.{sem}.sys.b32", FLAG, 1)
    assert other(0, "ld.acquire.sys.b32", FLAG) == [2]
    other(0, "ld.b32", DATA)
    assert litmus.kinds == []


def test_a_relaxed_store_ends_a_chain_of_another_thread_but_not_of_its_own():
    litmus = Litmus()
    one, between, other = litmus.block(0), litmus.block(1), litmus.block(1, number=1)
    one(0, "st.b32", DATA, 7)
    one(0, "st.release.sys.b32", FLAG, 1)
    one(0, "st.relaxed.sys.b32", FLAG, 2)
    other(0, "ld.acquire.sys.b32", FLAG)
    other(0, "ld.b32", DATA)
    assert litmus.kinds == []
    between(0, "st.relaxed.sys.b32", FLAG, 3)
    between(0, "ld.acquire.sys.b32", FLAG)
    between(0, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


# Threads of one block


def test_lanes_of_one_store_race_unless_they_store_the_same():
    for values, kinds in (([1, 2], ["race"]), ([1, 1], [])):
        litmus = Litmus()
        block = litmus.block()
        block([0, 1], "st.b32", [DATA, DATA], values)
        block.barrier()
        block(0, "st.b32", DATA, 3)
        assert litmus.kinds == kinds


@pytest.mark.parametrize("how", ["barrier", "warp_barrier"])
def test_a_barrier_orders_those_that_take_part(how):
    litmus = Litmus()
    block = litmus.block(threads=3)
    block(0, "st.b32", DATA, 1)
    getattr(block, how)([0, 1])
    block(1, "ld.b32", DATA)
    assert litmus.kinds == []
    block(2, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


def test_a_barrier_orders_a_block_behind_the_release_of_one_thread():
    for barriers, kinds in (((True, True), []), ((False, True), ["race"]), ((True, False), ["race"])):
        litmus = Litmus()
        one, other = litmus.block(0), litmus.block(1)
        one([0, 1], "st.b32", [DATA, DATA + 4], 7)
        if barriers[0]:
            one.barrier()
        one(0, "st.release.sys.b32", FLAG, 1)
        other(0, "ld.acquire.sys.b32", FLAG)
        if barriers[1]:
            other.barrier()
        other([0, 1], "ld.b32", [DATA, DATA + 4])
        assert litmus.kinds == kinds


# Races and strength


@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        ("st.relaxed.sys.b32", "ld.relaxed.sys.b32", []),
        ("st.volatile.b32", "ld.volatile.b32", []),
        ("st.relaxed.sys.b32", "st.relaxed.sys.b32", []),
        ("ld.relaxed.sys.b32", "st.relaxed.sys.b32", []),
        ("ld.b32", "st.relaxed.sys.b32", ["race"]),
        ("ld.b32", "st.b32", ["race"]),
        ("st.b32", "st.b32", ["race"]),
        ("st.relaxed.gpu.b32", "ld.relaxed.sys.b32", ["scope"]),
        ("ld.relaxed.gpu.b32", "st.relaxed.sys.b32", ["scope"]),
        ("st.relaxed.sys.b64", "ld.relaxed.sys.b32", ["race"]),
        ("ld.relaxed.sys.b64", "st.relaxed.sys.b32", ["race"]),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b64", []),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b128", ["race"]),
        ("st.relaxed.sys.b128", "ld.relaxed.sys.b128", []),
        ("ld.b32", "ld.b32", []),
        ("red.add.relaxed.sys.b32", "red.add.relaxed.sys.b32", []),
        ("red.add.relaxed.gpu.b32", "red.add.relaxed.gpu.b32", ["scope"]),
    ],
)
def test_two_accesses_without_order(first, second, kinds):
    litmus = Litmus()
    litmus.block(0)(0, first, 0, 1)
    litmus.block(1)(0, second, 0, 2)
    assert litmus.kinds == kinds


# Launches


def test_a_launch_begins_behind_the_one_before_it():
    litmus = Litmus()
    first = litmus.block(0)
    first(0, "st.b32", DATA, 1)
    first.end()
    litmus.block(0)(1, "ld.b32", DATA)
    assert litmus.kinds == []
    litmus.block(1)(1, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


SECOND_FLAG, OTHER_DATA = 128, 192


def written_to_read_to_read(
    first="st.release.sys.b32", seen="ld.acquire.sys.b32", then="st.release.sys.b32", ranks=(0, 1, 0)
):
    """Write-to-read causality: a block passes on what it has acquired, and a third one reads the first one's data."""
    litmus = Litmus()
    writer, middle, reader = (litmus.block(rank, number=number) for number, rank in enumerate(ranks))
    writer(0, "st.b32", DATA, 7)
    writer(0, first, FLAG, 1)
    assert middle(0, seen, FLAG) == [1]
    middle(0, then, SECOND_FLAG, 1)
    assert reader(0, "ld.acquire.sys.b32", SECOND_FLAG) == [1]
    reader(0, "ld.b32", DATA)
    return litmus.kinds


def test_what_was_acquired_is_released_with_the_rest():
    assert written_to_read_to_read() == []
    assert written_to_read_to_read(first="st.relaxed.sys.b32") == ["race"]
    assert written_to_read_to_read(seen="ld.relaxed.sys.b32") == ["race"]
    assert written_to_read_to_read(then="st.relaxed.sys.b32") == ["race"]


def test_a_chain_over_ranks_is_as_wide_as_its_narrowest_scope():
    narrow = {"first": "st.release.gpu.b32", "seen": "ld.acquire.gpu.b32"}
    assert written_to_read_to_read(**narrow, ranks=(0, 0, 1)) == []
    assert set(written_to_read_to_read(**narrow, ranks=(0, 1, 0))) == {"scope", "race"}  # flag, data
