"""Messages between two ranks on the CPU: one that does not fit its receive is a Python error and ends no process."""

import os
import signal
import threading
import time
from datetime import timedelta
from traceback import walk_stack

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import ROUTES, default_group, of, poisoned, refused, same
from tests.core.bodies.common_bodies import attempt
from tricomm.c10d import message_collectives
from tricomm.store.tcp import progress as progress_thread

LATE = timedelta(seconds=30)


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(3, [])
def test_tags_in_another_order_and_batches(rank, world_size, tell, url, route):
    """`tests.soak.fuzz_calls` has every type."""
    wrong = []
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    with default_group(rank, world_size, url, route):
        a, b = poisoned((2,)), poisoned((3,))
        works = [dist.irecv(b, left, tag=7), dist.irecv(a, left, tag=8)]
        works += [dist.isend(of(rank, (2,)), right, tag=8), dist.isend(of(rank, (3,)), right, tag=7)]
        for work in works:
            work.wait()
        wrong += [] if same(a, of(left, (2,))) and same(b, of(left, (3,))) else ["tags"]
        y, z = poisoned((4,), torch.complex64), poisoned((4,), torch.complex64)
        sent = of(rank, (4,), torch.complex64)  # a batch and single calls send a complex tensor in the same form
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, y, left, tag=1)])
        for work in [*works, dist.isend(sent, right, tag=1), dist.irecv(z, left)]:
            work.wait()
        wrong += [] if same(y, of(left, (4,), torch.complex64)) and same(z, y) else ["batch of complex"]
    return wrong


def misfits(rank, world_size, tell, url, route):
    """Messages that do not match their receive are named in its error and consumed; the group still works."""
    said = []
    ones = torch.ones
    with default_group(rank, world_size, url, route):
        for tag, (sent, wanted) in enumerate(
            [
                (ones(8), ones(4)),
                (ones(4), ones(8)),
                (ones(4), ones(4, dtype=torch.int32)),
                (ones(0), ones(1)),
                (ones(1 << 20), ones(1)),
            ]
        ):
            if rank == 0:
                dist.send(sent, 1, tag=tag)
                dist.send(of(0, (5,), call=tag), 1, tag=tag)
                continue
            before = wanted.clone()
            said.append(refused(lambda w=wanted, t=tag: dist.recv(w, 0, tag=t), kind=tricomm.CollectiveMismatch))
            assert same(wanted, before)
            y = poisoned((5,))
            assert dist.recv(y, 0, tag=tag) == 0 and same(y, of(0, (5,), call=tag))
        if rank == 0:
            dist.send(ones(3), 1)
        else:
            work = dist.irecv(ones(2), tag=0)
            said.append(refused(work.wait, kind=tricomm.CollectiveMismatch))
            refused(work.wait, kind=tricomm.CollectiveMismatch)  # the same error, without waiting for another message
            assert not work.is_success() and isinstance(work.exception(), tricomm.CollectiveMismatch)
        x = ones(3)
        dist.all_reduce(x)
        assert x[0] == world_size
    return said


@pytest.mark.parametrize("route", ROUTES)
def test_a_message_that_does_not_fit_is_named_and_the_group_still_works(route, url):
    nothing, said = ranks.run(2, misfits, url, route)
    assert nothing == []
    for text, words in zip(
        said,
        [
            "recv of 4 elements of float32 with tag 0: rank 0 sent 8 elements of float32; give recv a tensor",
            "recv of 8 elements of float32 with tag 1: rank 0 sent 4 elements of float32",
            "recv of 4 elements of int32 with tag 2: rank 0 sent 4 elements of float32",
            "recv of 1 elements of float32 with tag 3: rank 0 sent 0 elements of float32",
            "recv of 1 elements of float32 with tag 4: rank 0 sent 1048576 elements of float32",
            "recv of 2 elements of float32 with tag 0: rank 0 sent 3 elements of float32",
        ],
        strict=True,
    ):
        assert words in text


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [], timeout=120)
def test_many_at_once(rank, world_size, tell, url, route):
    """Many receives in flight, some with the same tag, completed in reverse order; large messages."""
    wrong = []
    other = 1 - rank
    with default_group(rank, world_size, url, route):
        outs = [poisoned((1000 + n,)) for n in range(12)]
        works = [dist.irecv(out, other, tag=n % 3) for n, out in enumerate(outs)]
        for n in range(12):
            x = of(rank, (1000 + n,), call=n)
            works.append(dist.isend(x, other, tag=n % 3))
        for work in reversed(works):
            work.wait(LATE)
            assert work.is_completed()
        wrong += [n for n, out in enumerate(outs) if not same(out, of(other, (1000 + n,), call=n))]
        big = poisoned((4 << 20,))
        work = dist.irecv(big, other)
        dist.send(of(rank, (4 << 20,)), other)
        work.wait()
        wrong += [] if same(big, of(other, (4 << 20,))) else ["big"]
        assert work.result()[0] is big
    return wrong


def progress(rank, world_size, tell, url, count, moved=True):
    """A message whose arrival only `is_completed` observes, in a tensor made under inference mode.

    `moved`: the progress thread moves messages on which no call waits.
    """
    if not moved:
        progress_thread.watch = lambda transport: None
    with default_group(rank, world_size, url):
        with torch.inference_mode():
            x, y = of(0, (count,)), poisoned((count,))
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(y, 0)
        end = time.monotonic() + (30 if moved else 2)
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        done = work.is_completed() and work.is_success() and (rank == 0 or same(y.clone(), x.clone()))
        work.wait()
        return done


@pytest.mark.parametrize("count", [9, 1 << 20], ids=["short", "announced"])
def test_a_message_makes_progress_without_a_wait(count, url):
    assert ranks.run(2, progress, url, count) == [True, True]


def test_without_the_thread_a_long_message_waits_for_its_wait(url):
    assert ranks.run(2, progress, url, 1 << 20, False) == [False, False]


@ranks.each(3, [])
def test_messages_do_not_overtake_each_other(rank, world_size, tell, url):
    """Messages of one tag to one rank, alternately short and announced, received by source or from any rank."""
    counts, wrong = [5, 1 << 17, 7, 1 << 16, 1, 1 << 17], []
    with default_group(rank, world_size, url):
        if rank:
            works = [dist.isend(of(rank, (count,), call=n), 0, tag=3) for n, count in enumerate(counts)]
            for work in works:
                work.wait(LATE)
            return wrong
        outs = {r: [poisoned((count,)) for count in counts] for r in (1, 2)}
        for n, out in enumerate(outs[1]):
            dist.recv(out, 1, tag=3)
            wrong += [] if same(out, of(1, (counts[n],), call=n)) else [n]
        for n, out in enumerate(outs[2]):
            source = dist.recv(out, tag=3)
            wrong += [] if source == 2 and same(out, of(2, (counts[n],), call=n)) else [n]
    return wrong


def resident():
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@ranks.each(2)
def test_a_long_message_without_a_receive_takes_no_memory(rank, world_size, tell, url):
    with default_group(rank, world_size, url):
        x = of(0, (16 << 20,)) if rank == 0 else poisoned((16 << 20,))
        dist.barrier()
        before = resident()
        work = dist.isend(x, 1) if rank == 0 else None
        for _ in range(20):
            dist.barrier()
        grown = resident() - before
        if work is None:
            dist.recv(x, 0)
            assert same(x, of(0, (16 << 20,)))
        else:
            work.wait()
    assert rank or grown < 8 << 20


def refuse_descriptor(*args):
    raise OSError(24, "Too many open files")


def threads(rank, world_size, tell, url, wakes=True):
    """Four threads wait for messages of one group while the main thread calls collectives."""
    if not wakes:
        os.eventfd = refuse_descriptor
    wrong, other = [], 1 - rank
    with default_group(rank, world_size, url):

        def talk(tag):
            for n in range(25):
                count = 3 + (n % 5) * 40_000
                x, y = of(rank, (count,), call=tag * 100 + n), poisoned((count,))
                works = [dist.isend(x, other, tag=tag), dist.irecv(y, other, tag=tag)]
                for work in works:
                    work.wait(LATE)
                wrong.extend([] if same(y, of(other, (count,), call=tag * 100 + n)) else [(tag, n)])

        talkers = [threading.Thread(target=talk, args=(tag,)) for tag in range(1, 5)]
        for talker in talkers:
            talker.start()
        for n in range(25):
            x = of(rank, (1 + n * 4000,), call=n)
            dist.all_reduce(x)
            wrong += [] if same(x, of(0, x.shape, call=n) + of(1, x.shape, call=n)) else [n]
        for talker in talkers:
            talker.join(60)
            wrong += ["late"] if talker.is_alive() else []
    return wrong


def test_threads_that_wait_at_once_move_each_others_messages(url):
    assert ranks.run(2, threads, url, timeout=120) == [[], []]


def test_without_a_descriptor_for_wakes_threads_still_wait_at_once(url):
    assert ranks.run(2, threads, url, False, timeout=120) == [[], []]


def lost_in_the_middle(rank, world_size, tell, url):
    """Rank 0 gives the group up between the two exchanges of an all_reduce."""
    real = message_collectives.reduce_into
    with default_group(rank, world_size, url) as world:

        def reduce(*given):
            if rank == 0:
                world._dispatcher.abort_waits(tricomm.GroupAborted("given up in the middle"))
            real(*given)

        message_collectives.reduce_into = reduce
        return attempt(lambda: dist.all_reduce(torch.ones(1 << 20)))[:2]


def test_a_call_fails_if_its_group_is_aborted_in_the_middle_of_it(url):
    for kind, text in ranks.run(2, lost_in_the_middle, url):
        assert kind == "GroupAborted" and "given up in the middle" in text, text


def handlers_call(rank, world_size, tell, url, call):
    """Rank 0's signal handler makes a call; signals are sent until one interrupts another call of the group."""
    with default_group(rank, world_size, url, timeout=10.0):
        if rank == 0:
            again = {"isend": lambda: dist.isend(torch.ones(1), 1, tag=5), "all_reduce": lambda: dist.all_reduce(y)}
            y = torch.ones(3)

            def handle(_, frame):
                if any(at.f_code.co_name == "_in_turn" for at, _ in walk_stack(frame)):  # not between two calls
                    again[call]()

            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            said = attempt(lambda: [dist.all_reduce(torch.ones(1 << 18)) for _ in range(3000)])[:2]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return said, attempt(lambda: dist.all_reduce(torch.ones(1)))[:2]


@pytest.mark.parametrize("call", ["isend", "all_reduce"])
def test_a_call_in_a_signal_handler_in_the_middle_of_another_call_is_refused(call, url):
    (kind, text), later = ranks.run(2, handlers_call, url, call)[0]
    assert kind == "InvalidArgument" and "a signal's handler makes a call" in text, text
    assert later[0] == "GroupAborted", later  # the first call was left in the middle


def unrecorded(rank, world_size, tell, url):
    """Without records the ranks' calls differ in their size."""
    os.environ["TRICOMM_CHECK"] = "0"
    with default_group(rank, world_size, url):
        return attempt(lambda: dist.all_reduce(torch.ones(4 + rank)))[:2]


def test_a_collective_of_another_size_is_named_without_records(url):
    for kind, text in ranks.run(2, unrecorded, url):
        assert kind in ("CollectiveMismatch", "GroupAborted") and "bytes and not" in text, text


@ranks.each(2, True)
def test_a_wrapper_and_its_group_exchange_messages(rank, world_size, tell, url):
    """A message sent over a wrapper is received over the wrapped group, and the other way round."""
    with default_group(rank, world_size, url, backend="gloo"):
        w = tricomm.wrap()
        x = of(rank, (3,))
        if rank == 0:
            dist.send(x, 1, group=w)
        else:
            dist.recv(x, 0)
        return x.tolist() == of(0, (3,)).tolist()
