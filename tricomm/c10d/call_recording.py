"""The flight recorder of a c10d group: a stream of calls for each type of device that it serves, and its messages."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tricomm.c10d.capabilities import GroupConfig
from tricomm.c10d.group_calls import GroupCall
from tricomm.communicator import Communicator
from tricomm.core import launcher
from tricomm.core.launch_plan import Request
from tricomm.core.planner import UNKNOWN
from tricomm.kernels.collectives import registry
from tricomm.metrics.call_trace import CallTrace
from tricomm.metrics.counters import GLOO, KERNELS
from tricomm.metrics.flight_document import ANY, ENDED, NUMBER, WHAT, Entry, Made, begun
from tricomm.metrics.flight_recorder import FlightRecorder, off
from tricomm.policy.backend_choice import Router

_NOTHING = nullcontext()


class GroupRecorders:
    """The recorders of one group by type of device. The queue records calls on a CPU, the launcher calls on CUDA, and
    this class messages."""

    def __init__(self, config: GroupConfig, devices: list[str]) -> None:
        rank, timeout = config.ranks[config.rank], config.timeout.total_seconds()
        self._by_device = {
            kind: FlightRecorder(f"{config.name}:{kind}", config.ranks, rank, timeout) for kind in devices
        }
        for recorder in self._by_device.values():
            recorder.group = config.name  # as torch names it
        self.trace = CallTrace(self.of("cpu"))  # of the calls on a CPU; the launcher shows those on GPUs
        self._places: Counter[tuple[str, int, int]] = Counter()  # of messages, by kind, peer and tag

    def of(self, kind: str) -> FlightRecorder:
        """The recorder of the calls on devices of this type."""
        return self._by_device.get(kind) or off()

    def message(self, what: str, x: torch.Tensor, peer: int | None, tag: int) -> Entry | None:
        """Record a message that is posted now."""
        recorder = self.of(x.device.type)
        if not recorder.on:
            return None
        made = Made(what, f"tag {tag}", x.dtype, x.numel(), ANY if peer is None else peer)
        entry = begun(self._following(what, made.root, tag), made)
        recorder.add(entry)
        return entry

    def shown(self, what: str, x: torch.Tensor, peer: int | None, tag: int) -> AbstractContextManager[None]:
        """A context manager: the profiler's event of a message that is posted inside. torch's own backends open the
        events of their messages."""
        if not self.trace.on or x.device.type != "cpu":
            return _NOTHING
        made = Made(what, f"tag {tag}", x.dtype, x.numel(), ANY if peer is None else peer)
        number = self._places[what, made.root, tag] + 1 if self.of("cpu").on else 0
        return self.trace.shown(made, lambda: {"Route": GLOO}, x, number)

    def arrived(self, entry: Entry, source: int, tag: int) -> None:
        """Complete the `entry` of a message that has been sent, or received from `source`."""
        if not entry[ENDED]:
            entry[ENDED] = time.time_ns()
            made = entry[WHAT]
            if made.root == ANY:
                entry[NUMBER] = self._following(made.collective, source, tag)
                entry[WHAT] = made._replace(root=source)

    def _following(self, what: str, peer: int, tag: int) -> int:
        self._places[what, peer, tag] += 1
        return self._places[what, peer, tag]

    def report_soon(self) -> None:
        """As `FlightRecorder.report_soon`."""
        for recorder in self._by_device.values():
            recorder.report_soon()

    def close(self) -> None:
        """The group makes no more calls."""
        for recorder in self._by_device.values():
            recorder.close()


def native(recorder: FlightRecorder, number: int, batch: list[Any]) -> None:
    """Record calls that NCCL runs for a group without a communicator."""
    if recorder.on:
        for place, call in enumerate(batch):
            recorder.add((number + place, call.made, time.time_ns(), None))


def decided(call: GroupCall, router: Router, comm: Communicator | None) -> dict[str, Any]:
    """The keys of a call for a profiler: its route, and its kernel if `comm` runs it."""
    route = router.choice(*call.facts)
    if route.backend != KERNELS or comm is None:
        return {"Route": route.backend, "Reason": route.reason}
    epilogue = None if call.fused is None else call.fused.epilogue
    algorithm = None if call.wire is None else registry.algorithm_of(call.wire)
    request = Request(call.collective, None if call.op == "none" else call.op, algorithm, epilogue=epilogue)
    nbytes = UNKNOWN if call.nbytes is None else call.nbytes
    choice = comm._internal.planner.choice(request.sized(call.dtype, call.count), nbytes, "eager")
    return launcher.decided(choice, "eager")
