"""A process group of torch between the ranks of an execution, for a program's set-up.

A call waits for the rank's current stream, exchanges the tensors between the hosts, and computes its result on the
host. So a kernel that any rank launched there before the call is ordered before a kernel that any rank launches after
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d

from tricomm.errors import InvalidArgument
from tricomm.explorer.standins.host import ProgramHost

# Their stubs differ between versions of torch.
dist: Any = torch.distributed
c10d: Any = distributed_c10d

_REDUCE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0, dtype=stack.dtype),
    dist.ReduceOp.AVG: lambda stack: stack.mean(0, dtype=stack.dtype),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
}

_NAME = "default"


class _Done(dist.Work):  # type: ignore[misc]
    """The work of a call that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SimulatedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """All ranks of an execution."""

    def __init__(self, host: ProgramHost) -> None:
        super().__init__(host.rank, host.world_size)
        self._host = host

    @property
    def group_name(self) -> str:
        return _NAME

    def getBackendName(self) -> str:
        return "nccl"

    def _all(self, what: str, tensors: Any) -> list[Any]:
        """Every rank's copy of `tensors`. Ranks that make another call, or bring other sizes, are refused by name."""
        with self._host.library():
            torch.cuda.current_stream().synchronize()  # the simulated GPU's
            copies = [t.detach().clone() for t in tensors]
            sizes = ", ".join(f"{t.dtype} {list(t.shape)}".replace("torch.", "") for t in copies)
            return self._host.exchange(f"{what}({sizes})", copies)

    def barrier(self, opts: Any = None) -> Any:
        self._all("barrier", ())
        return _Done()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        reduce = _reduction(opts)
        for part, tensor in zip(zip(*self._all("all_reduce", tensors), strict=True), tensors, strict=True):
            self._write(tensor, reduce(torch.stack(part)))
        return _Done()

    def reduce(self, tensors: Any, opts: Any) -> Any:
        given = self._all(f"reduce to rank {opts.rootRank}", tensors)
        if opts.rootRank == self._host.rank:
            self._write(tensors[0], _reduction(opts)(torch.stack([theirs[0] for theirs in given])))
        return _Done()

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        for source, tensor in zip(
            self._all(f"broadcast from rank {opts.rootRank}", tensors)[opts.rootRank], tensors, strict=True
        ):
            self._write(tensor, source)
        return _Done()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for theirs, output in zip(self._all("all_gather", inputs), outputs[0], strict=True):
            self._write(output, theirs[0])
        return _Done()

    def _allgather_base(self, output: Any, mine: Any, opts: Any = None) -> Any:
        given = self._all("all_gather_into_tensor", [mine])
        self._write(output.view(-1), torch.cat([theirs[0].reshape(-1) for theirs in given]))
        return _Done()

    def _reduce_scatter_base(self, output: Any, mine: Any, opts: Any = None) -> Any:
        given = self._all("reduce_scatter_tensor", [mine])
        whole = _reduction(opts)(torch.stack([theirs[0].reshape(-1) for theirs in given]))
        self._write(output.view(-1), whole.chunk(self._host.world_size)[self._host.rank])
        return _Done()

    def alltoall_base(self, output: Any, mine: Any, output_sizes: Any, input_sizes: Any, opts: Any = None) -> Any:
        if output_sizes or input_sizes:
            raise InvalidArgument("all_to_all_single with split sizes is not simulated; with equal splits it is")
        given = self._all("all_to_all_single", [mine])
        self._write(output, torch.cat([theirs[0].chunk(self._host.world_size)[self._host.rank] for theirs in given]))
        return _Done()

    # The names from torch 2.13 on
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def _write(self, output: torch.Tensor, value: torch.Tensor) -> None:
        with self._host.library():
            output.copy_(value)


def _reduction(opts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    op = dist.ReduceOp.SUM if opts is None else getattr(opts.reduceOp, "op", opts.reduceOp)
    if op not in _REDUCE:
        raise InvalidArgument(f"torch.distributed: {op} is not simulated; sum, avg, product, max and min are")
    return _REDUCE[op]


def _init(host: ProgramHost) -> Callable[..., None]:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        size, rank = kwargs.get("world_size", -1), kwargs.get("rank", -1)
        if size not in (-1, host.world_size) or rank not in (-1, host.rank):
            raise InvalidArgument(
                f"init_process_group(rank={rank}, world_size={size}) on rank {host.rank} of {host.world_size}"
            )
        if host.group is None:
            start(host)

    return init_process_group


def start(host: ProgramHost) -> None:
    """Make the default group of a rank."""
    host.group = group = SimulatedGroup(host)
    c10d._world.pg_map[group] = ("nccl", None)
    c10d._world.pg_names[group] = _NAME
    c10d._world.pg_group_ranks[group] = {r: r for r in range(host.world_size)}
    c10d._world.default_pg = group


def _destroy(host: ProgramHost) -> Callable[..., None]:
    return lambda group=None: leave(host)


def leave(host: ProgramHost) -> None:
    """Remove the group of a rank from torch's tables."""
    group, host.group, c10d._world.default_pg = host.group, None, None
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        table.pop(group, None)


def _refused(name: str) -> Callable[[ProgramHost], Callable[..., Any]]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidArgument(f"torch.distributed.{name} is not simulated; the default group of all ranks is")

    return lambda host: refuse


def patches() -> Mapping[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]]:
    """torch.distributed's functions that make and end groups."""
    own: dict[str, Callable[[ProgramHost], Callable[..., Any]]] = {
        "init_process_group": _init,
        "destroy_process_group": _destroy,
        "new_group": _refused("new_group"),
    }
    return {(module, name): function for name, function in own.items() for module in (dist, c10d)}
