"""Completes the flight recorder's entries of a communicator: when its calls began and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tricomm.kernels import collective_specs, layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.layout import Layout
from tricomm.metrics.counters import NCCL
from tricomm.metrics.flight_document import CREATED, ENDED, MORE, NUMBER, STARTED, WHAT, Entry
from tricomm.store.control import Descriptor, PackedDescriptor

_HALF = layout.EPOCH_LIMIT // 2


def on_cpu(entries: list[Entry]) -> None:
    """A call begins when it is made; its end is recorded."""
    for entry in entries:
        entry[STARTED] = entry[CREATED]


def on_gpu(entries: list[Entry], flags: Sequence[int], plan: Layout, world_size: int) -> None:
    """Read the words that the kernels write. No call of CUDA, because the thread that waits may hold its locks.

    A call takes the epochs of its chunks, beginning with the epoch that had ended when it was launched, or with the end
    of the call before it. The epochs of a graph that is replayed while calls are queued after it are not known; of a
    fused or quantised call or an `all_to_all_v` only the least number is known. Calls queued after these can appear
    further than they are, until a later launch shows the epoch. A call of NCCL has ended when a later call has.
    """
    now, started, blocks = time.time_ns(), flags[layout.STARTED], flags[layout.ENDED : layout.CONTROL_WORDS]
    in_flight = started != 0 and started in blocks  # a block has not ended the epoch that the launch has started
    ended = started if in_flight else blocks[0]
    calls = []
    for entry in sorted(entries, key=lambda entry: int(entry[NUMBER])):
        what = entry[WHAT].unpacked() if isinstance(entry[WHAT], PackedDescriptor) else entry[WHAT]
        if isinstance(what, Descriptor) and what.collective in ("send", "recv"):
            entry[STARTED] = entry[CREATED] if what.sequence <= flags[layout.MESSAGE] else 0
            entry[ENDED] = now if what.sequence <= flags[layout.MESSAGE_ENDED] else 0
        elif not isinstance(what, Descriptor) or what.mode == "eager":  # nothing is known of a captured call
            by_kernel = isinstance(what, Descriptor) and what.algorithm != NCCL
            calls.append((entry, _epochs(what, plan, world_size) if by_kernel else 0))
    passed, until = 0, None
    for place, (entry, epochs) in enumerate(calls):
        if epochs:
            before = entry[MORE]
            begin = before if until is None or (before - until) % layout.EPOCH_LIMIT < _HALF else until
            until = begin + epochs
            if until >= layout.EPOCH_LIMIT:  # as `primitives.advance`
                until -= layout.EPOCH_LIMIT - 2
            if (ended - until) % layout.EPOCH_LIMIT >= _HALF:
                break
            passed = place + 1
    kernels = [place for place, (_, epochs) in enumerate(calls) if epochs]
    if in_flight and kernels:
        passed = min(passed, kernels[-1])
        running = next(place for place in kernels if place >= passed)
        calls[running][0][STARTED] = now
    for entry, _ in calls[:passed]:
        entry[STARTED] = entry[ENDED] = now


def _epochs(what: Descriptor, plan: Layout, world_size: int) -> int:
    """The number of epochs that a call takes; for an `all_to_all_v`, a fused or a quantised call the least number."""
    collective = "all_reduce" if what.collective in collective_specs.FUSED else what.collective
    in_place = "handle" in what.op  # of symmetric memory, which no mailbox divides
    if what.dtype == "none" or collective == "all_to_all_v" or in_place:
        return 1
    kernel = registry.find(collective, what.algorithm, what.protocol)
    coded = bool(kernel.wire) and kernel.wire == kernel.codes  # scales, next to the codes, are not counted
    itemsize: int = 1 if coded else getattr(torch, what.dtype).itemsize
    words = -(-what.count * itemsize // 8)
    return max(1, -(-words // kernel.chunk_words(world_size, plan)))
