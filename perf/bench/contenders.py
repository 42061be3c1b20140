"""Who takes part in a comparison of collectives: tricomm's kernels, and what a user would pick instead.

Each is made for one call by all ranks together. What it needs and does not find, it says by `Skip`.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf.bench import calling, torch_calls
from tricomm.perf.bench.ground import Call, Contender, Make, filling
from tricomm.perf.evidence import checks
from tricomm.perf.evidence.stage import Skip

OURS = "tricomm"  # the choice that tricomm makes by itself, which the others are compared with
MULTI_RANK_NCCL = (2, 30)  # the first that takes several ranks on one device (NCCL_MULTI_RANK_GPU_ENABLE=1)
KRAKEN = "github.com/meta-pytorch/kraken"


def offered(collective: str, world_size: int, dry_run: bool) -> dict[str, Make]:
    """By name: tricomm's choice, each of its kernels, and the others. Gloo stands in for NCCL where there is no GPU."""
    found: dict[str, Make] = {OURS: partial(ours, kernel=None)}
    kernels = registry.of(collective, world_size)
    if len(kernels) > 1:
        few = [k for k in kernels if k in checks.kernels(world_size, dry_run)]
        few += [k for k in registry.ZERO_COPY if k.collective == collective]
        found |= {k.name.replace(collective, OURS, 1): partial(ours, kernel=k) for k in few}
    found |= {"gloo": gloo, "nccl": nccl} if dry_run else {"nccl": nccl}
    if collective == "all_reduce":
        found |= {f"symm_mem_{op}": partial(symm_mem, op=op) for op in ("one_shot", "two_shot", "multimem")}
        found |= {f"kraken_{op}": partial(kraken, op=op) for op in ("one_shot", "two_shot")}
    return found


def ours(call: Call, kernel: Kernel | None) -> Contender:
    comm = call.ground.comm
    x, y = calling.tensors(comm, call.collective, call.count, call.dtype, kernel)
    return Contender(
        filling(calling.local(x), y), lambda: calling.call(comm, call.collective, call.number(0), x, y, kernel)
    )


def gloo(call: Call) -> Contender:
    return torch_calls.contender(call, None)


def nccl(call: Call) -> Contender:
    missing = no_nccl(call.ground.one_gpu)
    if missing is not None:
        raise Skip(missing)
    if call.ground.nccl is None:
        call.ground.nccl = dist.new_group(backend="nccl")
    return torch_calls.contender(call, call.ground.nccl)


def no_nccl(one_gpu: bool) -> str | None:
    """Why NCCL cannot take part, where it cannot."""
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    version = torch.cuda.nccl.version()
    if one_gpu and version[:2] < MULTI_RANK_NCCL:
        least = ".".join(map(str, MULTI_RANK_NCCL))
        return f"NCCL is {'.'.join(map(str, version))}; several ranks on one device need {least} or newer"
    return None


def symm_mem(call: Call, op: str) -> Contender:
    """torch.ops.symm_mem. The input lies in symmetric memory already: it is spared the copy of a plain tensor."""
    ops, name = torch.ops.symm_mem, _everybody().group_name
    x, handle = _shared(call)
    if op == "one_shot":
        y = call.empty(1)
        return Contender(filling(x, y), lambda: ops.one_shot_all_reduce_out(x, "sum", name, y))
    if op == "two_shot":
        return Contender(x.copy_, lambda: ops.two_shot_all_reduce_(x, "sum", name))
    if not handle.multicast_ptr:
        why = "which torch leaves out where ranks share a device" if call.ground.one_gpu else "which this box lacks"
        raise Skip(f"multimem needs a multicast address, {why}")
    return Contender(x.copy_, lambda: ops.multimem_all_reduce_(x, "sum", name))


def kraken(call: Call, op: str) -> Contender:
    """Kraken's Triton kernels, from a checkout that was brought along."""
    run = getattr(_kraken(call.ground.peers).comm, f"{op}_all_reduce")
    x, _ = _shared(call)
    return Contender(x.copy_, lambda: run(x))


def _kraken(peers: Path | None) -> Any:
    if peers is None:
        raise Skip(f"no --peers folder was given; kraken is looked for in its folder kraken ({KRAKEN})")
    folder = (peers / "kraken").resolve()
    if not (folder / "kraken" / "__init__.py").exists():
        raise Skip(f"{folder} is no checkout of {KRAKEN}: it has no kraken/__init__.py")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("kraken")


def _shared(call: Call) -> tuple[torch.Tensor, Any]:
    """A tensor in torch's symmetric memory, known to all ranks, and its handle."""
    x = symmetric_memory.empty(call.count, dtype=call.dtype, device=call.ground.comm.device)
    return x, symmetric_memory.rendezvous(x, _everybody())


def _everybody() -> Any:
    return dist.group.WORLD
