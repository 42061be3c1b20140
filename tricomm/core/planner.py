"""The plan of a call: who runs it, by which kernel, bound to its shape; made once, and found again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tricomm import arguments
from tricomm.core import launch_plan, nccl, nccl_plan
from tricomm.core.entry_guard import guarded
from tricomm.core.group import Group
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels import collective_specs, layout
from tricomm.metrics import routes
from tricomm.metrics.counters import weight
from tricomm.policy import backend_choice, selection
from tricomm.store.process import forks

_MOST_PLANS = 1024
_STATUS, _ABORT = layout.STATUS, layout.ABORT
_UNKNOWN = 1 << 62  # bytes: a size that only the table's last row takes


class Planning(Group):
    """A group that knows the plan of every call that it has made."""

    def known(self, op: str, dtype: torch.dtype, count: int) -> launch_plan.Known | None:
        """What `repeat` takes for an all_reduce in place that has been made; None before its first call."""
        return self._known.get((op, dtype, count, None, None))

    @guarded
    def repeat(self, known: launch_plan.Known, x: torch.Tensor) -> bool:
        """Make an all_reduce in place again; False, with nothing done, where `x` needs a closer look than this."""
        return self._repeat(known, x)

    def _repeat(self, known: launch_plan.Known, x: torch.Tensor) -> bool:
        """Made for speed: what a call's shape decides is decided, and what only this tensor shows is looked at."""
        if not arguments.is_plain(x, self.device, known.itemsize, known.nbytes):
            return False
        chosen = known.plans[x.data_ptr() % 16 == 0]
        if chosen is None or (gpu := self._gpu) is not None and gpu.capturing():
            return False
        flags = self._flags  # a look at what `_usable` looks at first, without another call
        if flags[_STATUS] or flags[_ABORT] or self._closed or forks() != self._forks:
            self._usable()
        self._launch(chosen, x, x)
        return True

    def _run(
        self, collective: str, op: str, x: torch.Tensor, y: torch.Tensor, count: int, algorithm: str | None,
        protocol: str | None, root: int = -1, symmetric: tuple[str, torch.Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        """`count` elements a row, of input or output; `symmetric` is of a handle: algorithm, table, number."""
        aligned = (x.data_ptr() | y.data_ptr()) % 16 == 0
        if collective != "all_reduce":  # rows may begin anywhere
            aligned = aligned and count * x.itemsize % 16 == 0
        chosen = self._plan(collective, op, x.dtype, count, aligned, algorithm, protocol, root, symmetric)
        if not count:  # zero elements: nothing is launched and nothing is consumed, on any rank
            return
        if collective == "all_reduce" and x is y and symmetric is None and not x.is_complex():
            if len(self._known) >= _MOST_PLANS:
                self._known.clear()
            key = (op, x.dtype, count, algorithm, protocol)
            known = self._known.setdefault(key, launch_plan.Known(x.itemsize, count))
            if chosen.mode == "eager":
                known.plans[aligned] = chosen
        self._launch(chosen, x, y)

    def _plan(
        self, collective: str, op: str | None, dtype: torch.dtype | None, count: int, aligned: bool,
        algorithm: str | None, protocol: str | None, root: int = -1,
        symmetric: tuple[str, torch.Tensor, int] | None = None,
    ) -> launch_plan.Plan:  # fmt: skip
        capturing = self._gpu is not None and self._gpu.capturing()
        table = (symmetric[0], symmetric[1].data_ptr(), symmetric[2]) if symmetric is not None else None
        key = (collective, op, dtype, count, aligned, algorithm, protocol, root, table, capturing)
        try:
            found = self._plans[key]
        except (KeyError, TypeError):
            found = self._new_plan(key, symmetric)
        self._captured |= capturing
        return found

    def _new_plan(self, full: tuple[Any, ...], symmetric: tuple[str, torch.Tensor, int] | None) -> launch_plan.Plan:
        *key, capturing = full
        collective, op, dtype, count, aligned, algorithm, protocol, root, _ = key
        if not isinstance(algorithm, str | None) or not isinstance(protocol, str | None):
            raise InvalidArgument(f"algorithm={algorithm!r}, protocol={protocol!r}: names or None are needed")
        if capturing:
            raise InvalidArgument(
                f"{collective}: run this call once before capture, so that its kernel is compiled and loaded"
            )
        form = collective_specs.COLLECTIVES[collective]
        nbytes = None  # of uneven rows each rank has its own, in every call others
        if not form.uneven:
            nbytes = form.rows_in(self.world_size) * count * dtype.itemsize if dtype is not None else 0
        forced = algorithm is not None or protocol is not None or symmetric is not None
        route = self._route(collective, op, dtype, nbytes, forced)
        fitting, table, handle = symmetric or (None, None, 0)
        kind = arguments.DTYPES.get(dtype) if dtype is not None else None
        asked = launch_plan.Asked(collective, op, kind, count, root, table, handle)
        counter = routes.counter(route.backend, collective) if self.counted else None
        bits = kind.bits if kind is not None else 32
        bind = partial(self._runtime.bind, group=self._group, timeout=self._timeout)
        for mode in ("eager",) if self.simulated else ("eager", "graph"):
            if route.backend == backend_choice.NCCL:
                assert self._nccl is not None, "the route is taken where NCCL is there"
                found = nccl_plan.make(self._nccl, self._monitor, self._gpu, route.reason, asked, dtype, mode, counter)
            else:
                known = _UNKNOWN if nbytes is None else nbytes
                choice = selection.choose(self._site, collective, known, algorithm, protocol, mode, fitting, bits)
                found = launch_plan.make(self._site, choice, asked, aligned, mode, bind, counter)
            found = self._counted(found, nbytes, mode)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[*key, mode == "graph"] = found
        if self.counted:
            backend_choice.log_once(route, self.group, self.rank, collective, dtype, op or "none", nbytes)
        return self._plans[*key, False]

    def _counted(self, made: launch_plan.Plan, nbytes: int | None, mode: str) -> launch_plan.Plan:
        """The plan with the tally that its calls go to, and timed if that was asked for."""
        activity, run = self._activity, made.run
        kernel = (made.choice.collective, made.choice.algorithm, made.choice.protocol)
        clock = activity.clock if mode == "eager" else None  # what is captured would be timed when it is captured
        if nbytes is None:
            return replace(made, run=activity.sized(run, kernel, clock))
        tally = activity.tally(*kernel, nbytes)
        if clock is not None:
            took, name = tally.took, (*kernel, nbytes)
            run = clock.timed(run, lambda x: (took, name))
        return replace(made, run=run, tally=tally, weight=weight(nbytes))

    def _forget(self) -> None:
        """Make the plans of calls anew."""
        for known in (self._plans, self._known):
            known.clear()

    def _route(
        self, collective: str, op: str | None, dtype: torch.dtype | None, nbytes: int | None, forced: bool
    ) -> backend_choice.BackendChoice:
        """Who runs the call, the same on all ranks. The first that goes to NCCL makes its communicator."""
        facts = (collective, dtype, op or "none", nbytes, forced)
        found = backend_choice.decide(self._routes, *facts)
        if found.backend == backend_choice.NCCL and self._nccl is None:
            if collective in backend_choice.REDUCTIONS and dtype is not None:
                nccl.check(collective, op or "none", dtype)
            self._open_nccl()
            found = backend_choice.decide(self._routes, *facts)
        return found

    def _open_nccl(self) -> None:
        """All ranks together, in the call that needs it: NCCL's communicator, or why there is none."""
        with self._my_turn(), self._or_give_up("NCCL"):
            try:
                self._nccl = nccl.open_nccl(self._control, self.device, self._timeout)
            except ResourceError as error:
                self._routes = replace(self._routes, fallback=None, missing=str(error))
                return
        self.watch(self._nccl)
