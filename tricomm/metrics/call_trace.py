"""Shows calls in torch's profiler, with the keys of Kineto's NCCL events, and in NVTX.

A call is one event of the calling thread, and the kernel is launched while the event is open. So on a GPU Kineto links
the kernel's event to it by correlation id, as for an operator of torch (not run on hardware). Kineto copies the keys to
the kernel's event for `record_param_comms` only. Only C++ can open that event; torch's own backends open it for their
calls.

The profiler keeps the keys if `record_shapes=True`. With `profile_all_threads=True` it also sees threads that did not
start it, but without the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch._C._autograd import _profiler_type
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast
from torch.autograd import profiler

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs
from tricomm.metrics import flight_document
from tricomm.metrics.flight_document import Made
from tricomm.metrics.flight_recorder import FlightRecorder, warn_once

# As torch's NCCL backend names them.
_NAMES = dict.fromkeys((*collective_specs.FUSED, "all_reduce", "all_reduce_sparse"), "allreduce") | {
    "all_gather": "_allgather_base",
    "all_gather_v": "all_gather",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_v": "reduce_scatter",
    "all_to_all_v": "all_to_allv",
}


class CallTrace:
    """Shows the calls of the group of `recorder`; if the recorder has no name, another object shows them.

    by_default  whether calls are shown without an active profiler, because of TRICOMM_NVTX
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self.by_default = bool(recorder.group) and _asks_for_ranges() and _domain() is not None

    @property
    def on(self) -> bool:
        """Whether a call that is made now should be shown."""
        return self.by_default or profiler._is_profiler_enabled

    @contextmanager
    def shown(
        self, what: Any, how: Callable[[], dict[str, Any]], x: torch.Tensor | None, number: int, line: str = ""
    ) -> Iterator[None]:
        """A context manager: the event of the call `number` (0: not known). `what` and `line` are as in an entry of the
        flight recorder, `how` returns more keys, `x` is the input. The call runs even if this fails."""
        with ExitStack() as events:
            if self._recorder.group:
                try:
                    self._open(events, what, how(), x, number, line)
                except Exception as error:
                    warn_once("trace", f"a call could not be shown to the profiler: {type(error).__name__}: {error}")
            yield

    def _open(
        self, events: ExitStack, what: Any, how: dict[str, Any], x: torch.Tensor | None, number: int, line: str
    ) -> None:
        recorder = self._recorder
        calls = flight_document.calls_of(what, len(recorder.ranks))
        facts = _facts(recorder.ranks, recorder.ranks.index(recorder.rank), calls) | how
        facts["Process Group Name"] = f"{recorder.group}/{line.removesuffix('/')}" if line else recorder.group
        if number:
            facts["Seq"] = number
        name = calls[0].collective
        # Kineto writes None instead of a text with quotation marks.
        keys = {key: value.replace('"', "'") if isinstance(value, str) else value for key, value in facts.items()}
        events.enter_context(_RecordFunctionFast(f"tricomm:{name}", [] if x is None else [x], keys))
        if self.by_default or _profiler_type() == ActiveProfilerType.NVTX:
            domain = _domain()
            if domain is not None:
                nbytes = facts["In msg nelems"] * (calls[0].dtype or torch.uint8).itemsize
                by = "/".join(facts[key] for key in ("Algorithm", "Protocol") if key in facts)
                text = f"{name} {nbytes} bytes {by or facts.get('Route', '')}".rstrip()
                domain.push_range(domain.get_event_attributes(message=text, payload=number))
                events.callback(domain.pop_range)


def _facts(ranks: tuple[int, ...], rank: int, calls: list[Made]) -> dict[str, Any]:
    """The keys of Kineto's NCCL events that depend on the group and the call, with NCCL's values."""
    first = calls[0]
    sizes = [_sizes(made, rank, len(ranks)) for made in calls]
    taken, given = first.splits or ([], [])
    name = _NAMES.get(first.collective, first.collective)
    facts = {
        "Collective name": name if len(calls) == 1 else flight_document.COALESCED.get(first.collective, name),
        "In msg nelems": sum(x for x, _ in sizes),
        "Out msg nelems": sum(y for _, y in sizes),
        "dtype": "Byte" if first.dtype is None else flight_document.torch_name(first.dtype),
        "In split size": str(list(taken)),
        "Out split size": str(list(given)),
        "Rank": first.root if first.root >= 0 else rank,  # as in NCCL: the rank of the root, or of a message's peer
        **_of_group(ranks),
    }
    if first.collective in collective_specs.MESSAGES and first.root >= 0:
        facts["Dst Rank" if first.collective == "send" else "Src Rank"] = ranks[first.root]
    if first.op != "none":
        facts["Op"] = first.op
    return facts


def _sizes(made: Made, rank: int, world_size: int) -> tuple[int, int]:
    """Elements of this rank's input and output."""
    if made.sizes:
        one, every = made.sizes[rank], sum(made.sizes)
        return (one, every) if made.collective == "all_gather_v" else (every, one)
    taken, given = flight_document.sizes(made, world_size)
    return sum(taken), sum(given)


@cache
def _of_group(ranks: tuple[int, ...]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "Group size": len(ranks),
        "Process Group Description": "tricomm",
        "Process Group Ranks": str(list(ranks)),
        "Global rank start": ranks[0],
    }
    strides = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(strides) == 1 and min(strides) > 0:
        facts["Global rank stride"] = strides.pop()
    return facts


def _asks_for_ranges() -> bool:
    try:
        return env.flag("TRICOMM_NVTX")
    except InvalidArgument as error:
        warn_once("nvtx", f"{error}; it counts as off")
        return False


@cache
def _domain() -> Any:
    """The NVTX domain of the ranges; None if the package is missing, which is logged."""
    try:
        import nvtx
    except ImportError as error:
        warn_once("nvtx", f"calls have no NVTX ranges ({error}); pip install 'tricomm[nvtx]'")
        return None
    return nvtx.get_domain("tricomm")
