"""Streams of CUDA calls, against a fake that records which stream waits for which, and messages over a fake NCCL.

Not a GPU: order, not overlap. How NCCL itself groups messages has not run on hardware.
"""

from __future__ import annotations

import itertools
import time
import types
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from tests import ranks
from tests.core.bodies import torch_nccl_bodies as nccl
from tests.fake_cuda import World
from tests.kernels import fake_streams as fakes
from tricomm import errors
from tricomm.c10d import streams, work_handles
from tricomm.c10d.fallback_backends import CallBlock
from tricomm.c10d.group_calls import GroupCall
from tricomm.c10d.work_handles import CombinedWork, FinishedWork
from tricomm.gpu import Gpu
from tricomm.metrics import flight_recorder

DEVICE = torch.device("cuda", 0)


USER, SIDE = "stream 0 of cuda:0", "stream 1001 of cuda:0"


class FakeFuture:
    """`torch.futures.Future`, but for the events that it records on a GPU."""

    def __init__(self, devices):
        self.devices = devices

    def set_result(self, value):
        self.on, self.value = str(torch.cuda.current_stream(DEVICE)), value


class FakeComm:
    fault = None

    def __init__(self):
        self.gpu, self.told = Gpu(DEVICE), []
        faults = SimpleNamespace(
            interrupted=self.told.append, check=self.check, known=lambda: self.fault is not None,
            handles=itertools.count(1), completed=0,
        )  # fmt: skip
        group = SimpleNamespace(recorder=flight_recorder.off())
        self._internal = SimpleNamespace(faults=faults, group=group)

    def check(self):
        if self.fault:
            raise self.fault


@pytest.fixture
def world(monkeypatch):
    made = World()
    made.install(monkeypatch)
    made.used.add(0)
    monkeypatch.setattr(streams, "Future", FakeFuture)
    yield made
    made.verify()


def overlapped(world, newest_first):
    """A user's kernel, a call that reads its result, and a kernel that reads the call's, all pending; then the same
    call, whose handle and tensors are dropped before it runs. Returns the numbers that the call and the last kernel
    read. The call replaces its tensor by fives."""
    own = streams.GroupStream(FakeComm())
    total, seen = torch.zeros(8), torch.zeros(8)

    def made():
        x = world.tensor(torch.zeros(8))
        memory = world.borrowed(x)

        def kernel():
            total.copy_(memory)
            memory.fill_(5.0)

        world.kernel(lambda: memory.fill_(3.0))
        call = GroupCall("broadcast", x, x, result=[x], async_op=True, device=DEVICE, keep=[x])
        return own.run(lambda: world.kernel(kernel), [call], None), memory

    with world.hold(newest_first):
        work, memory = made()
        assert not work.is_completed()
        work.wait()
        world.kernel(lambda: seen.copy_(memory))
        assert not work.is_completed(), "the host has not waited"
        work = made()[0]  # and is dropped before it has run
        del work
    return total.tolist() + seen.tolist()


RIGHT = [3.0] * 8 + [5.0] * 8


@pytest.mark.parametrize("newest_first", [False, True])
def test_calls_read_memory_after_it_is_written_and_keep_it_alive_in_any_stream_order(newest_first, world):
    assert overlapped(world, newest_first) == RIGHT


@pytest.mark.parametrize(
    ("where", "protection"),
    [(fakes.FakeStream, "wait_stream"), (fakes.FakeEvent, "wait"), (torch.Tensor, "record_stream")],
)
def test_without_a_protection_another_stream_order_is_seen(where, protection, world, monkeypatch):
    monkeypatch.setattr(where, protection, lambda *arguments: None)
    assert [overlapped(world, newest_first) for newest_first in (False, True)] != [RIGHT] * 2


def run(world, comm, async_op=True, timeout=None, collective="all_reduce"):
    def kernel():
        world.log.append(f"kernel on {world.current_stream()}")
        world.kernel(lambda: None)

    call = GroupCall(collective, result=[1], async_op=async_op)
    return streams.GroupStream(comm).run(kernel, [call], timeout)


def test_a_synchronous_call_runs_on_the_callers_stream(world):
    work = run(world, FakeComm(), async_op=False)
    assert work.wait() and world.log == [f"kernel on {USER}"]


def test_an_asynchronous_call_runs_on_a_side_stream_and_wait_orders_without_blocking(world):
    with world.hold(False):
        work = run(world, FakeComm())
        assert world.log == [f"{SIDE} waits for {USER}", f"kernel on {SIDE}", f"event on {SIDE}"]
        assert world.priorities == [-1] and not work.is_completed()
        assert work.wait()  # returns before the GPU has run it
        assert world.log[-1] == f"{USER} waits for an event on {SIDE}"
    future = work.get_future()
    assert (future.value, future.devices, future.on) == ([1], [DEVICE], SIDE)


def test_the_calls_of_a_group_share_its_stream(world):
    own = streams.GroupStream(FakeComm())
    for _ in range(2):
        own.run(lambda: None, [GroupCall("all_reduce", async_op=True)], None)
    assert world.priorities == [-1]


def test_a_bounded_wait_blocks_the_host_and_ends(world, monkeypatch):
    with world.hold(False):
        work = run(world, FakeComm(), timeout=timedelta(seconds=0.02))
        with pytest.raises(errors.CollectiveTimeout, match="timeout after 0.01 s"):
            work.wait(timedelta(seconds=0.01))
        monkeypatch.setenv("TRICOMM_BLOCKING_WAIT", "1")
        with pytest.raises(errors.CollectiveTimeout, match="timeout after 0.02 s"):
            work.wait()
    assert work.wait() and work.is_success()


def test_a_barrier_blocks_the_host_in_wait_and_not_before(world):
    with world.hold(False):
        work = run(world, FakeComm(), timeout=timedelta(seconds=0.01), collective="barrier")
        with pytest.raises(errors.CollectiveTimeout, match="barrier: timeout after 0.01 s"):
            work.wait()
    assert work.wait()


def test_wait_raises_a_fault_of_the_group(world):
    comm = FakeComm()
    work = run(world, comm)
    comm.fault = errors.PeerDied("rank 1 died")
    with pytest.raises(errors.PeerDied):
        work.wait()
    assert isinstance(work.exception(), errors.PeerDied) and not work.is_success()
    future = work.get_future()
    assert future.done()
    with pytest.raises(errors.PeerDied):
        future.wait()


def test_a_fault_of_the_group_ends_the_backward_pass_that_made_the_call(world):
    """As DDP's reducer makes it, from C++: `called_by_autograd` stands for that."""
    comm, made = FakeComm(), []

    def bucket(grad):
        made.append(run(world, comm))
        called_by_autograd(made[0])
        assert "PeerDied: rank 1" in reads_as_the_reducer_does(made[0], comm)
        return grad

    x = torch.ones(3, requires_grad=True)
    x.register_hook(namespace(bucket))
    with pytest.raises(errors.PeerDied):
        x.sum().backward()
    assert f"{USER} waits for an event on {SIDE}" in world.log  # the pass orders itself after the call


def reads_as_the_reducer_does(work, comm):
    comm.fault = errors.PeerDied("rank 1 died")
    with pytest.raises(RuntimeError) as caught:
        work.get_future().wait()
    return str(caught.value)


def called_by_autograd(work):
    work_handles.raise_in_backward(work)


def namespace(function):
    """`function` as one of tricomm.c10d's own, which autograd calls itself."""
    space = {**function.__globals__, "__name__": "tricomm.c10d.test"}
    space["called_by_autograd"] = types.FunctionType(called_by_autograd.__code__, space)
    return types.FunctionType(function.__code__, space, function.__name__, None, function.__closure__)


def test_an_interrupted_wait_aborts_the_group(world, monkeypatch):
    comm = FakeComm()

    def interrupt(seconds):
        raise KeyboardInterrupt

    with world.hold(False):
        work = run(world, comm)
        monkeypatch.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.wait(timedelta(seconds=20))
    assert [type(error) for error in comm.told] == [KeyboardInterrupt]


def test_inside_a_capture_everything_stays_on_the_captured_stream(world):
    captured = world.new_stream(DEVICE)
    with world.capture(captured):
        run(world, FakeComm())
    assert world.log == [f"kernel on {captured}"]


@pytest.mark.parametrize("body", [nccl.batches, nccl.refused_batch, nccl.coalesced, nccl.others])
def test_the_messages_of_a_batch_run_together_in_nccl(body, url):
    assert ranks.run(3, body, url) == [True] * 3


def test_messages_one_by_one_hang_as_in_nccl(url):
    assert ranks.run(3, nccl.ungrouped, url) == [True] * 3


def test_a_call_for_which_nccl_has_no_handle_is_left_out():
    work = CombinedWork([None, FinishedWork([1])])
    work.synchronize()
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert [future.value() for future in work.get_future().wait()] == [[1]]


def test_the_calls_of_a_block_are_one_group_of_nccls():
    log = []
    backend = SimpleNamespace(
        supports_coalescing=True,
        _start_coalescing=lambda: log.append("start"),
        _end_coalescing=lambda: log.append("end"),
    )
    block = CallBlock()
    block.begin()
    assert block.entered(backend) is backend
    block.end()
    assert log == ["start", "end"]
    log.clear()
    assert block.together(lambda: [block.entered(backend)]) == [backend] and log == ["start", "end"]
