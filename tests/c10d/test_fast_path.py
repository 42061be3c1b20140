"""The fast path of a small all_reduce: the same results, routes and refusals as any other call."""

import gc
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import tricomm
from devtools import c10d_overhead
from tricomm.c10d import group_over
from tricomm.c10d.group_calls import OPERATIONS


class Recorder:
    """A fake of a communicator on a GPU."""

    def __init__(self):
        self.calls, self.known = [], set()

    def remember(self, op, x):
        if op != "premul_sum":
            self.known.add((op, x.dtype, x.shape))
        return op != "premul_sum"

    def repeat(self, op, x):
        if (op, x.dtype, x.shape) not in self.known or not x.is_contiguous() or x.requires_grad:
            return False
        self.calls.append((x, op))
        x.add_(100)
        return True


@pytest.fixture
def group():
    made = group_over(HashStore(), 0, 1, timedelta(seconds=60))
    yield made
    made.shutdown()


@pytest.fixture
def comm(group):
    """A communicator that has reduced three floats by each operation but PREMUL_SUM."""
    made = Recorder()
    for op in set(OPERATIONS.values()) - {"premul_sum"}:
        group._fast_path.learn(made, torch.ones(3), op)
    return made


def options(op=dist.ReduceOp.SUM, wait=True):
    made = dist.AllreduceOptions()
    made.reduceOp, made.asyncOp = op, not wait
    return made


def test_calls_that_take_the_fast_path_and_calls_that_do_not(group, comm):
    for op, name in [(dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.AVG, "avg")] * 2:
        x = torch.ones(3)
        work = group.allreduce([x], options(op))
        assert work.wait() and work.is_completed() and work.exception() is None
        assert comm.calls[-1][0] is x and comm.calls[-1][1] == name and x[0] == 101
    count = len(comm.calls)
    for x, given in [
        (torch.ones(3), options(wait=False)),  # asynchronous
        (torch.ones(2, 3).t(), options()),  # not contiguous
        (torch.ones(3, requires_grad=True), options()),
        (torch.ones(3), None),
        (torch.ones(4), options()),  # never made before
        (torch.ones(3, dtype=torch.float64), options()),
    ]:
        want = x.detach().clone()
        group.allreduce([x], given).wait()
        assert torch.equal(x.detach(), want)
    group.allreduce(torch.ones(3)).wait()
    assert len(comm.calls) == count


def test_calls_of_another_communicator_are_not_repeated_over_the_first_one(group, comm):
    group._fast_path.learn(Recorder(), torch.ones(4), "sum")
    group.allreduce([torch.ones(4)], options()).wait()
    assert not comm.calls


def test_a_premultiplied_sum_is_not_taken_for_a_sum(group, comm):
    x = torch.ones(3)
    group.allreduce([x], options())
    group.allreduce([x], options(dist._make_nccl_premul_sum(2.0))).wait()
    assert len(comm.calls) == 1 and x[0] == 202


def test_a_destroyed_group_refuses_calls_on_the_fast_path(group, comm):
    group.allreduce([torch.ones(3)], options())
    group.shutdown()
    with pytest.raises(tricomm.GroupAborted, match="destroyed"):
        group.allreduce([torch.ones(3)], options())


def test_a_group_and_its_dispatcher_are_in_no_circle_of_references():
    """A group that is dropped closes its connections at once, whenever the garbage collector runs."""
    group = group_over(HashStore(), 0, 1, timedelta(seconds=60))
    group.allreduce([torch.ones(3)], options()).wait()
    group._fast_path.learn(Recorder(), torch.ones(3), "sum")
    group.allreduce([torch.ones(3)], options()).wait()
    left = weakref.ref(group), weakref.ref(group._dispatcher)
    gc.collect()
    gc.disable()
    try:
        del group
        end = time.monotonic() + 10  # a worker thread may hold the last call for a moment
        while any(reference() for reference in left) and time.monotonic() < end:
            time.sleep(0.01)
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_an_interrupt_on_the_fast_path_aborts_the_group(group, comm, monkeypatch):
    def interrupted(op, x):
        raise KeyboardInterrupt

    monkeypatch.setattr(group._fast_path, "_repeat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.allreduce([torch.ones(3)], options())
    with pytest.raises(tricomm.GroupAborted, match="stopped by KeyboardInterrupt"):
        group.barrier()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_host_time_is_measured_and_labelled():
    measured = c10d_overhead.measure(64, 50, 2)
    assert measured["fake_us"] > 0 and measured["c10d_us"] > 0 and measured["c10d_over_fake"] > 0
    assert measured["communicator_over_fake"] > 0
    assert 0 < measured["counting_share"] == measured["counting_us"] / measured["communicator_us"]
    assert not dist.is_initialized()


def test_a_groups_first_call_is_refused_in_a_capture_and_the_group_still_works(group, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(tricomm.InvalidArgument, match="make one call before the capture"):
        group._dispatcher._communicator(torch.device("cuda", 0))
    monkeypatch.undo()
    x = torch.ones(3)
    group.allreduce([x]).wait()
    assert x.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("used", "current", "chosen"), [((1,), 0, 1), ((), 1, 1), ((0, 1), 1, 1), ((), 0, 0)], ids=lambda v: str(v)
)
def test_a_barrier_without_a_device_takes_the_gpu_that_the_group_uses(group, monkeypatch, used, current, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    comms = {torch.device("cuda", index): SimpleNamespace(close=lambda: None) for index in used}
    monkeypatch.setattr(group._dispatcher, "_comms", comms)
    assert group._dispatcher.gpu() == torch.device("cuda", chosen)
