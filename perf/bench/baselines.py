"""Other implementations of the collectives, for the same ranks: NCCL, Gloo, torch's symmetric memory, Kraken.

All ranks make an `Implementation` together, for one call. It raises `Unavailable` if the library or this machine cannot
make that call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import Communicator, env
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.bench import check_data, collective_calls, fused_bench
from tricomm.perf.bench.collective_calls import TORCH_IN_PLACE, Unavailable

MULTI_RANK_NCCL = (2, 30)  # the first version that accepts several ranks on one device (NCCL_MULTI_RANK_GPU_ENABLE=1)
KRAKEN = "github.com/meta-pytorch/kraken"
# Not for ranks with a GPU each: torch disables multicast if devices may overlap.
_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_SYMM_MEM = ("one_shot", "two_shot", "multimem")
_KRAKEN = ("one_shot", "two_shot")


@dataclass
class BenchContext:
    """The groups of one rank. The libraries use torch's default group; `host` is for messages about the measurement.

    Both are Gloo groups of the communicator's ranks.
    """

    comm: Communicator
    host: Any
    one_gpu: bool
    nccl: Any = None

    def sync(self) -> None:
        """Wait for everything on this rank's device."""
        if not self.comm.simulated:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class ComparedCall:
    """One collective with `count` elements a row; `root` is used only if the collective has one."""

    context: BenchContext
    collective: str
    dtype: torch.dtype
    count: int
    root: int = 0

    @property
    def rows_in(self) -> int:
        return COLLECTIVES[self.collective].rows_in(self.context.comm.world_size)

    @property
    def rows_out(self) -> int:
        return COLLECTIVES[self.collective].rows_out(self.context.comm.world_size)

    @property
    def gets(self) -> bool:
        """True if this rank has a result."""
        return check_data.gets(self.collective, self.context.comm.world_size, self.context.comm.rank, self.number(0))

    def number(self, trial: int) -> int:
        """The number of the call that has this root and the data of trial `trial` (see `check_data`)."""
        return self.root + trial * self.context.comm.world_size

    def empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows * self.count, dtype=self.dtype, device=self.context.comm.device)


@dataclass(frozen=True)
class Implementation:
    """`load` copies a rank's data to the input; `run` makes the call and returns the result, or None."""

    load: Callable[[torch.Tensor], Any]
    run: Callable[[], torch.Tensor | None]


Make = Callable[[ComparedCall], Implementation]


class Baselines:
    """The libraries that a benchmark compares with; all ranks make torch's groups together at the first call."""

    def __init__(self, comm: Communicator, store: Store) -> None:
        self._comm, self._store = comm, store
        self._context: BenchContext | None = None

    def offered(self, library: str, collective: str) -> dict[str, Make]:
        """Implementations of `library` by name; if none is available here, one that raises `Unavailable`."""
        refused = why_not(library, self._comm.simulated)
        if refused is not None:
            return _none(refused)
        return of_library(library, collective) or _none(f"{library}: its all_reduce alone is compared")

    def make(self, how: Make, collective: str, dtype: torch.dtype, count: int) -> Implementation:
        """Ready to be called, with rank 0 as the root. Raises `Unavailable`."""
        return how(ComparedCall(self._joined(), collective, dtype, count))

    def offered_fused(self, library: str) -> dict[str, Any]:
        """The forms of an all_reduce_rms_norm by `library`, as `fused_bench.offered` names them."""
        if library != fused_bench.UNFUSED:
            refused = self.offered(library, "all_reduce")
            if "none" in refused:
                return refused
        return fused_bench.offered(library) or _none(f"{library}: it has no all_reduce to put a norm behind")

    def group_of(self, library: str) -> Any:
        """torch's group for `library`. Raises `Unavailable`."""
        context = self._joined()
        return _nccl_group(context) if library == "nccl" else context.host

    def close(self) -> None:
        """Destroy torch's groups, if there are any."""
        if self._context is not None:
            dist.destroy_process_group()

    def _joined(self) -> BenchContext:
        if self._context is None:
            comm = self._comm
            store = PrefixStore("tricomm-others", self._store)
            dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
            one_gpu = not comm.simulated and torch.cuda.device_count() < comm.world_size
            for name, value in _ONE_GPU.items() if one_gpu else ():
                env.default(name, value)
            self._context = BenchContext(comm, dist.group.WORLD, one_gpu)
        return self._context


def why_not(library: str, simulated: bool) -> str | None:
    """The reason why `library` cannot be compared with ranks of this kind (`simulated`: on a CPU); None if it can."""
    if (library == "gloo") == simulated:
        return None
    where, other = ("on a CPU", "gloo") if simulated else ("on GPUs", "nccl")
    return f"{library}: these ranks run {where}; {other} is what to compare with there"


def _none(why: str) -> dict[str, Make]:
    def refused(*call: Any) -> Implementation:
        raise Unavailable(why)

    return {"none": refused}


def of_library(library: str, collective: str) -> dict[str, Make]:
    """Implementations of `collective` by name; none if the library does not have it."""
    if library in ("gloo", "nccl"):
        return {library: gloo if library == "gloo" else nccl}
    if collective != "all_reduce":
        return {}
    if library == "symm_mem":
        return {f"symm_mem_{op}": partial(symm_mem, op=op) for op in _SYMM_MEM}
    return {f"kraken_{op}": partial(kraken, op=op) for op in _KRAKEN}


def ours(call: ComparedCall, kernel: Kernel | None) -> Implementation:
    """tricomm's call, by `kernel` if that is given."""
    comm = call.context.comm
    x, y = collective_calls.tensors(comm, call.collective, call.count, call.dtype, kernel)
    return Implementation(
        _filling(collective_calls.local(x), y),
        lambda: collective_calls.call(comm, call.collective, call.number(0), x, y, kernel),
    )


def gloo(call: ComparedCall) -> Implementation:
    """The default group's call."""
    return _of_torch(call, None)


def nccl(call: ComparedCall) -> Implementation:
    """The call of torch's NCCL backend."""
    return _of_torch(call, _nccl_group(call.context))


def _nccl_group(context: BenchContext) -> Any:
    missing = no_nccl(context.one_gpu)
    if missing is not None:
        raise Unavailable(missing)
    if context.nccl is None:
        context.nccl = dist.new_group(backend="nccl")
    return context.nccl


def no_nccl(one_gpu: bool) -> str | None:
    """The reason why NCCL cannot be compared here, or None."""
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    version = torch.cuda.nccl.version()
    if one_gpu and version[:2] < MULTI_RANK_NCCL:
        least = ".".join(map(str, MULTI_RANK_NCCL))
        return f"NCCL is {'.'.join(map(str, version))}; several ranks on one device need {least} or newer"
    return None


def _of_torch(call: ComparedCall, group: Any) -> Implementation:
    y = call.empty(call.rows_out)
    x = y if call.collective in TORCH_IN_PLACE else call.empty(call.rows_in)
    run = collective_calls.torch_call(call.context.comm, call.collective, call.root, x, y, group)
    result = y if call.gets and call.collective != "barrier" else None
    return Implementation(_filling(x, y), lambda: (run(), result)[1])


def symm_mem(call: ComparedCall, op: str) -> Implementation:
    """torch.ops.symm_mem. Its input is already in symmetric memory, so it saves the copy of a plain tensor."""
    ops, name = torch.ops.symm_mem, _world().group_name
    x, handle = _shared(call)
    if op == "one_shot":
        y = call.empty(1)
        return Implementation(_filling(x, y), lambda: ops.one_shot_all_reduce_out(x, "sum", name, y))
    if op == "two_shot":
        return Implementation(x.copy_, lambda: ops.two_shot_all_reduce_(x, "sum", name))
    if not handle.multicast_ptr:
        why = "which torch leaves out if ranks share a device" if call.context.one_gpu else "which this box lacks"
        raise Unavailable(f"multimem needs a multicast address, {why}")
    return Implementation(x.copy_, lambda: ops.multimem_all_reduce_(x, "sum", name))


def kraken(call: ComparedCall, op: str) -> Implementation:
    """Kraken's Triton kernels, if PYTHONPATH has a checkout."""
    try:
        run = getattr(importlib.import_module("kraken").comm, f"{op}_all_reduce")
    except ImportError as error:
        raise Unavailable(f"kraken: PYTHONPATH has no checkout of {KRAKEN}: {error}") from None
    x, _ = _shared(call)
    return Implementation(x.copy_, lambda: run(x))


def _shared(call: ComparedCall) -> tuple[torch.Tensor, Any]:
    """A tensor in torch's symmetric memory that all ranks know, and its handle."""
    x = symmetric_memory.empty(call.count, dtype=call.dtype, device=call.context.comm.device)
    return x, symmetric_memory.rendezvous(x, _world())


def _world() -> Any:
    return dist.group.WORLD


def _filling(x: torch.Tensor, y: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Copies a rank's data to `x` and poisons `y`; the two may be the same tensor."""

    def load(data: torch.Tensor) -> None:
        check_data.poison(y)
        x.copy_(data)

    return load
