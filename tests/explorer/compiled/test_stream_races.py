"""The examination of compiled kernels knows which operations streams and events order."""

import pytest
import torch

from tests.explorer.compiled.small_kernels import filled
from tricomm import check

COUNT = 64


def kernel_and_operation(comm, order):
    """A kernel on the default stream writes memory that a torch operation on another stream reads."""
    handle, side = comm.symmetric((COUNT,), torch.int32), torch.cuda.Stream()
    comm.launch(filled, 1, handle.local, 48, N=COUNT, num_warps=1)
    order(side)
    with torch.cuda.stream(side):
        return handle.local + 1


def operation_and_kernel(comm, order):
    """A replayed torch operation on another stream writes memory that a kernel on the default one writes as well."""
    handle, side, graph = comm.symmetric((COUNT,), torch.int32), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    handle.local.zero_()
    with torch.cuda.graph(graph):
        handle.local.add_(5)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    order(side)
    comm.launch(filled, 1, handle.local, 48, N=COUNT, num_warps=1)
    side.synchronize()
    return handle.local + 1


def unordered(side):
    pass


def one_waits_for_the_other(side):
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)


def by_event(side):
    for one, other in ((torch.cuda.current_stream(), side), (side, torch.cuda.current_stream())):
        event = torch.cuda.Event()
        event.record(one)
        other.wait_event(event)


def by_host(side):
    torch.cuda.synchronize()


def report(body, order):
    return check(lambda comm: body(comm, order), 1, schedules=3, compiled="sm_90")


@pytest.mark.parametrize("body", [kernel_and_operation, operation_and_kernel])
def test_work_of_two_streams_that_nothing_orders_races(body):
    result = report(body, unordered).findings
    assert [finding.kind for finding in result] == ["race"], result


@pytest.mark.parametrize("order", [one_waits_for_the_other, by_event, by_host])
@pytest.mark.parametrize("body", [kernel_and_operation, operation_and_kernel])
def test_work_of_two_streams_that_is_ordered_does_not(body, order):
    assert report(body, order).ok, report(body, order)
