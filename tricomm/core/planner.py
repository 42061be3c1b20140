"""Makes the plan of a call once and keeps it: its backend, and its kernel bound to its shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tricomm import arguments, gone
from tricomm.core import launch_plan, machine_code, nccl
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_call import FUSED
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.symmetric import Symmetric
from tricomm.core.watch.monitor import Monitor
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.compiler import Compile
from tricomm.kernels.launch.kernel_launch import BoundKernel
from tricomm.metrics.counters import NCCL, Activity, weight
from tricomm.policy import selection
from tricomm.policy.backend_choice import REDUCTIONS, BackendChoice, Router
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import TunedTable

_MOST_PLANS = 1024
_NOT_NOW = (
    "Options(compile_after_set_up=False) refuses that in a call; prepare() compiles it before, and `tricomm compile` "
    "before the job"
)
UNKNOWN = 1 << 62  # bytes: a size that only the last row of a table includes


class Planner:
    """Makes and keeps the plans of one group's calls.

    site      the facts that selection needs
    bind      `Runtime.bind` for this group; aborts the group if the kernel cannot be loaded
    load      as `bind`, but may compile even with `compile_after_set_up=False`: for `prepare`, and for calls that
              cannot be prepared (messages, calls over symmetric handles)
    router    decides between the kernels and NCCL
    adapted   whether the router was given
    plans     by (request, dtype, elements, whether the tensors are aligned, whether the call is captured);
              `elements` are of a row
    prepared  calls of `core.calls` that were made and can be repeated
    nccl      NCCL's communicator, made by the first call that needs it
    observer  wraps each new plan to observe its calls, for the explorer

    Without a `router` the group makes one. With the router of `bootstrap.Terms`, only calls for the kernels are made
    here.
    """

    def __init__(
        self, group: Group, faults: Faults, launcher: Launcher, monitor: Monitor, activity: Activity,
        tuned: TunedTable | None, router: Router | None = None,
    ) -> None:  # fmt: skip
        self.site = SelectionFacts(
            group.device_class, group.world_size, group.layout, group.max_blocks, group.options._tuning.blocks,
            group.options._tuning.tile, topology=group.topology.kind if group.topology is not None else "",
            reachable=group.reachable, tuned=tuned.rows if tuned is not None else (),
            tuned_name=tuned.name if tuned is not None else "",
            batch_invariant=group.options.batch_invariant, beside=group.options.beside_compute,
            wire=group.options.wire or "",
            no_dependent_launch=group.no_dependent_launch,
            no_multicast=selection.why_not_multicast(group.device_class, group.arena.no_multicast),
        )  # fmt: skip
        if self.site.wire:
            selection.check_wire(self.site)
        switch = not (self.site.no_multicast or self.site.batch_invariant or self.site.beside)
        self.adapted = router is not None
        self.router = router or Router(group.routes, group.name, group.rank)
        wire = self.site.wire if selection.wire_from(self.site) is not None else ""
        self.router.facts = replace(
            self.router.facts, reachable=group.reachable, switch=switch and self.router.alone, wire=wire
        )
        self.plans: dict[tuple[Request, torch.dtype | None, int, bool, bool], LaunchPlan] = {}
        self.prepared: dict[Any, Any] = {}
        self.nccl: nccl.Nccl | None = None
        self.observer: Callable[[Request, LaunchPlan], LaunchPlan] | None = None
        self._group, self._faults, self._launcher, self._monitor = group, faults, launcher, monitor
        self._gpu, self._activity = group.gpu, activity
        self.load = partial(faults.loaded, partial(_compile_and_bind, group, machine_code.get))
        refused = partial(_compile_and_bind, group, partial(machine_code.get, refused=_NOT_NOW))
        self.bind = self.load if group.options.compile_after_set_up else partial(faults.loaded, refused)

    def plan(self, request: Request, dtype: torch.dtype | None, elements: int, aligned: bool) -> LaunchPlan:
        """The plan of a call of tensors of `dtype` with `elements` a row.

        `request` has neither `dtype` nor `elements`, so that only the first call of its kind makes a new request.
        `aligned` depends on this rank's tensors alone. Raises `InvalidArgument` if no kernel and no other backend
        supports the call, or if it is captured and new.
        """
        capturing = self._gpu is not None and self._gpu.capturing()
        try:
            plan = self.plans[request, dtype, elements, aligned, capturing]
        except (KeyError, TypeError):
            plan = self._new(request, request.sized(dtype, elements), aligned, capturing)
        self._launcher.captured |= capturing
        return plan

    def keep(self, key: Any, known: Any) -> None:
        """Keep a call, which has just been planned, in `prepared`."""
        if len(self.prepared) >= _MOST_PLANS:
            self.prepared.clear()
        self.prepared[key] = known

    def planned(self, request: Request, dtype: torch.dtype, elements: int, aligned: bool) -> list[LaunchPlan]:
        """The plans, one per mode, of a call that `plan` has planned."""
        entries = (self.plans.get((request, dtype, elements, aligned, mode)) for mode in (False, True))
        return [plan for plan in entries if plan is not None]

    def may_capture(self, request: Request, dtype: torch.dtype, elements: int) -> bool:
        """Whether such a call of aligned tensors has been made, so that a graph may contain it."""
        aligned = request.collective == "all_reduce" or elements * dtype.itemsize % 16 == 0
        return any(plan.mode == "graph" for plan in self.planned(request, dtype, elements, aligned))

    def forget(self) -> None:
        """Drop all plans; the next calls make new ones."""
        self.plans.clear()
        self.prepared.clear()

    def _new(self, asked: Request, request: Request, aligned: bool, capturing: bool) -> LaunchPlan:
        collective, group = request.collective, self._group
        if not isinstance(request.algorithm, str | None) or not isinstance(request.protocol, str | None):
            raise InvalidArgument(
                f"algorithm={request.algorithm!r}, protocol={request.protocol!r}: names or None are needed"
            )
        gone.refuse(f"algorithm={request.algorithm!r}")
        if capturing:
            raise InvalidArgument(
                f"{collective}: run this call once before capture, so that its kernel is compiled and loaded"
            )
        form, dtype = collective_specs.COLLECTIVES[collective], request.dtype
        nbytes = None  # uneven rows differ between ranks and calls
        if not form.uneven:
            nbytes = form.rows_in(group.world_size) * request.elements * dtype.itemsize if dtype is not None else 0
        route = self._route(request, nbytes)
        for mode in ("eager",) if group.simulated else ("eager", "graph"):
            plan = self._counted(self._bound(request, route, nbytes, aligned, mode), nbytes)
            if len(self.plans) >= _MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))
            key = (asked, dtype, request.elements, aligned, mode == "graph")
            self.plans[key] = plan if self.observer is None else self.observer(request, plan)
        return self.plans[asked, dtype, request.elements, aligned, False]

    def _bound(
        self, request: Request, route: BackendChoice, nbytes: int | None, aligned: bool, mode: str
    ) -> LaunchPlan:
        if route.backend == NCCL and self.nccl is not None:
            plan = nccl.plan(self.nccl, self._monitor, self._gpu, route.reason, request, mode)
            return replace(plan, choice=of_request(plan.choice, request, route.reason))
        choice = self.choice(request, UNKNOWN if nbytes is None else nbytes, mode)
        if mode == "eager":
            known = replace(route, reason=f"{choice.kernel}: {choice.reason}; {route.reason}")
            call = request.collective, request.dtype, request.op or "none", nbytes
            self.router.log(known, call, None if request.epilogue is None else FUSED)
        make = launch_plan.make_fused if choice.fused else launch_plan.make
        over_handles = request.handle is not None or request.into is not None
        return make(self.site, choice, request, aligned, mode, self.load if over_handles else self.bind)

    def choice(self, request: Request, nbytes: int, mode: str) -> Choice:
        """The kernel of a call that the kernels run; a fused one if one supports the request's epilogue."""
        return choose(replace(self.site, no_multicast=self.no_multicast(request)), request, nbytes, mode)

    def no_multicast(self, request: Request) -> str:
        """Why a call's memory has no multicast address; empty if it has one."""
        handles = [each for each in (request.handle, request.into) if isinstance(each, Symmetric)]
        return self.site.no_multicast or next((each.no_multicast for each in handles if each.no_multicast), "")

    def _counted(self, plan: LaunchPlan, nbytes: int | None) -> LaunchPlan:
        """The plan with the tally of its calls, and timed if `time_calls` is on."""
        activity, run, choice = self._activity, plan.run, plan.choice
        kernel = (choice.collective, choice.counted_as, choice.protocol)
        clock = activity.clock if plan.mode == "eager" else None  # a captured call would be timed only at its capture
        if nbytes is None:
            return replace(plan, run=activity.sized(run, kernel, clock))
        tally = activity.tally(*kernel, nbytes)
        if clock is not None:
            took, name = tally.took, (*kernel, nbytes)
            run = clock.timed(run, lambda x: (took, name))
        return replace(plan, run=run, tally=tally, weight=weight(nbytes))

    # The kernels or NCCL

    def _route(self, request: Request, nbytes: int | None) -> BackendChoice:
        """The backend that runs the call, the same on all ranks. The first call for NCCL makes its communicator."""
        facts = (request.collective, request.dtype, request.op or "none", nbytes, request.forced)
        if not self.adapted and self.nccl is None and self.router.choice(*facts).backend == NCCL:
            if request.collective in REDUCTIONS and request.dtype is not None:
                nccl.check(request.collective, request.op or "none", request.dtype)
            self._open_nccl()
        return self.router.route(*facts, name=None if request.epilogue is None else FUSED)

    def _open_nccl(self) -> None:
        """Make NCCL's communicator, or note why there is none. All ranks do this together, in the first call that needs
        it."""
        group = self._group
        with self._launcher.held(), self._faults.abort_on_error("NCCL"):
            try:
                self.nccl = nccl.open_nccl(group.control, group.device, group.timeout, group.options.max_blocks)
            except ResourceError as error:
                self.router.facts = replace(self.router.facts, fallback=None, missing=str(error))
                return
        self._monitor.watch(self.nccl)


def _compile_and_bind(
    group: Group, by: Compile, kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool,
    more: Sequence[int | torch.Tensor],
) -> BoundKernel:  # fmt: skip
    runtime = group.runtime
    runtime.compile(group.device, by, kernel, constexprs, bits, aligned)
    return runtime.bind(kernel, blocks, constexprs, bits, aligned, more, group.argument, group.timeout)


def choose(site: SelectionFacts, request: Request, nbytes: int, mode: str) -> Choice:
    """`Planner.choice`, with the facts of the call's memory in `site`."""
    why = ""
    if request.epilogue is not None:
        fused = launch_plan.choose_fused(site, request, mode)
        if isinstance(fused, Choice):
            return fused
        why = fused
    if request.op is not None and request.dtype in arguments.DTYPES:  # a switch supports only some types and operations
        dtype = arguments.DTYPES[request.dtype]
        site = selection.for_reduction(site, request.collective, dtype, request.op)
        wire = registry.wire_of(request.algorithm)
        if wire and request.collective == "all_reduce" and not selection.quantises(dtype, request.op):
            kind = f"{dtype.name} by {request.op}"
            raise InvalidArgument(
                f"{request.collective}: wire={wire!r} quantises sums and averages of fp16, bf16 and fp32, not {kind}; "
                "leave wire out"
            )
    choice = selection.choose(
        site, request.collective, nbytes, request.algorithm, request.protocol, mode, request.fitting,
        _bits(request.dtype),
    )  # fmt: skip
    return of_request(choice, request, why)


def of_request(choice: Choice, request: Request, why: str) -> Choice:
    """`choice` of an all-reduce; if `request` is an all_reduce_rms_norm, it is marked as not fused because of `why`."""
    return choice if request.epilogue is None else selection.unfused(FUSED, choice, why)


def _bits(dtype: torch.dtype | None) -> int:
    """The width of a type's integers in a kernel; 32 for an unknown type."""
    return arguments.DTYPES[dtype].bits if dtype in arguments.DTYPES else 32
