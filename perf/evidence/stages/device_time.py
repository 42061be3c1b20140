"""Time of each kernel on the device, in a CUDA graph with all ranks resident, beside the limits of the same run.

All ranks share one GPU's memory, so the bytes that a kernel moves are compared with what that memory gives: its
bandwidth for large messages (a copy of 1 GiB), its L2 cache for small ones (a copy of 4 MiB, again and again), and the
time from launch to launch of a kernel that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton

from tricomm import Communicator, Options
from tricomm.kernels import launch, registry
from tricomm.kernels.registry import Kernel
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.stage import Case, Data, Settings, Stage

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
_CALLS, _ROUNDS = 20, 15


@triton.jit
def empty(x_ptr):  # type: ignore[no-untyped-def]
    """A kernel that does nothing."""


def _cases(settings: Settings) -> Iterable[Case]:
    dry = settings.dry_run
    yield Case("limit/launch", lambda: _launch(settings))
    yield Case("limit/l2 copy", lambda: _copy(settings, 1 << (12 if dry else 22)))
    yield Case("limit/memory copy", lambda: _copy(settings, 1 << (12 if dry else 30)))
    for world_size in (2,) if dry else (2, 4, 8):
        for kernel in registry.KERNELS:
            for nbytes in (0,) if kernel.collective == "barrier" else (256,) if dry else SIZES:
                yield Case(
                    f"{kernel.name}/{world_size} ranks/{nbytes} bytes",
                    lambda k=kernel, w=world_size, n=nbytes: _kernel(settings, k, w, n),  # type: ignore[misc]
                )


def _launch(settings: Settings) -> Data:
    on = machine.of(settings)
    x = torch.zeros(16, device=on.device)
    run = launch.prepare(empty, 1, (x,), {}, on.device)
    return machine.spread(on.times(run, _CALLS, _ROUNDS))


def _copy(settings: Settings, nbytes: int) -> Data:
    on = machine.of(settings)
    x = torch.ones(nbytes // 4, device=on.device)
    y = torch.empty_like(x)
    data = machine.spread(on.times(lambda: _ignored(y.copy_(x)), _CALLS, _ROUNDS))
    return {**data, "memory_gbps": round(2 * nbytes / data["median_us"] / 1e3, 3)}


def _kernel(settings: Settings, kernel: Kernel, world_size: int, nbytes: int) -> Data:
    on = machine.of(settings)
    options = Options(arena_bytes=(1 << 20) if settings.dry_run else (64 << 20))
    rounds, calls = (2, 1) if settings.dry_run else (_ROUNDS, _CALLS)
    samples = on.resident(world_size, lambda comm: calling(comm, kernel, nbytes), calls, rounds, options)
    data = machine.spread(samples)
    if nbytes:
        data["memory_gbps"] = round(moved(kernel, world_size, nbytes) * world_size / data["median_us"] / 1e3, 3)
    return data


def calling(comm: Communicator, kernel: Kernel, nbytes: int) -> Callable[[], None]:
    """What a rank calls, on bf16 tensors of its own of `nbytes` bytes."""
    if kernel.collective == "barrier":
        return lambda: _ignored(comm.barrier(async_op=True))
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=comm.device)
    y = torch.zeros(x.numel() * (1 if kernel.reduces else comm.world_size), dtype=x.dtype, device=comm.device)
    run = getattr(comm, kernel.collective)
    return lambda: _ignored(run(x, out=y, algorithm=kernel.algorithm, protocol=kernel.protocol))


def _ignored(result: Any) -> None:
    """For a call whose result nobody looks at."""


def moved(kernel: Kernel, world_size: int, nbytes: int) -> int:
    """Bytes that one rank loads and stores, its own tensors and the mailboxes: what its memory has to do at least.

    LL words are twice as large as what they carry.
    """
    wire = 2 if kernel.protocol == "ll" else 1
    if kernel.algorithm == "two_shot":  # every shard once to its owner, every result once back
        return nbytes + 2 * 2 * wire * nbytes + nbytes
    sent = world_size if kernel.protocol == "ll" else 1  # pushed to each rank, or staged once
    out = nbytes if kernel.reduces else world_size * nbytes
    return nbytes + wire * sent * nbytes + wire * world_size * nbytes + out


STAGE = Stage(
    "device_time", "Time on the device, against the limits of its memory", _cases, machine.no_gpu,
    columns=("median_us", "p10_us", "p90_us", "memory_gbps"),
)  # fmt: skip
