"""Calls while kernels are pending on two fake GPUs: nothing waits for the device, and streams may run in any order."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.core.bodies import right_device_bodies as bodies
from tests.core.gpu.conftest import MINE
from tests.kernels.fake_streams import FakeEvent, FakeStream
from tricomm import GroupAborted, InvalidArgument, PeerDied, TricommError
from tricomm.c10d import dispatch, streams
from tricomm.c10d.group_calls import GroupCall
from tricomm.deadline import Deadline

ORDERS = pytest.mark.parametrize("newest_first", [False, True])
CALLS = {
    "all_reduce": lambda comm, x, y: comm.all_reduce(x),
    "out of place": lambda comm, x, y: comm.all_reduce(x, out=y),
    "asynchronous": lambda comm, x, y: comm.all_reduce(x, async_op=True).wait(),
    "all_gather": lambda comm, x, y: comm.all_gather(x, out=y),
    "reduce_scatter": lambda comm, x, y: comm.reduce_scatter(x, out=y),
    "broadcast": lambda comm, x, y: comm.broadcast(x, 0),
    "reduce": lambda comm, x, y: comm.reduce(x, 0),
    "gather": lambda comm, x, y: comm.gather(x, 0, out=y),
    "scatter": lambda comm, x, y: comm.scatter(x, 0, out=y),
    "all_to_all": lambda comm, x, y: comm.all_to_all(x, out=y),
    "uneven": lambda comm, x, y: comm.all_to_all_v(x, [8], [8], out=y),
    "barrier": lambda comm, x, y: comm.barrier(async_op=True),
}


def made_on_two_streams(comm, world, newest_first):
    """Each call twice, on changing streams, over a tensor that a kernel before it writes. Returns tensor and
    output of each."""
    streams = [world.new_stream(torch.device("cuda", MINE)) for _ in range(2)]
    for call in CALLS.values():
        call(comm, torch.ones(8), torch.ones(8))  # compiled and loaded
    results = {}
    with world.hold(newest_first):
        for turn, stream in enumerate(streams):
            for number, (name, call) in enumerate(CALLS.items()):
                x, y = torch.full((8,), -1.0), torch.full((8,), -2.0)
                with world.stream(stream):
                    world.kernel(lambda x=x, n=number: x.fill_(n))
                    call(comm, x, y)
                results[name, turn] = x, y
        assert comm._monitor.fault is None and results["out of place", 1][1][0] == -2.0
    return results


@ORDERS
def test_no_call_that_is_known_waits_for_the_device(newest_first, comm, world):
    results = made_on_two_streams(comm, world, newest_first)
    comm.check()
    assert world.ran == sorted(world.ran)
    for number, name in enumerate(CALLS):
        want = torch.full((8,), float(number))
        in_place = name in ("all_reduce", "asynchronous", "broadcast", "reduce", "barrier")
        for turn in (0, 1):
            x, y = results[name, turn]
            assert torch.equal(x, want) and torch.equal(y, torch.full((8,), -2.0) if in_place else want), name


def test_without_the_order_of_streams_calls_overtake_each_other(comm, world, monkeypatch):
    monkeypatch.setattr(FakeStream, "wait_stream", lambda stream, other: None)
    monkeypatch.setattr(FakeEvent, "wait", lambda event, stream: None)
    made_on_two_streams(comm, world, True)
    assert world.ran != sorted(world.ran)


def overtaken(comm, world):
    """Whether a call on another stream can run before a kernel that was queued after the last call on its stream."""
    first, second = (world.new_stream(torch.device("cuda", MINE)) for _ in range(2))
    x, slow = torch.ones(8), []
    for stream in (first, second, first):
        with world.stream(stream):
            comm.all_reduce(x)
    with world.hold(True), world.stream(first):
        world.kernel(lambda: slow.append(len(world.ran)))
        with world.stream(second):
            comm.all_reduce(x)
            before = len(world.ran)
    assert world.ran == sorted(world.ran)
    return slow[0] > before


def test_a_call_on_another_stream_waits_for_the_last_call_and_not_for_what_was_queued_after_it(comm, world):
    assert overtaken(comm, world)
    comm._launcher.captured = True  # a graph with calls may have been replayed on it meanwhile
    assert not overtaken(comm, world)
    comm._launcher.captured = False


def test_a_kernel_that_is_new_is_loaded_and_that_waits(comm, world):
    """The first call of a kind must be made before kernels wait for each other; the fake reports one that is not."""
    x = torch.ones(8)  # dropped earlier, it would be overwritten by the pending kernel: CPU memory follows no stream
    with world.hold(False):
        comm.all_reduce(x)
        with pytest.raises(AssertionError, match=r"cuModuleLoadData waits for kernels of cuda:1"):
            comm.all_reduce(torch.ones(8, dtype=torch.int32), op="max")
        with pytest.raises(AssertionError, match="empty_cache waits for kernels of cuda:1"):
            torch.cuda.empty_cache()
    world.complaints.clear()


def test_an_asynchronous_barrier_under_torch_returns_before_it_has_run(comm, world, monkeypatch):
    monkeypatch.setattr(streams, "Future", lambda devices: SimpleNamespace(set_result=lambda value: None))
    comm.barrier()
    own, call = streams.GroupStream(comm), GroupCall("barrier", async_op=True)
    with world.hold(False):
        work = own.run(lambda: dispatch._by_kernels(comm, call), [call], timedelta(seconds=60))
        assert not work.is_completed()
    assert work.wait() and work.is_completed()


def outcome(work):
    try:
        return work.wait(timeout=5.0)
    except TricommError as error:
        return type(error)


def test_a_call_that_had_run_before_a_fault_stays_completed(comm, world):
    seen, unseen = (comm.all_reduce(torch.ones(8), async_op=True) for _ in range(2))
    assert seen.is_completed()
    with world.hold(False):
        pending = comm.all_reduce(torch.ones(8), async_op=True)
        assert not pending.is_completed()
        comm._faults.abort(PeerDied, "rank 1 died")
    assert pending.is_completed()  # its kernel has left
    assert seen.wait() is seen.result() and outcome(unseen) is outcome(pending) is PeerDied


@pytest.mark.parametrize("waited", [True, False])
def test_calls_that_shrink_has_waited_for_stay_completed(waited, comm, world):
    work = comm.all_reduce(torch.ones(8), async_op=True)
    if waited:
        comm._end_calls(Deadline(5.0))
    comm._faults.abort(GroupAborted, "a smaller group goes on")
    assert outcome(work) is (work.result() if waited else GroupAborted)
    with pytest.raises(GroupAborted, match="The group is lost; make a new communicator"):
        comm.check()


def test_the_handle_of_a_captured_call_is_complete_and_orders_within_the_capture_only(comm, world):
    side, x = world.new_stream(torch.device("cuda", MINE)), torch.ones(8)
    with world.capture(side) as graph:
        work = comm.all_reduce(x, async_op=True)
        assert work.is_completed() and work.wait(timeout=5.0) is x
    assert len(graph) == 1 and work.is_completed() and work.wait(timeout=5.0) is x


def test_memory_is_neither_allocated_nor_freed_in_a_capture(comm, world):
    """CUDA would refuse it and invalidate the capture. A user's kernel is captured."""
    x, comm._store = torch.ones(8), HashStore()
    refused = {
        "symmetric": lambda: comm.symmetric((8,), torch.float32),
        "register": lambda: comm.register(torch.ones(64).share_memory_()),
        "split": lambda: comm.split([0]),
        "suspend": comm.suspend,
    }
    with world.capture(world.new_stream(torch.device("cuda", MINE))) as graph:
        for name, call in refused.items():
            with pytest.raises(InvalidArgument, match=f"{name}: the current stream captures a CUDA graph"):
                call()
        comm.launch(bodies.fill, 1, x, N=8)
        comm.all_reduce(x)
    assert x[0] == 1.0 and len(graph) == 2
    for node in graph:
        node()
    assert torch.equal(x, torch.full((8,), 7.0))
    assert torch.equal(comm.symmetric((8,), torch.float32).local, torch.zeros(8))


def test_timing_enabled_in_a_capture_applies_to_later_calls(comm, world):
    x = torch.ones(8)
    with world.capture(world.new_stream(torch.device("cuda", MINE))):
        comm.time_calls(1)
        comm.stats()
    for _ in range(2):
        comm.all_reduce(x)
        with world.capture(world.new_stream(torch.device("cuda", MINE))):
            comm.all_reduce(x)
    assert sum(row.timed for row in comm.stats().calls) == 2
