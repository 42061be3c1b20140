"""The control page: how ranks see each other's state and agree without a store."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests import ranks
from tests.store.store_ranks import in_threads, nothing_left, pages, succeed
from tricomm import errors
from tricomm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    PeerDied,
    ResourceError,
    TricommError,
)
from tricomm.store.control import ControlPage, Descriptor, Fault, RankState
from tricomm.store.handshake import handshake
from tricomm.store.page import MESSAGE_BYTES, NBYTES, Page
from tricomm.store.records import ExchangeMessage
from tricomm.store.rendezvous import open_store

CALL = Descriptor(0, 2**63 + 5, "all_reduce", "sum", "bfloat16", "two_shot", "ll", 10**12, -1, 24, "eager")


def call(sequence: int) -> Descriptor:
    return Descriptor(sequence, sequence * 7, f"collective{sequence % 3}", "max", "int64", "a", "p", 1, 0, 8, "graph")


def test_the_ranks_of_a_group():
    with pages(3) as group:
        assert [page.rank for page in group] == [0, 1, 2]
        assert {page.world_size for page in group} == {3}
        assert len({page.nonce for page in group}) == 1 and len(group[0].nonce) == 16
        assert {page.group for page in group} == {group[0].nonce[:4].hex()}
        assert {page.pid(r) for page in group for r in range(3)} == {os.getpid()}
        assert all(page.alive(r) for page in group for r in range(3))
        assert not group[0].stopped(2)


def test_state_heartbeat_and_sequence_are_seen_by_the_others():
    with pages(2) as (one, two):
        assert one.page(1).state == RankState.READY
        before = two.page(0).heartbeat
        one.beat()
        assert before < two.page(0).heartbeat
        assert two.page(0).heartbeat <= time.monotonic_ns()
        one.set_state(RankState.ABORTED)
        assert two.page(0).state == RankState.ABORTED and two.page(1).state == RankState.READY


def test_words_are_shared_page_aligned_and_not_writable_by_peers():
    with pages(2) as (one, two):
        assert one.device_words % 4096 == 0 and one.own().device_words().ctypes.data == one.device_words
        words, seen = one.own().device_words(), two.page(0).device_words()
        assert words.shape == seen.shape == (512,) and words.dtype == np.int64
        words[0], words[511] = 1, -(2**63)
        assert seen[0] == 1 and seen[511] == -(2**63) and two.own().device_words()[0] == 0
        assert words.flags.writeable and not seen.flags.writeable
        one.close()
        two.close()
        assert seen[0] == 1  # a view outlives its group


def test_descriptors_of_the_last_8_calls():
    with pages(2) as (one, two):
        assert two.page(0).last() is None and two.page(0).called(0) is None and two.page(0).sequence() == 0
        one.announcer()(CALL.sequence, CALL.packed())
        assert two.page(0).last() == CALL == one.page(0).last()
        assert "all_reduce(op=sum, dtype=bfloat16, count=1000000000000) [two_shot/ll" in CALL.text()
        for sequence in range(1, 21):
            one.announcer()(sequence, call(sequence).packed())
            assert two.page(0).sequence() == sequence and two.page(0).last() == call(sequence)
        assert [two.page(0).called(s) for s in range(13, 21)] == [call(s) for s in range(13, 21)]
        assert two.page(0).called(12) is None and two.page(0).called(21) is None
        assert "root=0" in call(1).text() and "at sequence 1" in call(1).text()


def write_or_read(rank: int, world_size: int, tell, url: str):
    store, rank, world_size = open_store(url, rank, world_size, 20)
    page = handshake(store, rank, world_size, 20, 1)
    seen, sequence, end = 0, 0, time.monotonic() + 1.0
    while time.monotonic() < end:
        if rank == 0:
            sequence += 1
            page.announcer()(sequence, call(sequence).packed())
            continue
        result = page.page(0).last()
        if result is not None:
            assert result == call(result.sequence)
            seen, sequence = seen + (result.sequence != sequence), result.sequence
    page.close()
    return seen


def test_a_reader_never_sees_half_a_descriptor(tmp_path):
    _, seen = ranks.run(2, write_or_read, f"file://{tmp_path}/store")
    assert seen > 10  # on a busy machine the two ranks take turns in long slices


def test_a_torn_record_is_not_used():
    buffer, descriptor = memoryview(bytearray(NBYTES)), 6 * 4096 + 256  # of the first call
    page = Page(buffer, 0)
    page.announcer()(CALL.sequence, CALL.packed())
    page.put_fault(Fault("PeerDied", 1, 2, "text"))
    page.post(ExchangeMessage(0, "what", b"payload"))
    assert page.last() == CALL and page.fault() is not None and page.posted(0) == ExchangeMessage(0, "what", b"payload")
    assert page.posted(2) is None  # in the same slot, and not announced yet
    for at in (descriptor + 20, 256 + 8, 12288 + 80):
        buffer[at] ^= 1
    assert page.last() is None and page.fault() is None and page.posted(0) is None
    buffer[descriptor : descriptor + 4] = b"\xff\xff\xff\xff"  # a length that would leave the page
    assert page.last() is None


def test_the_first_fault_stays_and_is_cut_to_fit():
    with pages(2) as (one, two):
        assert two.page(0).fault() is None
        first = Fault("CollectiveTimeout", 1, 77, "first — " + "ä" * 5000)
        one.raise_fault(first)
        one.raise_fault(Fault("PeerDied", 0, 78, "second"))
        result = two.page(0).fault()
        assert (result.kind, result.culprit, result.sequence) == ("CollectiveTimeout", 1, 77)
        assert result.text.startswith("first — ää") and first.text.startswith(result.text) and len(result.text) > 500
        assert two.page(1).fault() is None


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_exchange_returns_the_bytes_of_all_ranks_in_rank_order(world_size):
    with pages(world_size) as group:

        def body(rank: int) -> None:
            for step in range(50):
                size = [0, 1, MESSAGE_BYTES, 17][step % 4]
                want = [bytes([r, step]) * (size // 2) for r in range(world_size)]
                assert group[rank].exchange(want[rank], f"step {step}", 20) == want

        succeed(world_size, body)


def test_exchange_waits_for_a_late_rank_and_no_longer():
    with pages(2) as group:

        def body(rank: int) -> float:
            time.sleep(0.3 * rank)
            began = time.monotonic()
            group[rank].exchange(b"", "late", 10)
            return time.monotonic() - began

        first, second = succeed(2, body)
        assert 0.2 < first < 8 and second < 8


def test_exchange_names_the_missing_ranks():
    with pages(3) as group:
        began = time.monotonic()
        outcomes = in_threads(3, lambda r: group[r].exchange(b"", "grid", 0.5) if r != 1 else None)
        assert 0.5 <= time.monotonic() - began < 10
        for rank in (0, 2):
            assert isinstance(outcomes[rank], CollectiveTimeout)
            assert f"rank {rank} of 3: grid: timeout after 0.5 s: rank(s) [1] did not come" in str(outcomes[rank])


def test_exchange_with_a_rank_that_makes_another_one():
    with pages(2) as group:
        outcomes = in_threads(2, lambda r: group[r].exchange(b"", ["open", "close"][r], 5))
        assert [type(o) for o in outcomes] == [CollectiveMismatch] * 2
        assert "open: rank 1 is at 'close' instead" in str(outcomes[0])


@pytest.mark.parametrize(
    ("kind", "text", "error"), [("GroupAborted", ": it was stopped", GroupAborted), (None, "", PeerDied)]
)
def test_exchange_with_a_rank_that_has_closed(kind, text, error):
    with pages(2) as (one, two):
        if kind is not None:
            two.raise_fault(Fault(kind, 1, 0, "it was stopped"))
        two.close()
        began = time.monotonic()
        with pytest.raises(error, match=f"rank 1 has closed the group{text}"):
            one.exchange(b"", "anything", 10)
        assert time.monotonic() - began < 8, "the wait ended at its limit of 10 s only"


def test_a_message_sent_before_closing_counts():
    with pages(2) as (one, two):
        in_threads(2, lambda r: two.exchange(b"last", "end", 0.1) if r else None)
        two.close()
        assert one.exchange(b"first", "end", 1) == [b"first", b"last"]


def test_exchange_after_a_rank_continued_alone():
    with pages(2) as (one, two):
        for _ in range(3):
            with pytest.raises(CollectiveTimeout):
                two.exchange(b"", "grid", 0)
        with pytest.raises(GroupAborted, match="rank 1 has gone on without this rank"):
            one.exchange(b"", "grid", 5)


def test_exchange_refuses_too_much_and_stays_usable():
    with pages(1) as (page,):
        with pytest.raises(InvalidArgument, match="1025 bytes to exchange; at most 1024"):
            page.exchange(bytes(1025), "much", 1)
        assert page.exchange(b"ok", "less", 1) == [b"ok"]


def test_agree():
    with pages(3) as group:
        succeed(3, lambda r: group[r].agree(None, "fine", 5))
        bad = ResourceError("no memory on this rank")
        outcomes = in_threads(3, lambda r: group[r].agree(bad if r == 1 else None, "allocate", 5))
        assert [type(o) for o in outcomes] == [ResourceError] * 3
        assert {str(o) for o in outcomes} == {"allocate: rank 1: no memory on this rank"}
        assert outcomes[1].__cause__ is bad
        succeed(3, lambda r: group[r].agree(None, "usable again", 5))


def test_values_that_have_to_be_equal():
    with pages(3) as group:
        values = ["[0, 2]", "[0, 2]", "[1, 2]"]
        outcomes = in_threads(3, lambda r: group[r].require_equal(values[r], "split", 5))
        assert [type(o) for o in outcomes] == [InvalidArgument] * 3
        assert {str(o) for o in outcomes} == {"split: rank 0 has [0, 2], rank 2 has [1, 2]; give all ranks the same"}
        alike = "x" * 5000  # longer than the part that is exchanged
        succeed(3, lambda r: group[r].require_equal(alike, "usable again", 5))
        outcomes = in_threads(3, lambda r: group[r].require_equal(alike + "y" * r, "long", 5))
        assert [type(o) for o in outcomes] == [InvalidArgument] * 3


def test_agree_on_several_errors_and_foreign_ones():
    with pages(2) as group:
        mine = [KeyError("a" * 5000), InvalidArgument("bad")]
        outcomes = in_threads(2, lambda r: group[r].agree(mine[r], "two", 5))
        assert [type(o) for o in outcomes] == [TricommError] * 2
        assert "rank 0: KeyError: 'aaa" in str(outcomes[0]) and "rank 1: bad" in str(outcomes[0])


@pytest.mark.parametrize("name", [n for n in dir(errors) if n[0].isupper() and n not in ("TricommError",)])
def test_agree_keeps_every_error_class(name):
    with pages(1) as (page,):
        with pytest.raises(getattr(errors, name), match="stage: rank 0: words"):
            page.agree(getattr(errors, name)("words"), "stage", 1)


def test_close_is_idempotent_and_final():
    with nothing_left():
        with pages(2) as (one, two):
            one.close()
            one.close()
            assert two.page(0).state == RankState.CLOSED
            for use in (one.beat, one.own, lambda: one.page(1), lambda: one.exchange(b"", "x", 1)):
                with pytest.raises(GroupAborted, match="is closed"):
                    use()
            with pytest.raises(InvalidArgument, match=r"rank 2 is not in 0..1"):
                two.page(2)


def in_fork(body) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(rank: int, world_size: int, tell, url: str):
    store, rank, world_size = open_store(url, rank, world_size, 20)
    page = handshake(store, rank, world_size, 20, 1)

    def child() -> int:
        refused = 0
        for use in (page.beat, page.own, lambda: page.set_state(RankState.ABORTED), lambda: page.exchange(b"", "", 1)):
            try:
                use()
            except GroupAborted as error:
                refused += "was created in pid" in str(error)
        page.close()
        return 10 + refused

    code = in_fork(child)
    states = [int(page.page(r).state) for r in range(world_size)]
    both = page.exchange(b"%d" % code, "after the fork", 20)
    page.close()
    return both, states


def test_a_forked_child_only_frees_its_resources(tmp_path):
    for both, states in ranks.run(2, forked, f"file://{tmp_path}/store"):
        assert both == [b"14", b"14"] and states == [RankState.READY, RankState.READY]


def test_a_recycled_pid_is_not_alive():
    with pages(1) as (page,):
        assert page.alive(0)
        member = page._members[0]
        other = type(member)(member.segment, member.pid, member.start_time + 1)
        late = ControlPage(0, page.nonce, [other])
        assert not late.alive(0)


def test_a_rank_that_entered_and_left_between_two_checks_has_entered():
    with pages(2) as (one, two):
        look, looks = one._from, []

        def slow_look(slots, ranks, mine):
            result = look(slots, ranks, mine)
            looks.append(result)
            if len(looks) == 1:  # not there yet; it enters, finds all ranks there, and makes its next call
                assert result == {}
                assert two.exchange(b"two", "step", 5.0, abort_on_fault=True) == [b"one", b"two"]
                two.announcer()(1, call(1).packed())
            return result

        one._from = slow_look
        assert one.exchange(b"one", "step", 5.0, abort_on_fault=True) == [b"one", b"two"]
        assert len(looks) >= 3


def test_a_rank_in_a_call_that_has_not_entered_is_refused():
    with pages(2) as (one, two):
        two.announcer()(1, call(1).packed())
        with pytest.raises(CollectiveMismatch, match="rank 1 is in collective1.* instead"):
            one.exchange(b"one", "step", 5.0, abort_on_fault=True)
