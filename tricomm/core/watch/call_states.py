"""Completes the flight recorder's entries of a communicator: when its calls began and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tricomm.kernels import layout
from tricomm.metrics.counters import NCCL
from tricomm.metrics.flight_document import CREATED, ENDED, MORE, NUMBER, STARTED, WHAT, Entry
from tricomm.store.control import Descriptor, PackedDescriptor

_HALF = layout.EPOCH_LIMIT // 2


def on_cpu(entries: list[Entry]) -> None:
    """A call begins when it is made; its end is recorded."""
    for entry in entries:
        entry[STARTED] = entry[CREATED]


def on_gpu(entries: list[Entry], flags: Sequence[int]) -> None:
    """Read the words that the kernels write. No call of CUDA, because the thread that waits may hold its locks.

    A call takes at least one epoch, counted from the epoch that had ended when it was launched, or from the end of the
    call before it. So calls of several chunks, and graphs that were replayed, make later calls look further than they
    are. A call that NCCL makes has ended when a later call has.
    """
    now, started, blocks = time.time_ns(), flags[layout.STARTED], flags[layout.ENDED : layout.CONTROL_WORDS]
    in_flight = started != 0 and started in blocks  # a block has not ended what the launch has started
    ended = started if in_flight else blocks[0]
    calls = []
    for entry in sorted(entries, key=lambda entry: int(entry[NUMBER])):
        what = entry[WHAT].unpacked() if isinstance(entry[WHAT], PackedDescriptor) else entry[WHAT]
        if isinstance(what, Descriptor) and what.collective in ("send", "recv"):
            entry[STARTED] = entry[CREATED] if what.sequence <= flags[layout.MESSAGE] else 0
            entry[ENDED] = now if what.sequence <= flags[layout.MESSAGE_ENDED] else 0
        elif not isinstance(what, Descriptor) or what.mode == "eager":  # of a captured call nothing is known
            calls.append((entry, isinstance(what, Descriptor) and what.algorithm != NCCL))
    passed, until = 0, None
    for place, (entry, by_kernel) in enumerate(calls):
        if by_kernel:
            before = entry[MORE]
            until = before + 1 if until is None or (before - until) % layout.EPOCH_LIMIT < _HALF else until + 1
            if (ended - until) % layout.EPOCH_LIMIT >= _HALF:
                break
            passed = place + 1
    kernels = [place for place, (_, by_kernel) in enumerate(calls) if by_kernel]
    if in_flight and kernels:
        passed = min(passed, kernels[-1])
        running = next(place for place in kernels if place >= passed)
        calls[running][0][STARTED] = now
    for entry, _ in calls[:passed]:
        entry[STARTED] = entry[ENDED] = now
