"""The rules of the PTX memory model: a small program for each, in which two threads are ordered or not."""

import pytest

from tests.explorer.compiled.litmus import Litmus, kinds

DATA, FLAG = 0, 64


def passed(store, load, before="", after="", ranks="01"):
    """Message passing: block A stores data and a flag, block B reads both; `before` and `after` are between the two."""
    return kinds(f"A st d; {before} A {store} f=1; B {load} f; {after} B ld d", ranks)


@pytest.mark.parametrize("store", ["st.release", "atom.exch.release", "red.add.release"])
@pytest.mark.parametrize("load", ["ld.acquire", "atom.add.acquire", "atom.add.acq_rel"])
def test_release_to_acquire_orders(store, load):
    assert passed(store, load) == []


@pytest.mark.parametrize(
    ("store", "load", "found"),
    [
        ("st.relaxed", "ld.acquire", ["race"]),
        ("st.volatile", "ld.acquire", ["race"]),
        ("st.release", "ld.relaxed", ["race"]),
        ("st.release", "ld.volatile", ["race"]),
        ("st", "ld.acquire", ["race", "race"]),  # the flag itself, and the data
        ("st.release", "ld", ["race", "race"]),
        ("st.release.gpu", "ld.acquire", ["scope", "scope"]),
        ("st.release", "ld.acquire.gpu", ["scope", "scope"]),
    ],
)
def test_weaker_accesses_do_not_order(store, load, found):
    assert passed(store, load) == found


def test_a_narrow_scope_orders_the_threads_that_it_includes():
    assert passed("st.release.gpu", "ld.acquire.gpu", ranks="00") == []
    assert passed("st.release.cta", "ld.acquire.gpu", ranks="00") == ["scope", "scope"]


@pytest.mark.parametrize("sem", ["acq_rel", "sc"])
def test_a_fence_and_a_relaxed_store_are_a_release(sem):
    before, after = f"A fence.{sem};", f"B fence.{sem};"
    assert passed("st.relaxed", "ld.relaxed", before, after) == []
    assert passed("st.volatile", "ld.volatile", before, after) == []
    assert passed("st.relaxed", "ld.relaxed", before) == passed("st.relaxed", "ld.relaxed", "", after) == ["race"]
    # Two `fence.sc` order the data without the flag, but the flag itself is still a race.
    assert passed("st", "ld.relaxed", before, after) == ["race"] * (1 if sem == "sc" else 2)


def test_a_fence_of_too_narrow_a_scope_or_by_another_thread_is_none():
    narrow, wide = "{} fence.acq_rel.gpu;", "{} fence.acq_rel;"
    for before, after in ((narrow, wide), (wide, narrow)):
        assert passed("st.relaxed", "ld.relaxed", before.format("A"), after.format("B")) == ["race"]
    assert passed("st.relaxed", "ld.acquire", "A1 fence.acq_rel;") == ["race"]


@pytest.mark.parametrize("sem", ["relaxed", "acq_rel"])
def test_a_read_modify_write_continues_a_release_sequence(sem):
    assert kinds(f"A st d; A red.add.release f=1; B atom.add.{sem} f=1; C ld.acquire f; C ld d") == []


def test_a_relaxed_store_ends_the_release_sequence_of_another_thread_only():
    own = "A st d; A st.release f; A st.relaxed f; C ld.acquire f; C ld d"
    assert kinds(own) == []
    assert kinds(f"{own}; B st.relaxed f; B ld.acquire f; B ld d") == ["race"]


def test_accesses_after_a_release_are_not_released():
    assert kinds("A st.release f; A st d; B ld.acquire f; B ld d") == ["race"]


def test_two_fences_sc_order_without_a_flag():
    assert kinds("A st d; A fence.sc; B fence.sc; B ld d") == []


# Threads of one block


def test_lanes_of_a_warp_have_no_order():
    litmus = Litmus()
    block = litmus.block()
    block(0, "st.b32", DATA, 1)
    block(1, "ld.b32", DATA)
    assert litmus.kinds == ["race"]
    assert "thread 0" in litmus.detector.findings[0].text and "thread 1" in litmus.detector.findings[0].text


def test_lanes_of_one_store_race_unless_they_store_the_same():
    for values, found in (([1, 2], ["race"]), ([1, 1], [])):
        litmus = Litmus()
        block = litmus.block()
        block([0, 1], "st.b32", [DATA, DATA], values)
        block.barrier()
        block(0, "st.b32", DATA, 3)
        assert litmus.kinds == found


@pytest.mark.parametrize("known", [0, 1])
def test_all_copies_of_a_store_have_to_be_ordered(known):
    assert kinds(f"A0,1 st d; A{known},2 bar; A2 ld d", threads=3) == ["race"]


@pytest.mark.parametrize("how", ["bar", "warp"])
def test_a_barrier_orders_its_participants(how):
    assert kinds(f"A st d; A0,1 {how}; A1 ld d", threads=3) == []
    assert kinds(f"A st d; A0,1 {how}; A1 ld d; A2 ld d", threads=3) == ["race"]


@pytest.mark.parametrize(("before", "after"), [("A bar;", "B bar;"), ("", "B bar;"), ("A bar;", "")])
def test_a_barrier_orders_a_blocks_accesses_before_the_release_of_one_thread(before, after):
    """Two threads write one word each."""
    program = f"A st d; A1 st e; {before} A st.release f; B ld.acquire f; {after} B ld d; B1 ld e"
    assert kinds(program) == ([] if before and after else ["race"])


def test_a_warp_early_at_the_next_barrier_does_not_order_its_accesses_by_the_last_one():
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
    ("first", "second", "found"),
    [
        ("st.relaxed", "ld.relaxed", []),
        ("st.volatile", "ld.volatile", []),
        ("st.relaxed", "st.relaxed", []),
        ("ld.relaxed", "st.relaxed", []),
        ("ld", "st.relaxed", ["race"]),
        ("ld", "st", ["race"]),
        ("st", "st", ["race"]),
        ("st.relaxed.gpu", "ld.relaxed", ["scope"]),
        ("ld.relaxed.gpu", "st.relaxed", ["scope"]),
        ("st.relaxed.sys.b64", "ld.relaxed", ["race"]),
        ("ld.relaxed.sys.b64", "st.relaxed", ["race"]),
        ("ld", "ld", []),
        ("red.add.relaxed", "red.add.relaxed", []),
        ("red.add.relaxed.gpu", "red.add.relaxed.gpu", ["scope"]),
        # A 128-bit access is one access or two.
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.v2.b64", []),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b64", []),
        ("st.relaxed.sys.v2.b64", "ld.relaxed.sys.b128", ["race"]),
        ("st.relaxed.sys.b128", "ld.relaxed.sys.b128", []),
        ("st.relaxed.sys.b128", "ld.relaxed.sys.v2.b64", ["race"]),
        ("st.relaxed.gpu.b128", "ld.relaxed.sys.b128", ["scope"]),
    ],
)
def test_two_accesses_without_order(first, second, found):
    assert kinds(f"A {first} d; B {second} d") == found


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
    program = "A st.relaxed d; B st.relaxed d; B st.release f; C ld.acquire f; C st d"
    assert kinds(program, "001") == ["race"]


@pytest.mark.parametrize("first", ["st", "st.relaxed.gpu", "st.relaxed.sys.b64", "atom.exch.relaxed.gpu"])
@pytest.mark.parametrize("later", ["st.release", "atom.exch.relaxed"])
def test_a_strong_write_hides_no_race_with_an_earlier_access_that_conflicts(first, later):
    for other in ("ld.relaxed", "st.relaxed", "atom.exch.relaxed"):
        assert kinds(f"A {later} f; B {other} f") == []
        assert len(kinds(f"A {first} f; A {later} f; B {other} f")) == 1


@pytest.mark.parametrize("first", ["ld.relaxed.gpu", "ld.relaxed.sys.b64", "ld"])
def test_a_strong_read_hides_no_race_with_an_earlier_access_that_conflicts(first):
    for other in ("st.relaxed", "atom.exch.relaxed"):
        assert kinds(f"A ld.relaxed f; B {other} f") == []
        assert len(kinds(f"A {first} f; A ld.relaxed f; B {other} f")) == 1


@pytest.mark.parametrize("acquire", ["ld.acquire", "atom.add.acquire"])
def test_an_acquire_is_ordered_after_the_writes_before_the_release_that_it_reads(acquire):
    assert kinds(f"A st f; A st.relaxed.gpu f; A st.release f; B {acquire} f=2") == []
    assert kinds(f"A st f; A st.relaxed.gpu f; A st.relaxed f; B {acquire} f=2") == ["race"]


@pytest.mark.parametrize(("first", "last"), [("st", "ld"), ("ld", "st")])
def test_an_access_of_another_rank_hides_no_scope_error_with_an_earlier_one(first, last):
    """The last access's scope includes the second access, which is of the same rank, but not the first."""
    program = f"A {first}.relaxed d; A st.release f; B ld.acquire f; B {first}.relaxed d"
    assert kinds(program) == []
    assert kinds(f"{program}; C {last}.relaxed.gpu d") == ["scope"]


# Launches


def test_a_launch_is_ordered_after_the_one_before_it():
    assert kinds("A st d; A end; B1 ld d", "001") == []
    assert kinds("A st d; A end; B1 ld d; C1 ld d", "001") == ["race"]


def test_launches_that_nothing_orders_race():
    """The launches are on two streams, and the second one begins before the first one ends."""
    assert kinds("A st d; B ld e; A end; B st d", "00") == ["race"]


def test_a_relaxed_flag_orders_the_accesses_of_earlier_launches():
    assert kinds("A st d; A end; B st.relaxed f; C ld.acquire f; C ld d", "001") == []


def written_to_read_to_read(first="st.release", seen="ld.acquire", then="st.release", ranks="010"):
    """Write-to-read causality: a block passes on what it has acquired, and a third one reads the first one's data."""
    return kinds(f"A st d; A {first} f; B {seen} f; B {then} g; C ld.acquire g; C ld d", ranks)


def test_a_release_is_cumulative():
    assert written_to_read_to_read() == []
    assert written_to_read_to_read(first="st.relaxed") == ["race"]
    assert written_to_read_to_read(seen="ld.relaxed") == ["race"]
    assert written_to_read_to_read(then="st.relaxed") == ["race"]


def test_a_chain_over_ranks_is_as_wide_as_its_narrowest_scope():
    narrow = {"first": "st.release.gpu", "seen": "ld.acquire.gpu"}
    assert written_to_read_to_read(**narrow, ranks="001") == []
    assert set(written_to_read_to_read(**narrow, ranks="010")) == {"scope", "race"}  # flag, data


def test_a_reader_knows_only_the_writers_that_it_has_acquired_from():
    """Two writers, and two readers of their flags: strong accesses do not race in any order."""
    program = "A st d; A st.release f; B st e; B st.release g; C ld.acquire f; D ld.acquire g; C ld.relaxed g"
    program += "; D ld.relaxed f; C ld d; D ld e"
    assert kinds(program, "0101") == []
    assert kinds(f"{program}; C ld e", "0101") == ["race"]
