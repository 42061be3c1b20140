"""Selection, tuning tables, kernels and times of a communicator: its public methods."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tricomm import arguments, gone
from tricomm.core import dependent_launch, kernel_forms, nccl
from tricomm.core.calls.collectives import quantised
from tricomm.core.entry_guard import guarded
from tricomm.core.faults import Faults
from tricomm.core.fused import fused_call
from tricomm.core.fused.expert_rows import finalize_types
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, SCALE_LAYOUTS, Epilogue
from tricomm.core.group import Group
from tricomm.core.launch_plan import READ_IN_PLACE, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner, of_request
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives import registry
from tricomm.metrics.counters import NCCL, Activity
from tricomm.options import seconds
from tricomm.policy import selection
from tricomm.policy.backend_choice import POINT_TO_POINT
from tricomm.policy.selection import Choice
from tricomm.policy.tuning_tables import TableRow

_SWITCHED = frozenset(kernel.collective for kernel in registry.MULTICAST)


class TuningMethods:
    """Selection, tables, compilation in advance, times."""

    _group: Group
    _faults: Faults
    _launcher: Launcher
    _planner: Planner
    _activity: Activity

    @guarded
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for the calls on the current stream; raises the group's fault, or `CollectiveTimeout`.

        `timeout` is in seconds (default: the communicator's).
        """
        self._faults.check_usable()
        self._launcher.wait(self._group.timeout if timeout is None else seconds(timeout, "timeout"))

    @guarded
    def explain(
        self,
        collective: str,
        nbytes: int | Symmetric,
        dtype: torch.dtype | None = None,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        wire: str | None = None,
        mode: str = "eager",
        hidden: int | None = None,
        quantize: str | None = None,
        top_k: int | None = None,
        out: Symmetric | torch.Tensor | None = None,
    ) -> Choice:
        """The backend and the kernel of a call with `nbytes` bytes of input, and why. Pure: asks no other rank.

        `nbytes` is the input of one rank, of the root if there is one. `dtype` is float32 by default. `mode` is eager,
        or graph for a captured call. `hidden` and `quantize` are for an all_reduce_rms_norm, `top_k` for one whose rows
        are sums of experts' rows, `wire` for an all_reduce. A symmetric handle instead of `nbytes` means a call that
        reads it in place; `out` is the output if it is not that handle. Whether NCCL can be used is known only after
        the first call that needs it. Raises `InvalidArgument` for a bad argument.
        """
        handle = nbytes if isinstance(nbytes, Symmetric) else None
        if handle is not None:
            nbytes, dtype = handle.local.nbytes, handle.dtype
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise InvalidArgument(f"explain: nbytes={nbytes!r}: a number of bytes is needed")
        if mode not in ("eager", "graph"):
            raise InvalidArgument(f"explain: mode={mode!r}: eager or graph is needed")
        if not isinstance(dtype, torch.dtype | None):
            raise InvalidArgument(f"explain: dtype={dtype!r}: a torch.dtype or None is needed")
        gone.refuse(f"algorithm={algorithm!r}")
        if wire is not None:
            algorithm = _quantised("explain", collective, wire, algorithm)
        name = arguments.operation(op)
        request = Request(collective, name, algorithm, protocol)
        if collective == FUSED:
            collective, dtype = "all_reduce", torch.float32 if dtype is None else dtype
            epilogue = _epilogue("explain", hidden, quantize, top_k, dtype, nbytes)
            request = request._replace(collective=collective, epilogue=epilogue)
        form = collective_specs.find(collective)
        if handle is not None and request.collective in READ_IN_PLACE and request.epilogue is None:
            into = handle if out is None else out
            whole = into if collective == "all_reduce" and isinstance(into, Symmetric) else None
            request = request.over(handle, whole)
        request = request.sized(dtype, nbytes // dtype.itemsize if dtype is not None else 0)
        if collective in POINT_TO_POINT:  # only kernels, because all ranks together make NCCL's communicator
            return self._with_memory(self._planner.choice(request, nbytes, mode), request, mode)
        size = None if form.uneven else nbytes
        op_name = name if form.reduces else "none"
        request = request._replace(dtype=dtype or torch.float32) if collective == "all_reduce" else request
        route = self._planner.router.choice(collective, request.dtype, op_name, size, request.forced)
        if route.backend != NCCL:
            return self._with_memory(self._planner.choice(request, nbytes, mode), request, mode)
        if form.reduces and dtype is not None:
            nccl.check(collective, name, dtype)
        return of_request(selection.nccl(collective, route.reason), request, route.reason)

    def _with_memory(self, choice: Choice, request: Request, mode: str) -> Choice:
        """`choice` with the reasons for memory that is not of the default kind, for no dependent launch, and for no
        NVLS."""
        memory = self._group.arena.reason
        if self._group.suspended:
            memory = "suspended, so no call is possible before resume()"
        if self._group.unregistered:
            memory = f"{memory}{'; ' * bool(memory)}tensors are staged, because {self._group.unregistered}"
        if memory:
            choice = replace(choice, reason=f"{choice.reason}; memory: {memory}")
        if not self._group.simulated:
            why = dependent_launch.refusal(self._planner.site, choice.blocks)
            said = f"no dependent launch: {why}" if why else "a dependent launch"
            if not why and mode == "eager" and self._launcher.several:
                said += " after an event, because calls were made on several streams"
            choice = replace(choice, reason=f"{choice.reason}; {said}")
        why = self._planner.no_multicast(request)
        if why and choice.collective in _SWITCHED:
            choice = replace(choice, reason=f"{choice.reason}; not through a switch: {why}")
        return choice

    @guarded
    def prepare(
        self,
        collective: str,
        dtype: torch.dtype | None = None,
        op: Any = "sum",
        *,
        most_bytes: int | None = None,
        hidden: int | None = None,
        quantize: str | None = None,
        top_k: int | None = None,
        wire: str | None = None,
    ) -> int:
        """Compile and load the kernels that calls may use, before the first of these calls. Returns the number of
        kernels; 0 on a CPU. Asks no other rank.

        The arguments are those of `explain`. The calls have up to `most_bytes` of input (None: any size) and plain
        tensors; weights of experts are fp32 or of `dtype`. Raises `InvalidArgument` for a call that no kernel supports;
        `ResourceError` if a kernel cannot be compiled or loaded, and then the group is lost, as in a call.
        """
        self._faults.check_usable()
        if not isinstance(dtype, torch.dtype | None):
            raise InvalidArgument(f"prepare: dtype={dtype!r}: a torch.dtype or None is needed")
        if most_bytes is not None and (
            isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1
        ):
            raise InvalidArgument(f"prepare: most_bytes={most_bytes!r}: a number of bytes, or None, is needed")
        algorithm = None if wire is None else _quantised("prepare", collective, wire, None)
        request = Request(collective, arguments.operation(op), algorithm)
        if collective == FUSED:
            dtype = torch.float32 if dtype is None else dtype
            epilogue = _epilogue("prepare", hidden, quantize, top_k, dtype, 0)
            request = request._replace(collective="all_reduce", epilogue=epilogue)
        form = collective_specs.find(request.collective)
        if form.name not in collective_specs.COLLECTIVES:
            raise InvalidArgument(f"prepare: {collective} has arguments that are not known before the call")
        if not form.reduces:
            request = request._replace(op=None)
        if form.name != "barrier":
            request = request._replace(dtype=torch.float32 if dtype is None else dtype, elements=1)
        if (captured := self._group.captured("prepare")) is not None:
            raise captured
        planner = self._planner
        requests = [request]
        if isinstance(request.epilogue, Epilogue) and top_k and dtype is not None and dtype != torch.float32:
            other = request.epilogue._replace(experts=finalize_types(dtype, dtype))
            requests.append(request._replace(epilogue=other))
        found = [f for r in requests for f in kernel_forms.of_calls(planner.site, r, planner.choice, most_bytes)]
        if self._group.simulated or self._group.routes.no_kernels is not None:
            return 0
        for each in found:
            planner.load(*each)
        return len(found)

    @guarded
    def use_table(self, rows: Sequence[TableRow], name: str) -> None:
        """From now on select by `rows`, and by the shipped tables if no row fits. Called by all ranks together.

        For tuners. `explain` calls them `name`. Raises `InvalidArgument` for anything but rows, and on all ranks if
        their rows differ; then nothing has changed.
        """
        self._faults.check_usable()
        if not isinstance(rows, list | tuple) or not all(isinstance(row, TableRow) for row in rows):
            raise InvalidArgument(f"use_table: a list of TableRow is needed, not {rows!r:.200}")
        if not isinstance(name, str):
            raise InvalidArgument(f"use_table: name={name!r}: a name is needed")
        given, group, planner = tuple(rows), self._group, self._planner
        with self._launcher.held(), self._faults.abort_on_error("use_table"):
            digest = hashlib.sha256(repr((given, name)).encode()).hexdigest()
            group.control.require_equal(f"table {digest[:32]}", "use_table", group.timeout, abort_on_fault=True)
            planner.site = replace(planner.site, tuned=given, tuned_name=name)
            planner.forget()

    @guarded
    def time_calls(self, every: int) -> None:
        """Time every `every`th call of each shape from now on; 0: none. Each rank may have its own.

        On a GPU a call is timed by events on its stream, which take time to record and may prevent the overlap with
        neighbouring calls. Calls in a CUDA graph are not timed. Call this before the warm-up of a capture, because it
        drops all plans. Raises `InvalidArgument` for a negative number.
        """
        self._faults.check_usable()
        self._activity.time_calls(every)
        self._planner.forget()


def _epilogue(
    method: str, hidden: int | None, quantize: str | None, top_k: int | None, dtype: torch.dtype, nbytes: int
) -> Epilogue:
    """The epilogue of the calls to which `method` is applied; raises `InvalidArgument` for impossible rows."""
    if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1 or nbytes % (hidden * dtype.itemsize):
        raise InvalidArgument(f"{method}: hidden={hidden!r}: {nbytes} bytes of {dtype} have to be whole rows of it")
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise InvalidArgument(f"{method}: quantize={quantize!r}; there is {', '.join(QUANTIZATIONS)}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InvalidArgument(f"{method}: top_k={top_k!r}: 1 or more experts' rows for each row, or None")
    fused_call.check_row(hidden, quantize)
    layout = SCALE_LAYOUTS[0] if quantize == "nvfp4" else ""
    plain = Epilogue(hidden, dtype, 1e-6, norm=quantize is None, quantize=quantize, scale_layout=layout)
    return plain if top_k is None else plain._replace(experts=finalize_types(dtype), top_k=top_k)


def _quantised(what: str, collective: str, wire: Any, algorithm: Any) -> str:
    """The algorithm of an all_reduce with this `wire`; raises `InvalidArgument` for another collective."""
    if collective != "all_reduce":
        raise InvalidArgument(f"{what}: wire={wire!r} of {collective!r}: only an all_reduce has it; leave it out")
    return quantised(wire, algorithm)
