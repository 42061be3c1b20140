"""send and recv: every type and size, tags in any order, any source, and errors that name the wrong message."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tricomm
from tests.explorer.mutation import Edit, loaded
from tricomm.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument, TricommError
from tricomm.kernels import layout
from tricomm.kernels.dtypes import DTYPES
from tricomm.options import Tuning

SMALL = tricomm.Options(arena_bytes=64 << 10, _tuning=Tuning(tile=16))
WIDE = tricomm.Options(arena_bytes=4 << 20, _tuning=Tuning(tile=64, blocks=3))  # fewer blocks than queues
PROTOCOLS = pytest.mark.parametrize("protocol", ["ll", "simple"])


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    numbers = (torch.arange(count) * 7 + seed * 13) % 97
    return (numbers % 2 if dtype == torch.bool else numbers % 8 if dtype.itemsize == 1 else numbers).to(dtype)


def poisoned(count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    whole = torch.empty(count + offset + 16, dtype=dtype)
    whole.view(torch.uint8).fill_(0x5A)
    return whole[offset : offset + count]


def around(y: torch.Tensor) -> torch.Tensor:
    """The bytes of `poisoned` before and after the tensor."""
    whole, first = y._base.view(torch.uint8), y.storage_offset() * y.itemsize
    return torch.cat([whole[:first], whole[first + y.numel() * y.itemsize :]])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def handed_over(comm, cases):
    """Send each case from rank 0 to rank 1; return the wrong ones. A case: count, dtype, tag, protocol, offset."""
    wrong = []
    for number, (count, dtype, tag, protocol, offset) in enumerate(cases):
        if comm.rank == 0:
            x = poisoned(count, dtype, offset % 3)
            x.copy_(values(count, dtype, number))
            assert comm.send(x, 1, tag, protocol=protocol) is None
        elif comm.rank == 1:
            y = poisoned(count, dtype, offset)
            beside = around(y).clone()
            source = comm.recv(y, 0, tag, protocol=protocol)
            if source != 0 or not same(y, values(count, dtype, number)) or not torch.equal(around(y), beside):
                wrong.append((number, count, dtype))
    return wrong


@PROTOCOLS
@pytest.mark.parametrize("options", [SMALL, WIDE], ids=["small", "wide"])
def test_every_type_and_size(options, protocol):
    counts = (1, 0, 37, 401, 3)
    sizes = {getattr(torch, name).itemsize: name for name in DTYPES}  # one type of each
    cases = [
        (count, getattr(torch, name), number % 3, protocol, number % 2)
        for name in (DTYPES if options is SMALL else sizes.values())
        for number, count in enumerate(counts)
    ]
    assert tricomm.simulate(lambda comm: handed_over(comm, cases), 2, options=options) == [[], []]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from([getattr(torch, n) for n in DTYPES]),
            st.integers(0, 2**32 - 1),
            st.sampled_from(["ll", "simple", None]),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, layout.CLEAR_EVERY - 2, 2**31 - 3, 2**32 - 4]),
)
def test_any_messages_back_to_back_near_the_ends_of_the_counters(cases, first):
    options = tricomm.Options(arena_bytes=64 << 10, _tuning=Tuning(tile=16, first_epoch=first))
    assert tricomm.simulate(lambda comm: handed_over(comm, cases), 2, options=options) == [[], []]


@PROTOCOLS
def test_tags_are_received_in_any_order_and_messages_of_one_tag_in_the_order_sent(protocol):
    def body(comm):
        if comm.rank == 0:
            for turn, tag in enumerate((1, 2, 1, 3)):
                comm.send(torch.arange(40) + 1000 * turn, 1, tag, protocol=protocol)
        else:
            got = []
            for tag in (3, 1, 2, 1):
                y = poisoned(40, torch.int64)
                comm.recv(y, 0, tag, protocol=protocol)
                got.append(int(y[0]) // 1000)
            return got

    assert tricomm.simulate(body, 2, options=SMALL)[1] == [3, 0, 1, 2]


@pytest.mark.parametrize("kept", [True, False])
def test_plain_data_is_not_taken_for_words_of_the_other_protocol(kept, unshrunk):
    """Small integers that `simple` leaves in a slot equal the sequence numbers of later words."""
    first = 4

    def body(comm):
        wrong = 0
        for turn in range(8):
            protocol, count = ("simple", 64) if turn < 4 else ("ll", 28)
            x = torch.full((count,), first + 4 + turn if turn < 4 else 100 + turn, dtype=torch.int32)
            if comm.rank == 0:
                comm.send(x, 1, protocol=protocol)
            else:
                y = poisoned(count, torch.int32)
                comm.recv(y, 0, protocol=protocol)
                wrong += not torch.equal(x, y)
        return wrong

    edits = () if kept else (Edit("kernels/collectives/send.py", "plain |= bit", "plain |= 0"),)
    options = tricomm.Options(arena_bytes=64 << 10, _tuning=Tuning(tile=4, first_epoch=first))
    with loaded(edits):
        report = tricomm.check(body, 2, schedules=4 if kept else 12, options=options, identical=False)
    assert report.ok == kept, report


def test_from_any_source():
    """If several ranks have sent, the lowest rank's message is received; messages with another tag are not."""

    def body(comm):
        if comm.rank:
            comm.send(torch.full((5,), comm.rank * 10), 0, tag=7 if comm.rank != 1 else 8)
            comm.barrier()
            return None
        comm.barrier()
        got = []
        for tag in (7, 7, 8):
            y = poisoned(5, torch.int64)
            work = comm.recv(y, tag=tag, async_op=len(got) == 1)
            source = work.wait() if len(got) == 1 else work
            got.append((source, y.tolist()))
        return got

    assert tricomm.simulate(body, 4, options=SMALL)[0] == [(2, [20] * 5), (3, [30] * 5), (1, [10] * 5)]


def test_strided_and_symmetric_tensors():
    def body(comm):
        w = comm.symmetric((12,), torch.int64)
        if comm.rank == 0:
            w.local.copy_(torch.arange(12))
            comm.send(w, 1)
            comm.send(torch.arange(24).view(12, 2)[:, 1], 1)
        else:
            columns = torch.zeros(12, 2, dtype=torch.int64)
            comm.recv(w, 0)
            comm.recv(columns[:, 0], 0)
            return w.local.tolist(), columns.tolist()

    result = tricomm.simulate(body, 2, options=SMALL)[1]
    assert result == (list(range(12)), [[2 * n + 1, 0] for n in range(12)])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c, x: c.send(x, 0), "sends no messages to itself"),
        (lambda c, x: c.recv(x, 0), "sends no messages to itself"),
        (lambda c, x: c.send(x, 2), "a rank from 0 to 1"),
        (lambda c, x: c.recv(x, -1), "a rank from 0 to 1"),
        (lambda c, x: c.send(x, 1, tag=-1), "from 0 to 2\\^32 - 1"),
        (lambda c, x: c.recv(x, 1, tag=1 << 32), "from 0 to 2\\^32 - 1"),
        (lambda c, x: c.send(x, 1, tag=1.0), "from 0 to 2\\^32 - 1"),
        (lambda c, x: c.send([x], 1), "a torch.Tensor is needed"),
        (lambda c, x: c.send(x, 1, protocol="tree"), "there is no tree kernel; there is one_shot/ll, one_shot/si"),
        (lambda c, x: c.recv(x[:1].expand(5), 1), "elements of the tensor share memory"),
    ],
)
def test_invalid_messages_are_refused_and_the_group_still_works(call, words):
    def body(comm):
        x = torch.arange(5)
        if comm.rank == 0:
            with pytest.raises(InvalidArgument, match=words):
                call(comm, x)
        return comm.all_reduce(x).tolist(), comm.explain("send", 40).protocol

    assert tricomm.simulate(body, 2, options=SMALL) == [([0, 2, 4, 6, 8], "ll")] * 2


@pytest.mark.parametrize(
    "sent, asked, kind, words",
    [
        ([3], dict(tag=4), CollectiveTimeout, "in recv from rank 0 .tag 4, .*pending from rank 0: tag 3, dtype=int64"),
        ([3], dict(tag=4, src=None), CollectiveTimeout, "from any rank .tag 4, .*pending from rank 0: tag 3"),
        ([], dict(tag=4), CollectiveTimeout, "pending from rank 0: nothing"),
        ([3], dict(tag=3, count=6), CollectiveMismatch, "count=6.*pending from rank 0: tag 3, dtype=int64, count=5"),
        ([3], dict(tag=3, dtype=torch.int32), CollectiveMismatch, "dtype=int32, .*rank 0: tag 3, dtype=int64"),
        ([3], dict(tag=3, protocol="simple"), CollectiveMismatch, "simple.*pending from rank 0: tag 3, .*ll"),
        ([3, 3, 5, 3], dict(tag=4), CollectiveMismatch, "another tag, and no room; .*tag 3, .*tag 3, .*tag 5, .*tag 3"),
        ([3] * 5, dict(tag=4), CollectiveMismatch, "another tag, and no room"),
    ],
)
def test_messages_that_do_not_match_are_named(sent, asked, kind, words):
    def body(comm):
        if comm.rank == 0:
            for tag in sent:
                comm.send(torch.arange(5), 1, tag)
        else:
            y = torch.zeros(asked.get("count", 5), dtype=asked.get("dtype", torch.int64))
            comm.recv(y, asked.get("src", 0), asked["tag"], protocol=asked.get("protocol"))

    with pytest.raises(kind, match=words):
        tricomm.simulate(body, 2, options=SMALL)


def test_two_ranks_that_both_send_more_than_fits_get_an_error():
    def body(comm):
        comm.send(torch.zeros(100_000), 1 - comm.rank, 9)
        comm.recv(torch.zeros(100_000), 1 - comm.rank, 9)

    with pytest.raises(TricommError, match="was in send to rank . .tag 9.*rank . has not asked for a message"):
        tricomm.simulate(body, 2, options=SMALL)


@pytest.mark.parametrize("cleared", [True, False])
def test_words_with_old_sequence_numbers_are_cleared_before_the_numbers_repeat(cleared):
    first = layout.CLEAR_EVERY - 4

    def body(comm):
        slots = comm._internal.group.layout
        words = comm._group.arena.tensor(comm.rank, slots.slots, (layout.SLOTS, slots.slot // 8), torch.int64)
        words[:] = (first + 8) << 32 | 0xBAD
        comm.barrier()
        for turn in range(8):  # sequence numbers, the last four of which clear words
            if comm.rank == 0:
                comm.send(torch.tensor([turn]), 1, protocol="ll")
            else:
                y = poisoned(1, torch.int64)
                comm.recv(y, 0, protocol="ll")
                assert int(y) == turn
        return bool(((words >> 32) == first + 8).any())

    options = tricomm.Options(arena_bytes=64 << 10, _tuning=Tuning(tile=16, first_epoch=first))
    edit = Edit("kernels/device/message_queues.py", "(number % CLEAR_EVERY < SLOTS)", "(number < 0)")
    edits = () if cleared else (edit,)
    with loaded(edits):
        assert tricomm.simulate(body, 2, options=options)[1] == (not cleared)


def test_messages_are_counted():
    def body(comm):
        before = dict(tricomm.stats()["kernels"])
        comm.barrier()
        if comm.rank:
            comm.send(torch.zeros(3), 0)
        else:
            comm.recv(torch.zeros(3))
        comm.barrier()
        after = tricomm.stats()["kernels"]
        return [after.get(name, 0) - before.get(name, 0) for name in ("send", "recv")]

    assert tricomm.simulate(body, 2, options=SMALL) == [[1, 1]] * 2


@pytest.mark.parametrize("first", [1, 2**31 - 3, 2**32 - 3])
def test_a_message_that_has_not_been_received_is_known(first):
    def body(comm):
        seen = [comm._messages.unread()]
        for turn in range(7):
            if comm.rank == 0:
                comm.send(torch.ones(3), 2, turn)
                seen.append(comm._messages.unread())
                comm.barrier()
                comm.barrier()
                seen.append(comm._messages.unread())
            else:
                comm.barrier()
                if comm.rank == 2:
                    comm.recv(torch.zeros(3), 0, turn)
                comm.barrier()
        return seen

    options = tricomm.Options(arena_bytes=64 << 10, _tuning=Tuning(tile=16, first_epoch=first))
    assert tricomm.simulate(body, 3, options=options) == [[[]] + [[2], []] * 7, [[]], [[]]]


def test_a_message_is_not_captured():
    def body(comm):
        comm._messages._gpu = SimpleNamespace(capturing=lambda: True)
        for call in (lambda: comm.send(torch.ones(3), 1 - comm.rank), lambda: comm.recv(torch.ones(3))):
            with pytest.raises(InvalidArgument, match="a message cannot be captured"):
                call()
        comm._messages._gpu = None

    tricomm.simulate(body, 2, options=SMALL)


def test_a_group_of_one_rank_cannot_send():
    def body(comm):
        with pytest.raises(InvalidArgument, match="no rank can send a message to rank 0: there is no other rank"):
            comm.recv(torch.zeros(3))

    tricomm.simulate(body, 1, options=SMALL)


def test_the_kernels_need_not_launch_the_same_grid():
    """The unit is a queue, not a block: a receive from any source may use one block for several queues."""

    def body(comm):
        if comm.rank == 0:
            comm.send(torch.arange(20_000), 1)
        else:
            y = poisoned(20_000, torch.int64)
            return comm.recv(y), torch.equal(y, torch.arange(20_000))

    assert tricomm.simulate(body, 2, options=WIDE)[1] == (0, True)
