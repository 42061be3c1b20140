"""States of calls in a dump while kernels of the fake GPU are pending, and the epochs that calls take."""

from __future__ import annotations

import pytest
import torch

import tricomm
from tests.core.gpu.conftest import MINE
from tricomm.core.watch import call_states
from tricomm.kernels import layout
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.metrics.flight_document import ENDED, STARTED

SIZES = (8, 700_000, 8, 400_000, 8, 8)  # elements; of these calls two have several chunks


def states(comm, calls):
    """Of the last calls: completed, running, scheduled."""
    entries = sorted(comm._group.recorder.entries())[-calls:]
    return "".join("c" if entry[ENDED] else "r" if entry[STARTED] else "s" for entry in entries)


def seen_between_kernels(comm, world):
    """The states after each of the kernels that wait in one stream."""
    seen, tensors = [], [torch.ones(size) for size in SIZES]
    for x in tensors:
        comm.all_reduce(x)  # compiled and loaded
    with world.hold(False), world.stream(world.new_stream(torch.device("cuda", MINE))):
        for x in tensors:
            comm.all_reduce(x)
            world.kernel(lambda: seen.append(states(comm, len(SIZES))))
    return seen


STEPS = ["csssss", "ccssss", "cccsss", "ccccss", "cccccs", "cccccc"]


def test_a_call_that_waits_for_one_of_several_chunks_has_not_ended(comm, world):
    assert seen_between_kernels(comm, world) == STEPS


def test_without_the_number_of_chunks_calls_look_completed_too_early(comm, world, monkeypatch):
    monkeypatch.setattr(call_states, "_epochs", lambda what, plan, world_size: 1)
    assert seen_between_kernels(comm, world) != STEPS


def made(comm, kernel, elements, dtype):
    """A call of this kernel."""
    rows = COLLECTIVES[kernel.collective].rows_in(comm.world_size)
    x, how = torch.ones(elements * rows, dtype=dtype), {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    call = getattr(comm, kernel.collective)
    if kernel.collective == "scatter":
        return call(x, 0, out=x[:elements].clone(), **how)
    return call(x, *[0] * (kernel.collective in ("broadcast", "reduce", "gather")), **how)


DIVIDED = [kernel for kernel in registry.KERNELS if kernel.collective not in ("barrier", "all_to_all_v")]


def epochs(comm):
    """(kernel, size, counted, taken) of calls of all kernels for which these differ."""
    group, wrong = comm._group, []
    for kernel in DIVIDED:
        if kernel.why_not_ranks(comm.world_size):
            continue
        room = kernel.chunk_words(comm.world_size, group.layout)
        for chunks, dtype in ((1, torch.float32), (3, torch.bfloat16), (2, torch.complex64)):
            elements = chunks * room * 8 // dtype.itemsize - (chunks > 1)
            before = int(group.flags[layout.ENDED])
            made(comm, kernel, elements, dtype)
            taken = int(group.flags[layout.ENDED]) - before
            last = [*comm._planner.plans.values()][-1].record.unpacked()
            counted = call_states._epochs(last, group.layout, comm.world_size)
            if not (
                counted == taken == chunks and (last.collective, last.dtype) == (kernel.collective, str(dtype)[6:])
            ):
                wrong.append((kernel.name, elements, counted, taken))
    return wrong


def quantized_epochs(comm):
    """(counted, taken) of calls that are quantised on the links."""
    group, found = comm._group, []
    for kernel in registry.WIRE:
        elements = 20 * kernel.chunk_words(comm.world_size, group.layout)
        before = int(group.flags[layout.ENDED])
        made(comm, kernel, elements, torch.bfloat16)
        last = [*comm._planner.plans.values()][-1].record.unpacked()
        counted = call_states._epochs(last, group.layout, comm.world_size)
        found.append((counted, int(group.flags[layout.ENDED]) - before))
    return found


def test_the_epochs_of_a_quantised_call_are_at_least_those_that_are_counted():
    found = tricomm.simulate(quantized_epochs, world_size=2, options=tricomm.Options(arena_bytes=128 * 1024))
    assert found[0] and all(1 < counted <= taken for counted, taken in found[0])


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_the_epochs_of_a_call_are_those_that_its_kernel_takes(world_size):
    options = tricomm.Options(arena_bytes=64 * 1024 if world_size < 8 else 256 * 1024)
    assert tricomm.simulate(epochs, world_size=world_size, options=options) == [[]] * world_size
