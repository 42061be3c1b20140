"""The short way of a small all_reduce: the same results, routes and refusals as the long one."""

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
from tricomm.policy.backend_choice import Site


class Recorder:
    """Stands for a communicator on a GPU."""

    def __init__(self):
        self.calls = []

    def all_reduce(self, x, op):
        if not self.repeat(op, x):
            raise tricomm.InvalidArgument("not plain")

    def known(self, op, dtype, count):
        return op

    def repeat(self, known, x):
        if not x.is_contiguous() or x.requires_grad:
            return False
        self.calls.append((x, known))
        x.add_(100)
        return True


@pytest.fixture
def group():
    found = group_over(HashStore(), 0, 1, timedelta(seconds=60))
    yield found
    found.shutdown()


def options(op=dist.ReduceOp.SUM, wait=True):
    made = dist.AllreduceOptions()
    made.reduceOp, made.asyncOp = op, not wait
    return made


def test_what_goes_the_short_way_and_what_does_not(group):
    comm = Recorder()
    group._quick.use(comm, Site("cpu", 1, 1, None, "gloo"))
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
    ]:
        want = x.detach().clone()
        group.allreduce([x], given).wait()
        assert torch.equal(x.detach(), want)
    group.allreduce(torch.ones(3)).wait()
    assert len(comm.calls) == count


def test_a_premultiplied_sum_is_not_taken_for_a_sum(group):
    comm = Recorder()
    group._quick.use(comm, Site("cpu", 1, 1, None, "gloo"))
    x = torch.ones(3)
    group.allreduce([x], options())
    group.allreduce([x], options(dist._make_nccl_premul_sum(2.0))).wait()
    assert len(comm.calls) == 1 and x[0] == 202


def test_a_destroyed_group_refuses_on_the_short_way_too(group):
    group._quick.use(Recorder(), Site("cpu", 1, 1, None, "gloo"))
    group.allreduce([torch.ones(3)], options())
    group.shutdown()
    with pytest.raises(tricomm.GroupAborted, match="destroyed"):
        group.allreduce([torch.ones(3)], options())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_host_time_is_measured_and_says_what_it_is():
    found = c10d_overhead.measure(64, 50, 2)
    assert found["fake_us"] > 0 and found["c10d_us"] > 0 and found["c10d_over_fake"] > 0
    assert found["communicator_over_fake"] > 0
    assert not dist.is_initialized()


def test_a_groups_first_call_is_not_captured_and_the_group_goes_on(group, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(tricomm.InvalidArgument, match="make one call before the capture"):
        group._engine._communicator(torch.device("cuda", 0))
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
    monkeypatch.setattr(group._engine, "_comms", comms)
    assert group._engine.gpu() == torch.device("cuda", chosen)
