"""Time of each kernel on the device, in a CUDA graph with all ranks resident, beside the limits of the same run.

All ranks share one GPU's memory, so the bytes that a kernel moves are compared with what that memory gives: its
bandwidth for large messages (a copy of 1 GiB), its L2 cache for small ones (a copy of 4 MiB, again and again), and the
time from launch to launch of a kernel that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import triton

from tricomm import Communicator, Options
from tricomm.kernels.collectives.registry import CUBE_RANKS, Kernel
from tricomm.kernels.launch import kernel_launch
from tricomm.perf.bench import collective_calls
from tricomm.perf.evidence import checks, compiling, machine
from tricomm.perf.evidence.stage import EIGHT, GRAPH, STREAMS, TWO, Case, Data, Settings, Stage

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
FIRST_SIZE = SIZES[2]
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
        for kernel in checks.kernels(world_size, dry):
            smallest = world_size == 2 or kernel.needs_cube
            for nbytes in (0,) if kernel.collective == "barrier" else (256,) if dry else SIZES:
                first_size = dry or nbytes in (0, FIRST_SIZE)
                yield Case(
                    f"{kernel.name}/{world_size} ranks/{nbytes} bytes",
                    partial(_kernel, settings, kernel, world_size, nbytes),
                    tier=(0 if smallest else 2) if first_size else (3 if smallest else 5),
                    jobs=partial(_jobs, settings, kernel, world_size, nbytes),
                    needs=(EIGHT,) if world_size == CUBE_RANKS else (),
                )


def _jobs(settings: Settings, kernel: Kernel, world_size: int, nbytes: int) -> list[compiling.Job]:
    call = checks.Call(_count(kernel, world_size, nbytes), "sum" if kernel.reduces else "none", 0)
    wanted = {"bfloat16": [call]}
    return compiling.jobs(kernel, world_size, machine.capability(settings), wanted, _options(settings))


def _options(settings: Settings) -> Options:
    return Options(arena_bytes=(1 << 20) if settings.dry_run else (64 << 20))


def _count(kernel: Kernel, world_size: int, nbytes: int) -> int:
    return nbytes // kernel.kind.rows_in(world_size) // 2


def _launch(settings: Settings) -> Data:
    on = machine.of(settings)
    x = torch.zeros(16, device=on.device)
    run = kernel_launch.prepare(empty, 1, (x,), {}, on.device)
    return machine.spread(on.times(run, _CALLS, _ROUNDS))


def _copy(settings: Settings, nbytes: int) -> Data:
    on = machine.of(settings)
    x = torch.ones(nbytes // 4, device=on.device)
    y = torch.empty_like(x)
    data = machine.spread(on.times(lambda: _ignored(y.copy_(x)), _CALLS, _ROUNDS))
    return {**data, "memory_gbps": round(2 * nbytes / data["median_us"] / 1e3, 3)}


def _kernel(settings: Settings, kernel: Kernel, world_size: int, nbytes: int) -> Data:
    on = machine.of(settings)
    rounds, calls = (2, 1) if settings.dry_run else (_ROUNDS, _CALLS)
    samples = on.resident(world_size, lambda comm: repeating(comm, kernel, nbytes), calls, rounds, _options(settings))
    data = machine.spread(samples)
    if nbytes:
        data["memory_gbps"] = round(moved(kernel, world_size, nbytes) / data["median_us"] / 1e3, 3)
    return data


def repeating(comm: Communicator, kernel: Kernel, nbytes: int) -> Callable[[], None]:
    """What a rank calls, on a bf16 input of its own of `nbytes` bytes, all rows together."""
    x, y = collective_calls.tensors(comm, kernel.collective, _count(kernel, comm.world_size, nbytes), torch.bfloat16)
    return lambda: _ignored(collective_calls.call(comm, kernel.collective, 0, x, y, kernel))


def _ignored(result: Any) -> None:
    """For a call whose result nobody looks at."""


def moved(kernel: Kernel, world_size: int, nbytes: int) -> int:
    """Bytes that all ranks together load and store at the least, of `nbytes` of input each: they share one memory.

    Inputs are loaded once and outputs stored once. What crosses between ranks is the registry's, LL words with their
    flags: pushed, it is stored and loaded again; pulled, it is loaded, and staged before. Not counted are a rank's own
    part where it passes through its own mailbox, headers, polls that came too early, and by how much the wide sums of
    narrow types are larger on a cube mesh's relays.
    """
    kind = kernel.kind
    written, read = kernel.written(world_size), kernel.read(world_size)
    # The registry speaks of the busiest rank. Of those who get a shard of a broadcast, each passes (N - 2)/N on: all
    # together push N/2 times as much as the root.
    pushers: Fraction | int = {"src": 1, "dst": world_size - 1}.get(kind.root, world_size)
    if kind.root == "src" and kernel.shards is not None:
        pushers = Fraction(world_size, 2)
    loaders = 1 if kind.root == "src" else world_size
    storers = {"broadcast": world_size - 1, "reduce": 1, "gather": 1}.get(kind.name, world_size)
    output = Fraction(kind.rows_out(world_size), kind.rows_in(world_size))
    mailbox = 2 * written * pushers + (read + 1 if read else 0) * world_size
    return int((loaders + mailbox + storers * output) * nbytes)


STAGE = Stage(
    "device_time", "Time on the device, against the limits of its memory", _cases, machine.no_gpu,
    columns=("median_us", "p10_us", "p90_us", "memory_gbps"), environment=STREAMS, needs=(TWO, GRAPH),
    share=2.0,
)  # fmt: skip
