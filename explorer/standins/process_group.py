"""A stand-in for torch's process groups between the ranks of an execution, for a program's set-up.

A call waits for the rank's current stream, exchanges the tensors between the hosts, and computes its result on the
host. So the kernels that any rank launched on this stream before the call happen before the kernels that any rank
launches after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import device_mesh, distributed_c10d

from tricomm.errors import InvalidArgument
from tricomm.explorer.standins.host import ProgramHost

# The stubs of these differ between versions of torch.
dist: Any = torch.distributed
c10d: Any = distributed_c10d

_REDUCE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0, dtype=stack.dtype),
    dist.ReduceOp.AVG: lambda stack: stack.mean(0, dtype=stack.dtype),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
}


class _Done(dist.Work):  # type: ignore[misc]
    """The `Work` of a call, which is complete when the call returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    is_completed = synchronize = wait


class SimulatedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of the ranks `ranks`. `key` is its name on all ranks. No C++ code calls its methods, because a
    rank must not wait within torch's C++."""

    def __init__(self, host: ProgramHost, ranks: Sequence[int], name: str) -> None:
        super().__init__(ranks.index(host.rank), len(ranks))
        self._host, self.ranks, self.key = host, tuple(ranks), name

    @property
    def group_name(self) -> str:
        return self.key

    def getBackendName(self) -> str:
        return "nccl"

    def _all(self, what: str, tensors: Any, sized: bool = True) -> list[Any]:
        """Every rank's copy of `tensors`. Raises an error with the ranks' names if they make different calls, or give
        different sizes."""
        with self._host.library():
            if self._host.comm.gpu is not None:
                self._host.comm.gpu.stream().synchronize()
            copies = [t.detach().clone() for t in tensors]
            sizes = ", ".join(f"{t.dtype} {list(t.shape)}".replace("torch.", "") for t in copies) if sized else "..."
            return self._host.exchange(f"{what}({sizes})", copies, self.ranks, self.key)

    def barrier(self, opts: Any = None) -> Any:
        self._all("barrier", ())
        return _Done()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        reduce, tensors = _reduction(opts), _listed(tensors)
        for part, tensor in zip(zip(*self._all("all_reduce", tensors), strict=True), tensors, strict=True):
            self._write(tensor, reduce(torch.stack(part)))
        return _Done()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any, op: Any = None) -> Any:
        tensors, root = _listed(tensors), _root(opts)
        given = self._all(f"reduce to rank {root}", tensors)
        if root == self.rank():
            self._write(tensors[0], _reduction(op or opts)(torch.stack([theirs[0] for theirs in given])))
        return _Done()

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        tensors, root = _listed(tensors), _root(opts)
        for source, tensor in zip(self._all(f"broadcast from rank {root}", tensors)[root], tensors, strict=True):
            self._write(tensor, source)
        return _Done()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs = outputs if isinstance(outputs[0], torch.Tensor) else outputs[0]
        for theirs, output in zip(self._all("all_gather", _listed(inputs)), outputs, strict=True):
            self._write(output, theirs[0])
        return _Done()

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        given = self._all(f"gather to rank {_root(opts)}", _listed(inputs))
        for theirs, output in zip(given, outputs[0], strict=True) if _root(opts) == self.rank() else ():
            self._write(output, theirs[0])
        return _Done()

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        given = self._all(f"scatter from rank {_root(opts)}", inputs[0] if inputs else (), sized=False)
        self._write(outputs[0], given[_root(opts)][self.rank()])
        return _Done()

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        given = self._all("reduce_scatter", inputs[0])
        self._write(outputs[0], _reduction(opts)(torch.stack([theirs[self.rank()] for theirs in given])))
        return _Done()

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for theirs, output in zip(self._all("all_to_all", inputs, sized=False), outputs, strict=True):
            self._write(output, theirs[self.rank()])
        return _Done()

    def _allgather_base(self, output: Any, mine: Any, opts: Any = None) -> Any:
        given = self._all("all_gather_into_tensor", [mine])
        self._write(output.view(-1), torch.cat([theirs[0].reshape(-1) for theirs in given]))
        return _Done()

    def _reduce_scatter_base(self, output: Any, mine: Any, opts: Any = None) -> Any:
        given = self._all("reduce_scatter_tensor", [mine])
        whole = _reduction(opts)(torch.stack([theirs[0].reshape(-1) for theirs in given]))
        self._write(output.view(-1), whole.chunk(self.size())[self.rank()])
        return _Done()

    def alltoall_base(self, output: Any, mine: Any, output_sizes: Any, input_sizes: Any, opts: Any = None) -> Any:
        parts = mine.split(list(input_sizes)) if input_sizes else mine.chunk(self.size())
        given = [theirs[self.rank()] for theirs in self._all("all_to_all_single", parts, sized=False)]
        if [len(part) for part in given] != list(output_sizes or [len(part) for part in output.chunk(self.size())]):
            raise ValueError(f"all_to_all_single: {[len(part) for part in given]} rows arrive for {list(output.shape)}")
        self._write(output, torch.cat(given))
        return _Done()

    # The names from torch 2.13 on
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def _write(self, output: torch.Tensor, value: torch.Tensor) -> None:
        with self._host.library():
            if output.numel() != value.numel():
                raise ValueError(f"a tensor of {list(value.shape)} arrives for one of {list(output.shape)}")
            output.copy_(value.view(output.shape))


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidArgument(f"{name} of torch's process group is not simulated; use another call for the set-up")

    return refuse


_REFUSED = ("send", "recv", "recv_anysource", "monitored_barrier", "split_group", "merge_remote_group")
for _name in dir(dist.ProcessGroup):
    if "coalesc" in _name or _name in _REFUSED:
        if _name not in vars(SimulatedGroup):
            setattr(SimulatedGroup, _name, _refusing(_name))


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


def _reduction(opts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    op = getattr(op, "op", op)
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
    """Make the default process group of a rank."""
    host.group = c10d._world.default_pg = _made(host, range(host.world_size), _WORLD)


_WORLD = "0"


def _made(host: ProgramHost, ranks: Sequence[int], name: str) -> SimulatedGroup:
    group = SimulatedGroup(host, ranks, name)
    host.groups[name] = group
    c10d._world.pg_map[group] = ("nccl", None)
    c10d._world.pg_names[group] = name
    c10d._world.pg_group_ranks[group] = {r: n for n, r in enumerate(ranks)}
    return group


def _new_group(host: ProgramHost) -> Callable[..., Any]:
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        ranks = sorted(range(host.world_size) if ranks is None else ranks)
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(host.world_size)):
            raise ValueError(f"new_group({ranks}): different ranks from 0 to {host.world_size - 1} are needed")
        host.groups_made += 1
        if not kwargs.get("use_local_synchronization"):
            with host.library():
                host.exchange(f"new_group({ranks})", None, range(host.world_size), _WORLD)
        if host.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return _made(host, ranks, f"{host.groups_made} {ranks}")

    return new_group


def _resolved(host: ProgramHost) -> Callable[[str], Any]:
    return lambda name: host.groups[name]


def _destroy(host: ProgramHost) -> Callable[..., None]:
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is host.group:
            leave(host)
        else:
            _remove(host, group)

    return destroy_process_group


def leave(host: ProgramHost) -> None:
    """Remove the groups of a rank from torch's tables."""
    for group in list(host.groups.values()):
        _remove(host, group)
    host.group = c10d._world.default_pg = None


def _remove(host: ProgramHost, group: SimulatedGroup) -> None:
    host.groups.pop(group.key, None)
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        table.pop(group, None)


_CALLS = {kind: kind.__call__ for kind in (OpOverload, OpOverloadPacket)}
_NAMESPACES = ("symm_mem", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def _operator(host: ProgramHost) -> Callable[..., Any]:
    """Operators of torch.ops. Those that communicate are refused, because they would wait within torch's C++."""

    def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
        whole = operator.name() if isinstance(operator, OpOverload) else operator._qualified_op_name
        namespace, _, name = whole.partition("::")
        if namespace not in _NAMESPACES:
            return _CALLS[type(operator)](operator, *args, **kwargs)
        name = name.partition(".")[0]
        if namespace == "symm_mem" and name.startswith("stream_write_value32"):
            return host.symmetric.stream_write_value32(*args, **kwargs)
        if namespace != "_c10d_functional" or name not in _FUNCTIONAL or kwargs:
            raise InvalidArgument(f"torch.ops.{namespace}.{name} is not simulated; kernels and calls of the group are")
        x, *given = args
        with host.library():
            return _FUNCTIONAL[name](host.groups.get(given[-1], host.group) if given else None, x, *given[:-1])

    return call


def _filled(output: torch.Tensor, call: Callable[..., Any], *given: Any) -> torch.Tensor:
    call(output, *given)
    return output


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


_FUNCTIONAL: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("wait_tensor", "_wrap_tensor_autograd"), lambda group, x: x),
    "all_reduce": lambda group, x, op: _filled(x.clone(), group.allreduce, _op(op)),
    "broadcast": lambda group, x, root: _filled(x.clone(), group.broadcast, root),
    "all_gather_into_tensor": lambda group, x, size: _filled(
        x.new_empty((len(x) * size, *x.shape[1:])), group._allgather_base, x
    ),
    "reduce_scatter_tensor": lambda group, x, op, size: _filled(
        x.new_empty((len(x) // size, *x.shape[1:])), group._reduce_scatter_base, x, _op(op)
    ),
}


def patches() -> Mapping[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]]:
    """Patches of torch.distributed's functions that make and end groups, and of its operators."""
    own: dict[str, Callable[[ProgramHost], Callable[..., Any]]] = {
        "init_process_group": _init,
        "destroy_process_group": _destroy,
    }
    table = {(module, name): function for name, function in own.items() for module in (dist, c10d)}
    table |= {(module, "_resolve_process_group"): _resolved for module in (c10d, device_mesh)}
    table[c10d, "_new_group_with_tag"] = _new_group  # `new_group` calls it, under whatever name that was imported
    return table | {(kind, "__call__"): _operator for kind in _CALLS}
