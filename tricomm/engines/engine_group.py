"""One group of an inference engine over tricomm: which of its calls go to the kernels, and the communicator for them.

The decision depends on facts that all ranks share (collective, dtype and bytes of a call, and the group's settings), so
all ranks make the same decision. The engine runs the calls that the kernels do not.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import env
from tricomm.c10d.capabilities import exchange_capabilities, options_for
from tricomm.communicator import Communicator
from tricomm.core import bootstrap
from tricomm.core.fused.fused_call import FUSED, Epilogue
from tricomm.core.launch_plan import Request
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.metrics.counters import KERNELS, NCCL
from tricomm.options import Options, with_environment
from tricomm.policy import backend_choice
from tricomm.policy.backend_choice import GroupFacts, Router
from tricomm.store.bounded_store import first_line

# Engines make their groups at the same point of their start, so a rank that is later than this has failed.
MEETING_SECONDS = 60.0
_ALIGNMENT = 16
_NORMED = (torch.float32, torch.float16, torch.bfloat16)
_SUSPENDED = "it is suspended"
_LEFT = "tricomm: %s: every call is left to %s: %s"
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_ANY_SIZE = 1 << 62
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Engine:
    """An engine: its `name`, the `log` that its users see, whether they ask for batch-invariant reductions, and which
    collectives its adapter offers."""

    name: str
    log: logging.Logger
    invariant: bool = False
    collectives: tuple[str, ...] = _COLLECTIVES


@dataclass(frozen=True)
class Seat:
    """This rank's place in a group: `store` is used by this group alone, and `name` is the engine's name of the
    group."""

    store: Store
    rank: int
    world_size: int
    device: torch.device
    name: str


def open_group(group: Any, device: torch.device, name: str, engine: Engine) -> EngineGroup:
    """A group of the same ranks as `group`, a process group of torch.distributed; every rank calls it.

    If tricomm cannot be set up on one rank, no rank uses it: `EngineGroup.why_not` and the engine's log say why.
    """
    known = distributed_c10d._world.pg_map.get(group)
    if known is None or known[1] is None:
        return without(
            name, engine, "torch.distributed did not make this group, so its ranks have no store to meet over"
        )
    count = _counts[group] = _counts.get(group, 0) + 1
    store = PrefixStore(f"tricomm/{engine.name}/{name}/{count}", known[1])
    return EngineGroup(Seat(store, group.rank(), group.size(), device, name), engine)


def without(name: str, engine: Engine, why: str, level: int = logging.WARNING) -> EngineGroup:
    """A group that leaves every call to the engine; logs the reason."""
    group = EngineGroup(None, engine, f"group {name!r}", why)
    engine.log.log(level, _LEFT, f"group {name!r}", engine.name, why)
    return group


class EngineGroup:
    """One group of an engine, for its adapter; made by `open_group`.

    Collectives are out of place; make only calls that `takes` has accepted. They raise `InvalidArgument` if this group
    does not use tricomm.
    """

    def __init__(self, seat: Seat | None, engine: Engine, text: str = "", why: str = "") -> None:
        self._seat, self._engine, self._opened = seat, engine, 0
        self._text = f"group {seat.name!r}, rank {seat.rank} of {seat.world_size}" if seat is not None else text
        self._router: Router | None = None
        self._limit: int | None = None
        self._captured = self._warned = False
        self.comm: Communicator | None = None
        self.why_not = why
        if seat is not None:
            self._open(seat)

    # Setting up

    def _open(self, seat: Seat) -> None:
        self._opened += 1
        try:
            self._router, self.comm = self._join(seat)
            self.why_not = ""
        except Exception as error:  # the engine can run without tricomm, whatever the error
            self.why_not = first_line(error)
        self._say()

    def _join(self, seat: Seat) -> tuple[Router, Communicator]:
        """Meet the other ranks; raises on all of them if one cannot use tricomm."""

        def settings() -> Options:
            self._limit = max_bytes()
            return with_environment(None)

        store = PrefixStore(str(self._opened), seat.store)
        agreed = exchange_capabilities(store, seat.rank, seat.world_size, MEETING_SECONDS, settings)
        invariant = agreed.batch_invariant
        why = f"the group spans {agreed.nodes} nodes" if agreed.nodes > 1 else agreed.no_kernels[seat.device.type]
        if why is not None:
            raise ResourceError(why)
        options = options_for(None, timedelta(seconds=Options.timeout), seat.device.type)
        most = _ANY_SIZE if invariant or self._engine.invariant else self._limit
        facts = GroupFacts(seat.device.type, seat.world_size, 1, None, NCCL, batch_invariant=invariant, most_bytes=most)
        router = Router(facts, seat.name, seat.rank, self._engine.name)
        options = replace(options, batch_invariant=invariant or self._engine.invariant, wire=agreed.wire)
        terms = bootstrap.terms(seat.rank, seat.world_size, seat.device, None, options, MEETING_SECONDS)
        comm = Communicator._behind(PrefixStore("kernels", store), replace(terms, router=router))
        try:
            self._compare(comm)
        except BaseException:
            comm.close()
            raise
        return router, comm

    def _compare(self, comm: Communicator) -> None:
        """Raises `InvalidArgument` on all ranks if their settings would let them decide differently."""
        own = f"TRICOMM_ENGINE_MAX_BYTES={self._limit}, batch-invariant {self._engine.invariant}"
        comm._internal.group.control.require_equal(own, "the engine's settings", MEETING_SECONDS)

    def _say(self) -> None:
        log, engine = self._engine.log, self._engine.name
        if self.comm is None:
            log.warning(_LEFT, self._text, engine, self.why_not)
        elif self.comm.rank == 0:
            sizes = [f"{collective} {self._up_to(collective)}" for collective in self._engine.collectives]
            log.info(
                "tricomm %s: %s on %s: %s go to tricomm's kernels%s, every other call is left to %s",
                "runs" if self._opened == 1 else "is back",
                self._text,
                self.comm.device,
                ", ".join(sizes),
                " (simulated)" if self.comm.simulated else "",
                engine,
            )

    def _up_to(self, collective: str) -> str:
        assert self._router is not None
        limit = backend_choice.threshold_of(self._router.facts, collective, torch.bfloat16, _op(collective))
        return "of any size" if limit in (None, _ANY_SIZE) else f"up to {limit} bytes"

    # Deciding

    def takes(self, collective: str, x: torch.Tensor, dim: int = 0) -> bool:
        """Whether the kernels run this call (all_gather and reduce_scatter: along `dim`); the same on all ranks.

        Raises `InvalidArgument` under TRICOMM_BATCH_INVARIANT for a reduction that they do not run.
        """
        comm = self.comm
        if comm is None or comm.suspended or x.device.type != comm.device.type:
            return False
        if collective != "all_reduce" and x.dim() == 0:
            return False
        if collective == "reduce_scatter" and x.shape[dim] % comm.world_size:
            return False
        return self._takes(comm, Request(collective, _op(collective)), x)

    def takes_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> bool:
        """Whether `all_reduce_rms_norm` takes this call, up to all_reduce's sizes; the same on all ranks."""
        comm = self.comm
        if comm is None or comm.suspended or x.device.type != comm.device.type or x.dim() == 0 or not x.numel():
            return False
        if x.dtype not in _NORMED or weight.dtype not in (x.dtype, torch.float32):
            return False
        epilogue = Epilogue(x.shape[-1], weight.dtype, eps)
        return self._takes(comm, Request("all_reduce", "sum", epilogue=epilogue), x)

    def _takes(self, comm: Communicator, request: Request, x: torch.Tensor) -> bool:
        assert self._router is not None
        collective = request.collective
        if self._router.route(collective, x.dtype, request.op or "none", x.nbytes).backend != KERNELS:
            return False
        if comm.gpu is None or not comm.gpu.capturing():
            return True
        rows = comm.world_size if collective == "reduce_scatter" else 1
        if not comm._internal.planner.may_capture(request, x.dtype, x.numel() // rows):
            return self._not_made(FUSED if request.epilogue is not None else collective, x)
        self._captured = True
        return True

    def _not_made(self, name: str, x: torch.Tensor) -> bool:
        """Returns False: a kernel cannot be compiled during a capture. All ranks have made the same calls, so all
        return False."""
        if not self._warned:
            self._warned = True
            self._engine.log.warning(
                "tricomm: %s: %s of %d elements of %s is captured without a call of that size before, and is left to "
                "%s, as others like it; warm up before the capture",
                self._text,
                name,
                x.numel(),
                x.dtype,
                self._engine.name,
            )
        return False

    # Collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, in a new contiguous tensor."""
        out: torch.Tensor = self._running.all_reduce(
            _packed(x), out=torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        return out

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm, new residual) of `Communicator.all_reduce_rms_norm`, in new tensors of x's shape."""
        normed: tuple[torch.Tensor, torch.Tensor] = self._running.all_reduce_rms_norm(
            _packed(x), _packed(residual), _packed(weight.detach()), eps
        )
        return normed

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Every rank's `x`, concatenated along `dim`, in a new contiguous tensor."""
        comm = self._running
        rows: torch.Tensor = comm.all_gather(_packed(x))
        return rows if dim % x.dim() == 0 else torch.cat(rows.chunk(comm.world_size), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part along `dim` of the sum of `x` over all ranks, in a new contiguous tensor."""
        part: torch.Tensor = self._running.reduce_scatter(_packed(x.movedim(dim, 0)))
        return part.movedim(0, dim).contiguous()

    @property
    def _running(self) -> Communicator:
        if self.comm is None:
            raise InvalidArgument(f"{self._text}: tricomm does not run here: {self.why_not}; ask takes() first")
        return self.comm

    # Graphs, sleep, the end

    def suspend(self) -> None:
        """Free tricomm's memory until `resume`; every rank calls it, between two calls. Until then the engine runs all
        calls. Idempotent.

        Addresses are kept, so captured CUDA graphs stay valid, but must not be replayed until then. Memory that cannot
        keep its addresses (`Communicator.suspend`) is freed with the communicator, or not at all if calls were
        captured.
        """
        comm = self.comm
        if comm is None or comm.suspended:
            return
        try:
            comm.suspend()
        except (InvalidArgument, ResourceError) as error:  # on all ranks
            if not self._captured:
                self.close(_SUSPENDED)
                return
            self._engine.log.warning(
                "tricomm: %s keeps its %d bytes during the suspension, because CUDA graphs hold their addresses: %s",
                self._text,
                comm.options.arena_bytes,
                first_line(error),
            )

    def resume(self) -> None:
        """Allocate memory again after `suspend`, or set tricomm up again; every rank calls it. Idempotent.

        Raises `ResourceError` on all ranks if memory is refused and captured CUDA graphs need it; the group stays
        suspended then, and `resume` may be called again.
        """
        comm = self.comm
        if comm is not None and comm.suspended:
            try:
                comm.resume()
            except ResourceError as error:
                if self._captured:
                    raise
                self.close(first_line(error))
                self._say()
                return
        elif self._seat is not None and self.why_not == _SUSPENDED:
            self._open(self._seat)

    def close(self, why: str = "it is closed") -> None:
        """Leave the group; later calls are left to the engine. Idempotent."""
        comm, self.comm = self.comm, None
        if comm is not None:
            self.why_not = why
            comm.close()


def max_bytes() -> int | None:
    """TRICOMM_ENGINE_MAX_BYTES: the largest input per rank of a call in the kernels; None: the tables decide.

    Raises `InvalidArgument` for anything but a number of bytes.
    """
    limit = env.integer("TRICOMM_ENGINE_MAX_BYTES")
    if limit is not None and limit < 0:
        raise InvalidArgument(f"TRICOMM_ENGINE_MAX_BYTES={limit}: a number of bytes, 0 or more, is needed")
    return limit


def _packed(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous and aligned: a captured call uses the plan of the call before it, which depends on alignment."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _op(collective: str) -> str:
    return "none" if collective == "all_gather" else "sum"
