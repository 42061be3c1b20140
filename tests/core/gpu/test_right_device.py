"""The right device, whatever is current: every way into a communicator, from any thread, over two fake GPUs."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from tests import fake_cuda, ranks
from tests.core.bodies import right_device_bodies as bodies
from tests.core.gpu.conftest import MINE, OTHER, device_of
from tests.kernels.fake_launch import Result
from tests.store.store_ranks import succeed
from tricomm import communicator, errors
from tricomm.c10d import streams
from tricomm.c10d.group_calls import GroupCall
from tricomm.core import bootstrap, launcher
from tricomm.store.control import RankState

# The device or context that is current in the calling thread


@contextmanager
def nothing(world):
    assert world.contexts == []
    yield


@contextmanager
def mine(world):
    with world.device(MINE):
        yield


@contextmanager
def other(world):
    world.set_device(OTHER)
    yield


@contextmanager
def inside_other(world):
    with world.device(MINE), world.device(OTHER):
        yield


@contextmanager
def somebodys_context(world):
    """A non-primary context on the same device: a green context, or another library's."""
    world.contexts.append(("somebody's", MINE))
    yield


SITUATIONS = {f.__name__: f for f in (nothing, mine, other, inside_other, somebodys_context)}


def all_reduce(comm, world):
    x = torch.full((8,), 3.0)
    assert torch.equal(comm.all_reduce(x), torch.full((8,), 3.0))
    comm.all_reduce(torch.ones(8), out=x)
    assert torch.equal(x, torch.ones(8))


def asynchronous(comm, world):
    work = comm.all_reduce(torch.full((8,), 5.0), async_op=True)
    assert world.log[-1] == f"event on {world.current_stream(MINE)}"
    assert torch.equal(work.wait(timeout=5.0), torch.full((8,), 5.0))
    assert world.log[-1].startswith(f"{world.current_stream(MINE)} waits for an event on stream")
    assert work.is_completed()


def synchronize(comm, world):
    comm.synchronize()
    comm.barrier()


def others(comm, world):
    assert torch.equal(comm.all_gather(torch.ones(3)), torch.ones(3))
    assert torch.equal(comm.all_to_all_v(torch.ones(3), [3], [3]), torch.ones(3))
    handle = comm.symmetric((4,), torch.float32)
    handle.local.fill_(2.0)
    assert torch.equal(comm.all_reduce(handle, out=torch.zeros(4)), torch.full((4,), 2.0))


def users_kernel(comm, world):
    out = torch.zeros(8)
    comm.launch(bodies.fill, 1, out, N=8)
    assert torch.equal(out, torch.full((8,), 7.0))


def timed(comm, world):
    comm.time_calls(1)
    comm.all_reduce(torch.ones(8))
    assert comm.stats().calls
    comm.time_calls(0)
    comm.all_reduce(torch.ones(8))


def closes(comm, world):
    comm.close()


ENTRIES = (all_reduce, asynchronous, synchronize, others, users_kernel, timed, closes)


def in_a_thread(action):
    """Run `action` in a new thread, which has no context; raises what it raises."""
    succeed(1, lambda rank: action(), 120)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.__name__)
def test_a_call_uses_its_own_device_whichever_is_current(comm, world, entry, situation):
    def call():
        with SITUATIONS[situation](world):
            before = world.get_device(), list(world.contexts)
            entry(comm, world)
            device, contexts = world.get_device(), world.contexts
            # A thread without a context may get its device's primary one, as it does from any call of torch.
            assert device == before[0] and contexts[: len(before[1])] == before[1]

    launches = len(device_of(comm).launches)
    in_a_thread(call)
    assert entry is closes or entry is users_kernel or len(device_of(comm).launches) > launches
    assert world.used <= ({MINE} if situation in ("nothing", "mine", "somebodys_context") else {MINE, OTHER})


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_call_runs_on_the_current_stream_of_its_device(comm, world, situation):
    def call():
        with SITUATIONS[situation](world):
            side = world.new_stream(torch.device("cuda", MINE))
            with world.stream(side):
                comm.all_reduce(torch.ones(8))
                assert f"{side} waits for stream 0 of cuda:1" in world.log
            assert device_of(comm).launches[-1].stream == side.cuda_stream
            with world.stream(world.new_stream(torch.device("cuda", OTHER))):
                comm.all_reduce(torch.ones(8))
            assert device_of(comm).launches[-1].stream == 0
            assert world.log[-2:] == [f"stream 0 of cuda:1 waits for an event on {side}", "event on stream 0 of cuda:1"]

    in_a_thread(call)


def test_a_call_is_captured_with_its_own_device_and_refused_with_another(comm, world):
    side = world.new_stream(torch.device("cuda", MINE))
    x = torch.full((8,), 2.0)
    with world.capture(side) as graph:
        comm.all_reduce(x)
        work = comm.all_reduce(torch.ones(8), async_op=True)
        work.wait()
    assert len(graph) == 2
    for node in graph:
        node()
    abroad = world.new_stream(torch.device("cuda", OTHER))
    world.used.add(OTHER)
    launches = len(device_of(comm).launches)
    with world.capture(abroad), pytest.raises(errors.InvalidArgument, match=r"cuda:0.*is on cuda:1: capture"):
        comm.all_reduce(x)
    assert len(device_of(comm).launches) == launches
    comm.all_reduce(x)


def test_calls_of_a_c10d_group(comm, world, monkeypatch):
    monkeypatch.setattr(streams, "Future", FakeFuture)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    own = streams.GroupStream(comm)
    for situation in SITUATIONS.values():

        def call(situation=situation):
            with situation(world):
                before = world.get_device()
                x = torch.full((8,), 2.0)
                for async_op in (False, True):
                    batch = [GroupCall("all_reduce", x, x, result=[x], async_op=async_op)]
                    work = own.run(lambda: comm.all_reduce(x), batch, timedelta(seconds=60))
                    assert work.wait() and torch.equal(x, torch.full((8,), 2.0))
                assert world.get_device() == before

        in_a_thread(call)
    assert {launch.stream // 1000 for launch in device_of(comm).launches} == {0, MINE + 1}


class FakeFuture:
    def __init__(self, devices):
        self.devices = devices

    def set_result(self, value):
        pass


def test_without_the_guard_another_devices_context_is_used(comm, world, monkeypatch):
    """Without it, events are on the wrong device, and a query makes a context on an unused device."""
    monkeypatch.setattr(comm._gpu, "current_device", lambda: MINE)

    def call():
        with other(world):
            comm.launch(bodies.fill, 1, torch.zeros(8), N=8)

    in_a_thread(call)
    assert set(world.complaints) >= {"a user's kernel ran on cuda:0", "made a context on cuda:0, which no rank uses"}
    world.complaints.clear()


def test_a_refused_launch_says_why_and_aborts_the_group(comm, world):
    fake = device_of(comm)
    fake.failures[("cuLaunchKernel", fake.calls.count("cuLaunchKernel") + 1)] = Result.CUDA_ERROR_OUT_OF_MEMORY
    words = "CUDA_ERROR_OUT_OF_MEMORY.*Nothing was launched on rank 0.*the other ranks get GroupAborted"
    with pytest.raises(errors.ResourceError, match=words):
        comm.all_reduce(torch.ones(8))
    with pytest.raises(errors.GroupAborted, match="CUDA_ERROR_OUT_OF_MEMORY"):
        comm.all_reduce(torch.ones(8))


def test_peers_are_told_of_a_refused_launch_within_two_seconds(tmp_path):
    tmp_path.chmod(0o700)
    result = ranks.run(3, bodies.refused_on_one, f"file://{tmp_path}/store")
    assert result[0][0] == "ResourceError" and "the other ranks get GroupAborted" in result[0][1]
    for kind, text, seconds in result[1:]:
        assert kind == "GroupAborted" and "rank 0" in text and "CUDA_ERROR_OUT_OF_MEMORY" in text
        assert seconds < 2.0 + bodies.LATE


def test_a_graph_that_outlives_its_group_is_harmless(tmp_path):
    tmp_path.chmod(0o700)
    for took, text in ranks.run(2, bodies.replays_after_close, f"file://{tmp_path}/store", "kept"):
        assert took < 10.0 and "closed; make a new communicator" in text


def test_without_the_kept_memory_a_replay_touches_freed_memory(tmp_path):
    tmp_path.chmod(0o700)
    with ranks.start(2, bodies.replays_after_close, f"file://{tmp_path}/store", "unprotected") as started:
        outcome = started.results()[0]
    assert outcome.value is None and outcome.code in (-11, -7, None), outcome


def test_a_kernel_that_does_not_end_keeps_its_memory_and_peers_are_told_of_the_abort(comm, world, monkeypatch):
    monkeypatch.setattr(fake_cuda.FakeStream, "query", lambda stream: False)
    monkeypatch.setattr(fake_cuda.FakeEvent, "query", lambda event: False)
    monkeypatch.setattr(launcher, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(comm._group, "timeout", 0.2)
    comm.close()
    assert comm._group.control.page(0).state == RankState.CLOSED and comm in communicator._kept
    comm.group_table.add_(0)  # still mapped


@pytest.mark.parametrize(("current", "local", "chosen"), [(0, None, 0), (0, "1", 1), (1, "0", 1), (0, "3", 1)])
def test_the_default_device_of_a_rank(world, monkeypatch, current, local, chosen):
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    with world.device(current):
        assert bootstrap.pick_device(None) == torch.device("cuda", chosen)
        assert world.get_device() == current
