"""Programmatic dependent launch: before `griddepcontrol.wait` a kernel may not access memory of earlier kernels."""

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tricomm import check

COUNT, BLOCKS = 64, 2


@triton.jit
def step(x, y, ORDER: tl.constexpr, N: tl.constexpr):
    """y = x + 1. ORDER: w waits, s signals, l loads, p stores."""
    lane = tl.program_id(0) * N + tl.arange(0, N)
    value = lane * 0
    for at in tl.static_range(4):
        if ORDER[at] == "w":
            cuda.gdc_wait()
        elif ORDER[at] == "s":
            cuda.gdc_launch_dependents()
        elif ORDER[at] == "l":
            value = tl.load(x + lane)
        elif ORDER[at] == "p":
            tl.store(y + lane, value + 1)


def report(*steps, eager=False):
    """Of a graph of kernels (order, number of the tensor it reads, and of the one it writes), or of `eager` ones, each
    followed by an event."""

    def run(comm):
        tensors = [comm.symmetric((BLOCKS * COUNT,), torch.int32).local for _ in range(4)]
        values = [10 * n + comm.rank for n in range(4)]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.fill_(value)
        graph = torch.cuda.CUDAGraph()
        comm.synchronize()
        with nullcontext() if eager else torch.cuda.graph(graph):
            for order, x, y in steps:
                comm.launch(step, BLOCKS, tensors[x], tensors[y], ORDER=order, N=COUNT, num_warps=2, launch_pdl=True)
                if "p" in order:
                    values[y] = values[x] + 1
        if not eager:
            graph.replay()
        comm.synchronize()
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, value))

    return check(run, 1, schedules=30, compiled="sm_90")


def kinds(found):
    return {finding.kind for finding in found.findings}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("order", ["wslp", "swlp", "wlsp", "wlp-"])
def test_kernels_that_wait_before_their_first_access_are_clean(order, eager):
    found = report((order, 0, 1), (order, 1, 2), (order, 2, 0), eager=eager)
    assert found.ok, found


def test_an_event_between_is_no_wait():
    assert "race" in kinds(report(("wslp", 0, 1), ("lwsp", 1, 2), eager=True))


def test_a_dependent_launch_that_never_waits_is_named():
    """Even if it shares no memory with other kernels, because later launches rely on its end."""
    found = report(("wslp", 0, 1), ("lps-", 2, 3))
    (finding,) = found.findings
    assert finding.kind == "no_wait" and "step is a dependent launch" in str(finding)
    assert finding.where[0].startswith(__file__) and "gdc_wait" in finding.advice


@pytest.mark.parametrize("order", ["lwsp", "slwp", "slp-", "lpws"])
def test_a_load_before_the_wait_or_without_one_is_a_race(order):
    found = report(("wslp", 0, 1), (order, 1, 2))
    (race,) = [finding for finding in found.findings if finding.kind == "race"]
    assert "put griddepcontrol.wait" in str(race) and race.where[0] != race.where[1]


@pytest.mark.parametrize("order", ["lpws", "slpw", "slp-"])
@pytest.mark.parametrize("target", [0, 1], ids=["over what is read", "over what is written"])
def test_a_store_before_the_wait_or_without_one_is_a_race(order, target):
    assert "race" in kinds(report(("wslp", 0, 1), (order, 2, target)))


def test_other_memory_may_be_accessed_before_the_wait():
    found = report(("wslp", 0, 1), ("lpws", 2, 3))
    assert found.ok, found


def test_a_kernel_between_that_never_waits_breaks_the_order_of_the_others():
    found = report(("wslp", 0, 1), ("sw--", 3, 3), ("wslp", 1, 2))
    assert found.ok, found
    assert "race" in kinds(report(("wslp", 0, 1), ("s---", 3, 3), ("wslp", 1, 2)))


@pytest.mark.parametrize(("between", "expected"), [("ws--", set()), ("sw--", {"race"})])
def test_a_signal_after_the_wait_orders_earlier_accesses(between, expected):
    """Then a launch may load before its wait what the kernel before the last one has written."""
    assert kinds(report(("wslp", 0, 1), (between, 3, 3), ("lwp-", 1, 2))) - {"wrong_result"} == expected


def test_work_of_another_stream_needs_no_wait():
    """The second call is a dependent launch that waits; only the order with the other stream is missing."""

    def run(comm):
        x, y = (comm.symmetric((COUNT,), torch.int32).local.fill_(1) for _ in range(2))
        comm.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            y.add_(1)
        comm.all_reduce(x, algorithm="one_shot", protocol="ll")
        comm.all_reduce(y, algorithm="one_shot", protocol="ll")
        torch.cuda.synchronize()

    found = check(run, 2, schedules=20, compiled="sm_90")
    assert kinds(found) == {"race"}
    assert not [finding for finding in found.findings if "griddepcontrol.wait" in str(finding)]


def calls_around(order):
    """All-reduces of one tensor on two streams in turn, with and without async_op; a user's kernel after each pair."""

    def run(comm):
        x = torch.full((BLOCKS * COUNT,), comm.rank + 1, dtype=torch.int32)
        streams = torch.cuda.current_stream(), torch.cuda.Stream()
        for stream in (*streams, *streams):
            stream.wait_stream(streams[0] if stream is streams[1] else streams[1])
            with torch.cuda.stream(stream):
                work = comm.all_reduce(x, algorithm="one_shot", protocol="ll", async_op=True)
                comm.launch(step, BLOCKS, x, x, ORDER=order, N=COUNT, num_warps=2, launch_pdl=True)
                comm.all_reduce(x, algorithm="one_shot", protocol="ll")
            work.wait()
        comm.synchronize()
        value = 3
        for number in range(4):
            value = 2 * (value + 1) * (2 if number < 3 else 1)
        assert torch.equal(x, torch.full_like(x, value)), (x, value)

    return check(run, 2, schedules=12, compiled="sm_90")


def test_calls_on_two_streams_with_a_users_kernel_between_are_clean():
    found = calls_around("wslp")
    assert found.ok, found


@pytest.mark.parametrize("order", ["lwsp", "lsp-"])
def test_a_users_kernel_between_calls_that_does_not_wait_in_time_is_reported(order):
    """Without its wait, the next call may overlap the last one, which uses the same mailboxes."""
    assert {"race", "no_wait"} & kinds(calls_around(order)) == {"race"} | ({"no_wait"} if "w" not in order else set())
