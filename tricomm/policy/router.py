"""The router of a group: the backend of each of its calls, decided once and logged."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import env
from tricomm.metrics.counters import KERNELS
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import REDUCTIONS, BackendChoice, GroupFacts

_MOST_ROUTES = 4096


class Router:
    """Routes the calls of the group `name`, of which this process is `rank`.

    A `torch.distributed` group and a group of an inference engine share theirs with the communicator of their kernels.
    `fallback` renames the fallback in routes. `alone`: no computation runs during the calls, so that NVLS's larger
    threshold holds.
    """

    def __init__(
        self, facts: GroupFacts, name: str, rank: int, fallback: str | None = None, alone: bool = True
    ) -> None:
        self._facts, self._name, self._fallback, self.alone = facts, name, fallback, alone
        self._logs = env.logs_routing() and rank == 0
        self._logged: set[tuple[Any, ...]] = set()
        self._routes: dict[tuple[Any, ...], BackendChoice] = {}

    @property
    def facts(self) -> GroupFacts:
        """The facts that the ranks agreed on. Setting others drops all routes."""
        return self._facts

    @facts.setter
    def facts(self, facts: GroupFacts) -> None:
        self._facts = facts
        self._routes.clear()

    def choice(
        self, collective: str, dtype: torch.dtype | None, op: str, nbytes: int | None, forced: bool = False
    ) -> BackendChoice:
        """As `backend_choice.decide` of the group's facts, without a log entry."""
        key = collective, dtype, op, nbytes, forced
        route = self._routes.get(key)
        if route is None:
            route = backend_choice.decide(self._facts, *key)
            if self._fallback is not None and route.backend == self._facts.fallback:
                route = BackendChoice(self._fallback, route.reason)
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[key] = route
        return route

    def route(
        self,
        collective: str,
        dtype: torch.dtype | None,
        op: str,
        nbytes: int | None,
        forced: bool = False,
        name: str | None = None,
    ) -> BackendChoice:
        """The backend of a call that is made now. `log` prints it, of the kernels' calls when their kernel is known."""
        route = self.choice(collective, dtype, op, nbytes, forced)
        if route.backend != KERNELS:
            self.log(route, (collective, dtype, op, nbytes), name)
        return route

    def log(
        self, route: BackendChoice, call: tuple[str, torch.dtype | None, str, int | None], name: str | None = None
    ) -> None:
        """With TRICOMM_LOG=routing rank 0 prints each distinct route, of the collective as `name`, if there is one."""
        if not self._logs or (route, call, name) in self._logged:
            return
        self._logged.add((route, call, name))
        collective, dtype, op, nbytes = call
        size = "" if nbytes is None else f" {nbytes} B"
        what = f"{collective} {op}" if collective in REDUCTIONS and not name else name or collective
        kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
        print(f"tricomm routing: {self._name}: {what}{kind}{size} -> {route.backend}: {route.reason}", flush=True)
