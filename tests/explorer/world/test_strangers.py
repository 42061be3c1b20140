"""Calls from threads that the explorer does not schedule, ranks that leave, and closed handles: each is named, and no
call is half done."""

import gc
import threading

import pytest
import torch

import tricomm
from tests.explorer import small_kernels as k
from tests.explorer.test_check import line, places, words
from tricomm.errors import InvalidArgument, PeerDied
from tricomm.options import Tuning

BOTH = pytest.mark.parametrize("compiled", [None, "sm_90"])


def calls_of(comm):
    """Every kind of call that reaches the other ranks or queues work."""
    memory = words(comm)
    work = comm.all_reduce(torch.ones(4), async_op=True)
    calls = {
        "all_reduce": lambda: comm.all_reduce(torch.ones(4)),
        "async_op": lambda: comm.all_gather(torch.ones(4), async_op=True),
        "send": lambda: comm.send(torch.ones(4), 1 - comm.rank),
        "symmetric": lambda: words(comm),
        "launch": lambda: comm.launch(k.two_writers, 1, memory.peers, comm.rank, WORLD_SIZE=2),
        "suspend": comm.suspend,
        "close of a handle": memory.close,
        "close": comm.close,
    }
    if comm.gpu is not None:
        stream = torch.cuda.Stream()
        calls |= {"wait": work.wait, "stream": stream.record_event, "synchronize": comm.synchronize}
    return calls


def in_a_thread(call):
    """The outcome of a call in a thread with another name."""
    seen = []

    def run():
        try:
            seen.append(call())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=run, name="helper")
    thread.start()
    thread.join()
    return seen[0]


@BOTH
def test_a_call_of_another_thread_is_refused_before_anything_is_queued(compiled):
    names = []
    tricomm.simulate(lambda comm: names.extend(calls_of(comm)), 2, compiled=compiled)
    for name in dict.fromkeys(names):
        seen = []

        def fn(comm, name=name, seen=seen):
            call = calls_of(comm)[name]
            seen.append(comm.barrier() if comm.rank else in_a_thread(call))
            comm.barrier()

        with pytest.raises(InvalidArgument, match=r"rank 0: thread 'helper' .* at .*test_\w+\.py:\d+") as caught:
            tricomm.simulate(fn, 2, compiled=compiled)
        assert [str(error) for error in seen] == [str(caught.value)], name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@BOTH
def test_check_refuses_a_function_whose_threads_are_lost(compiled):
    def fn(comm):
        x = torch.ones(50)
        threads = [threading.Thread(target=comm.all_reduce, args=(x,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(x, torch.full((50,), 4.0))

    with pytest.raises(InvalidArgument, match="thread"):
        tricomm.check(fn, 2, schedules=2, compiled=compiled)
    assert tricomm.simulate(lambda comm: comm.all_reduce(torch.ones(1)).item(), 2, compiled=compiled) == [2.0, 2.0]


def test_a_call_with_another_ranks_communicator_is_refused():
    comms = {}

    def fn(comm):
        comms[comm.rank] = comm
        comm.barrier()
        comms[0].all_reduce(torch.ones(4))

    with pytest.raises(InvalidArgument, match=r"rank 0: rank 1's function makes a call of rank 0's communicator"):
        tricomm.simulate(fn, 2)


def test_a_thread_that_does_not_use_the_communicator_may_run():
    def fn(comm):
        return comm.all_reduce(in_a_thread(lambda: torch.arange(4) * comm.rank))

    assert all(torch.equal(x, torch.arange(4) * 3) for x in tricomm.simulate(fn, 3))


def leaver(waits):
    def fn(comm):
        if comm.rank == 1:
            comm.close()
        else:
            comm.barrier() if waits == "barrier" else comm.symmetric((4,), torch.float32)

    return fn


@BOTH
@pytest.mark.parametrize("waits", ["barrier", "symmetric"])
def test_a_wait_for_a_rank_that_has_left_names_it_and_the_place(waits, compiled):
    with pytest.raises(PeerDied, match="rank 1 (has )?closed the") as caught:
        tricomm.simulate(leaver(waits), 2, compiled=compiled)
    assert any("on rank 0, at" in note and "test_strangers.py:" in note for note in caught.value.__notes__)
    (finding,) = tricomm.check(leaver(waits), 2, schedules=2, faults=("drop", "stop"), compiled=compiled).findings
    assert finding.kind == "deadlock" and {0, 1} == set(finding.ranks)
    assert any("test_strangers.py:" in where for where in finding.where)
    assert "rank 1 has closed the communicator at " in finding.text and "has returned" not in finding.text


@pytest.mark.parametrize("fault", ["stop", "drop"])
def test_faults_of_a_function_without_an_access_are_accepted(fault):
    report = tricomm.check(lambda comm: None, 2, schedules=6, faults=(fault,))
    assert report.ok and report.ran == 6 and report.steps == 0


@BOTH
def test_handles_that_are_made_again_are_no_finding(compiled):
    """Many small handles are closed; then one is made that is as large as all their pages."""

    def fn(comm):
        small = [comm.symmetric((1,), torch.int64) for _ in range(24)]
        comm.barrier()
        for memory in small:
            memory.close()
        comm.barrier()
        gc.collect()
        for count in (6000, 4000, 2000):
            memory, y = comm.symmetric((count,), torch.int64), torch.zeros(2 * count, dtype=torch.int64)
            memory.local.fill_(comm.rank + 1)
            comm.all_gather(memory, out=y)
            assert torch.equal(y, torch.tensor([1, 2]).repeat_interleave(count))
        return True

    options = tricomm.Options(arena_bytes=1 << 20, _tuning=Tuning(tile=64))
    assert tricomm.simulate(fn, 2, options=options, compiled=compiled) == [True, True]


@BOTH
@pytest.mark.parametrize("use", ["kernel", "host", "peer's"])
@pytest.mark.parametrize("all_close", [True, False], ids=["all close", "one closes"])
def test_a_use_after_close_is_found(use, all_close, compiled):
    def fn(comm):
        memory, out = words(comm), torch.zeros(1, dtype=torch.int64)
        peers, local = memory.peers, memory.local
        if all_close or comm.rank == 0:
            memory.close()
        comm.barrier()
        words(comm)  # other memory, which must not get the same addresses
        if use == "host" and comm.rank == 0:
            out.copy_(local[:1])
        if use == "kernel" and comm.rank == 0 or use == "peer's" and comm.rank == 1:
            comm.launch(k.wide_scope, 1, peers, out, WORLD_SIZE=2)

    report = tricomm.check(fn, 2, schedules=2, compiled=compiled)
    if use == "peer's" and not all_close:  # its mapping is open
        assert report.ok
        return
    finding, rank = report.findings[0], 1 if use == "peer's" else 0
    assert finding.kind == "out_of_bounds" and finding.ranks == (rank,)
    assert f"which rank {rank} has closed at " in finding.text and "test_strangers.py:" in finding.text
    if use != "host":
        assert places(finding) == {line("tl.atomic_add", "wide_scope")}


def test_a_close_waits_for_the_kernels_of_its_rank():
    """They may still read the memory on a stream."""

    def fn(comm):
        memory, out = words(comm), torch.zeros(1, dtype=torch.int64)
        comm.launch(k.wide_scope, 1, memory.peers, out, WORLD_SIZE=2)
        memory.close()
        return out.item()

    assert tricomm.check(fn, 2, schedules=4, compiled="sm_90").ok
    assert sorted(tricomm.simulate(fn, 2, compiled="sm_90")) == [0, 1]
