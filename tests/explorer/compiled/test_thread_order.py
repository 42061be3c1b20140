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


def test_fence_sc_orders_by_itself():
    litmus = Litmus()
    one, other = litmus.block(0), litmus.block(1)
    one(0, "st.b32", DATA, 7)
    one.fence(0, "sc", "sys")
    other.fence(0, "sc", "sys")
    other(0, "ld.b32", DATA)
    assert litmus.kinds == []


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


def test_what_comes_after_a_release_is_not_released():
    litmus = Litmus()
    one, other = litmus.block(0), litmus.block(1)
    one(0, "st.release.sys.b32", FLAG, 1)
    one(0, "st.b32", DATA, 7)
    other(0, "ld.acquire.sys.b32", FLAG)
    other(0, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


# Threads of one block


def test_lanes_of_a_warp_have_no_order():
    litmus = Litmus()
    block = litmus.block()
    block(0, "st.b32", DATA, 1)
    block(1, "ld.b32", DATA)
    assert litmus.kinds == ["race"]
    assert "thread 0" in litmus.detector.findings[0].text and "thread 1" in litmus.detector.findings[0].text


def test_lanes_of_one_store_race_unless_they_store_the_same():
    for values, kinds in (([1, 2], ["race"]), ([1, 1], [])):
        litmus = Litmus()
        block = litmus.block()
        block([0, 1], "st.b32", [DATA, DATA], values)
        block.barrier()
        block(0, "st.b32", DATA, 3)
        assert litmus.kinds == kinds


@pytest.mark.parametrize("known", [0, 1])
def test_all_copies_of_a_store_have_to_be_ordered(known):
    litmus = Litmus()
    block = litmus.block(threads=3)
    block([0, 1], "st.b32", [DATA, DATA], [1, 1])
    block.barrier([known, 2])
    block(2, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


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


def test_a_warp_that_comes_to_the_next_barrier_early_does_not_hand_on_what_it_did_between():
    litmus = Litmus()
    block = litmus.block(threads=2)
    clocks, team = litmus.detector.clocks, block.maker.team
    one, other = team.slots[[0]], team.slots[[1]]
    clocks.arrive(team, 0, one)
    clocks.arrive(team, 0, other)
    clocks.go_on(team, 0, one)
    block(0, "st.b32", DATA, 1)
    clocks.arrive(team, 0, one)
    clocks.go_on(team, 0, other)
    block(1, "ld.b32", DATA)
    assert litmus.kinds == ["race"]


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


def test_no_read_of_many_is_forgotten():
    for late in range(4):
        litmus = Litmus()
        readers = litmus.block(0, threads=4)
        readers([0, 1, 2, 3], "ld.b32", [DATA] * 4)
        readers.barrier([t for t in range(4) if t != late])
        thread = 0 if late else 1
        readers(thread, "st.b32", DATA, 1)
        assert litmus.kinds == ["race"]
        assert f"thread {late}" in litmus.detector.findings[0].text


def test_a_strong_write_that_another_one_has_covered_still_races():
    litmus = Litmus()
    one, other, third = litmus.block(0), litmus.block(0, number=1), litmus.block(1)
    one(0, "st.relaxed.sys.b32", DATA, 1)
    other(0, "st.relaxed.sys.b32", DATA, 2)
    other(0, "st.release.sys.b32", FLAG, 1)
    third(0, "ld.acquire.sys.b32", FLAG)
    third(0, "st.b32", DATA, 3)
    assert litmus.kinds == ["race"]


@pytest.mark.parametrize("first", ["st.b32", "st.relaxed.gpu.b32", "st.relaxed.sys.b64", "atom.exch.relaxed.gpu.b32"])
@pytest.mark.parametrize("later", ["st.release.sys.b32", "atom.exch.relaxed.sys.b32"])
def test_a_write_that_may_be_met_unordered_stands_for_none_before_it_that_may_not(first, later):
    for other in ("ld.relaxed.sys.b32", "st.relaxed.sys.b32", "atom.exch.relaxed.sys.b32"):
        assert _met((later,), other) == []
        assert len(_met((first, later), other)) == 1


@pytest.mark.parametrize("first", ["ld.relaxed.gpu.b32", "ld.relaxed.sys.b64", "ld.b32"])
def test_a_read_that_may_be_met_unordered_stands_for_none_before_it_that_may_not(first):
    for other in ("st.relaxed.sys.b32", "atom.exch.relaxed.sys.b32"):
        assert _met(("ld.relaxed.sys.b32",), other) == []
        assert len(_met((first, "ld.relaxed.sys.b32"), other)) == 1


@pytest.mark.parametrize("acquire", ["ld.acquire.sys.b32", "atom.add.acquire.sys.b32"])
def test_an_acquire_comes_after_what_was_written_before_the_release_that_it_reads(acquire):
    assert _met(("st.b32", "st.relaxed.gpu.b32", "st.release.sys.b32"), acquire) == []
    assert _met(("st.b32", "st.relaxed.gpu.b32", "st.relaxed.sys.b32"), acquire) == ["race"]


def _met(names, other):
    """Kinds of finding if a thread makes accesses to one word, and then a thread of another rank makes one."""
    litmus = Litmus()
    block = litmus.block(0)
    for name in names:
        block(0, name, FLAG, 1)
    litmus.block(1)(0, other, FLAG, 2)
    return litmus.kinds


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


def test_launches_that_nothing_orders_race():
    litmus = Litmus()
    first = litmus.block(0)
    second = litmus.block(0)  # on another stream
    first(0, "st.b32", DATA, 1)
    first.end()
    second(0, "st.b32", DATA, 2)
    assert litmus.kinds == ["race"]


def test_a_relaxed_flag_hands_on_what_earlier_launches_did():
    litmus = Litmus()
    first = litmus.block(0)
    first(0, "st.b32", DATA, 1)
    first.end()
    second, other = litmus.block(0), litmus.block(1)
    second(0, "st.relaxed.sys.b32", FLAG, 1)
    other(0, "ld.acquire.sys.b32", FLAG)
    other(0, "ld.b32", DATA)
    assert litmus.kinds == []


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


def test_a_reader_knows_only_the_writers_that_it_has_acquired_from():
    """Two writers and two readers of their flags: strong accesses are no race in any order."""
    litmus = Litmus()
    writers = litmus.block(0), litmus.block(1)
    readers = litmus.block(0, number=1), litmus.block(1, number=1)
    for writer, data, flag in zip(writers, (DATA, OTHER_DATA), (FLAG, SECOND_FLAG), strict=True):
        writer(0, "st.b32", data, 7)
        writer(0, "st.release.sys.b32", flag, 1)
    for reader, flag in zip(readers, (FLAG, SECOND_FLAG), strict=True):
        reader(0, "ld.acquire.sys.b32", flag)
    readers[0](0, "ld.relaxed.sys.b32", SECOND_FLAG)
    readers[1](0, "ld.relaxed.sys.b32", FLAG)
    readers[0](0, "ld.b32", DATA)
    readers[1](0, "ld.b32", OTHER_DATA)
    assert litmus.kinds == []
    readers[0](0, "ld.b32", OTHER_DATA)
    assert litmus.kinds == ["race"]


@pytest.mark.parametrize(
    ("store", "load", "kinds"),
    [
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.v2.b64", []),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b64", []),
        ("st.relaxed.sys.b128", "ld.relaxed.sys.b128", []),
        ("st.relaxed.sys.b128", "ld.relaxed.sys.v2.b64", ["race"]),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b128", ["race"]),
        ("st.relaxed.gpu.b128", "ld.relaxed.sys.b128", ["scope"]),
    ],
)
def test_128_bits_are_one_access_or_two_and_never_both(store, load, kinds):
    litmus = Litmus()
    litmus.block(0)(0, store, DATA, 7)
    litmus.block(1)(0, load, DATA)
    assert litmus.kinds == kinds


@pytest.mark.parametrize(("first", "last"), [("st", "ld"), ("ld", "st")])
def test_another_ranks_access_of_the_same_kind_stands_for_none_before_it(first, last):
    """The last one's scope includes the second one, which is of its rank, and not the first."""
    litmus = Litmus()
    one, other, beside = litmus.block(0), litmus.block(1), litmus.block(1, number=1)
    one(0, f"{first}.relaxed.sys.b32", DATA, 1)
    one(0, "st.release.sys.b32", FLAG, 1)
    assert other(0, "ld.acquire.sys.b32", FLAG) == [1]
    other(0, f"{first}.relaxed.sys.b32", DATA, 2)
    assert litmus.kinds == []
    beside(0, f"{last}.relaxed.gpu.b32", DATA, 3)
    assert litmus.kinds == ["scope"]
