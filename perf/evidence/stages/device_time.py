"""Time of each kernel on the device, in a CUDA graph with all ranks resident, beside the limits of the same run.

Fused calls stand beside `unfused`: the all-reduce that a communicator chooses, and torch's norm.

All ranks share one GPU's memory. So the limits are the memory's bandwidth for large messages (a copy of 1 GiB), the L2
cache's for small ones (a repeated copy of 4 MiB), and the time from launch to launch of a kernel that does nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fractions import Fraction
from functools import partial

import torch
import triton

from tricomm import Communicator, Options
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives.registry import CUBE_RANKS, Kernel
from tricomm.kernels.launch import kernel_launch
from tricomm.perf.bench import collective_calls, fused_bench, timing
from tricomm.perf.bench.request import Case
from tricomm.perf.evidence import checks, compiling, hardware, row_checks
from tricomm.perf.evidence.stage import EIGHT, GRAPH, STREAMS, TWO, Data, EvidenceSettings, Stage, StageCase
from tricomm.perf.row_calls import RowForm

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
FIRST_SIZE = SIZES[2]
FORMS, FEW_FORMS = (RowForm(8192), RowForm(8192, "fp8_per_token")), (RowForm(160),)
ROWS = (1, 32)
_TYPE = "bfloat16"
_CALLS, _ROUNDS = 20, 15


@triton.jit
def empty(x_ptr):  # type: ignore[no-untyped-def]
    """A kernel that does nothing."""


def _cases(settings: EvidenceSettings) -> Iterable[StageCase]:
    dry = settings.dry_run
    yield StageCase("limit/launch", lambda: _launch(settings))
    yield StageCase("limit/l2 copy", lambda: _copy(settings, 1 << (12 if dry else 22)))
    yield StageCase("limit/memory copy", lambda: _copy(settings, 1 << (12 if dry else 30)))
    for world_size in (2,) if dry else (2, 4, 8):
        for kernel in checks.kernels(world_size, dry):
            smallest = world_size == 2 or kernel.needs_cube
            for nbytes in (0,) if kernel.collective == "barrier" else (256,) if dry else SIZES:
                first_size = dry or nbytes in (0, FIRST_SIZE)
                yield StageCase(
                    f"{kernel.name}/{world_size} ranks/{nbytes} bytes",
                    partial(_kernel, settings, kernel, world_size, nbytes),
                    tier=(0 if smallest else 2) if first_size else (3 if smallest else 5),
                    jobs=partial(_jobs, settings, kernel, world_size, nbytes),
                    needs=(EIGHT,) if world_size == CUBE_RANKS else (),
                )
        yield from _rows(settings, world_size)


def _rows(settings: EvidenceSettings, world_size: int) -> Iterable[StageCase]:
    """Fused calls: few rows, and no norm beside the codes if they quantise."""
    forms = FEW_FORMS if settings.dry_run else FORMS
    ways = [*(kernel.name for kernel in row_checks.kernels(world_size)), fused_bench.UNFUSED]
    for form, rows, way in itertools.product(forms, ROWS[: 1 if settings.dry_run else None], ways):
        yield StageCase(
            f"{way}/{world_size} ranks/{rows} rows of {form.name}",
            partial(_fused, settings, way, world_size, form, rows),
            tier=2 if world_size == 2 else 4,
            jobs=partial(_row_jobs, settings, way, world_size, form, rows),
            needs=(EIGHT,) if world_size == CUBE_RANKS else (),
        )


def _row_jobs(settings: EvidenceSettings, way: str, world_size: int, form: RowForm, rows: int) -> list[compiling.Job]:
    kernels = [k for k in row_checks.kernels(world_size) if k.name == way]
    capability, arena = hardware.capability(settings), _options(settings).arena_bytes
    return compiling.of_rows(kernels, world_size, arena, capability, [(form, _TYPE, rows)])


def _fused(settings: EvidenceSettings, way: str, world_size: int, form: RowForm, rows: int) -> Data:
    kernel = next((k for k in row_checks.kernels(world_size) if k.name == way), None)
    algorithm, protocol = (kernel.algorithm, kernel.protocol) if kernel is not None else (None, None)
    case = Case(FUSED, algorithm, protocol, _TYPE, hidden=form.hidden, quantize=form.quantize)

    def make(comm: Communicator) -> timing.Call:
        made = fused_bench.tensors(comm, case, rows * form.hidden)
        made.load(comm, 0)
        return fused_bench.ours(comm, case, made) if kernel is not None else fused_bench.unfused_call(comm, made)

    rounds, calls = (2, 1) if settings.dry_run else (_ROUNDS, _CALLS)
    return hardware.spread(hardware.of(settings).resident(world_size, make, calls, rounds, _options(settings)))


def _jobs(settings: EvidenceSettings, kernel: Kernel, world_size: int, nbytes: int) -> list[compiling.Job]:
    call = checks.CheckedCall(_count(kernel, world_size, nbytes), "sum" if kernel.reduces else "none", 0)
    wanted = {_TYPE: [call]}
    return compiling.jobs(kernel, world_size, hardware.capability(settings), wanted, _options(settings))


def _options(settings: EvidenceSettings) -> Options:
    return Options(arena_bytes=(1 << 20) if settings.dry_run else (64 << 20))


def _count(kernel: Kernel, world_size: int, nbytes: int) -> int:
    return nbytes // kernel.kind.rows_in(world_size) // 2


def _launch(settings: EvidenceSettings) -> Data:
    device = hardware.of(settings)
    x = torch.zeros(16, device=device.device)
    run = kernel_launch.prepare(empty, 1, (x,), {}, device.device)
    return hardware.spread(device.times(run, _CALLS, _ROUNDS))


def _copy(settings: EvidenceSettings, nbytes: int) -> Data:
    device = hardware.of(settings)
    x = torch.ones(nbytes // 4, device=device.device)
    y = torch.empty_like(x)
    data = hardware.spread(device.times(lambda: y.copy_(x), _CALLS, _ROUNDS))
    return {**data, "memory_gbps": round(2 * nbytes / data["median_us"] / 1e3, 3)}


def _kernel(settings: EvidenceSettings, kernel: Kernel, world_size: int, nbytes: int) -> Data:
    device = hardware.of(settings)
    rounds, calls = (2, 1) if settings.dry_run else (_ROUNDS, _CALLS)
    samples = device.resident(
        world_size, lambda comm: repeating(comm, kernel, nbytes), calls, rounds, _options(settings)
    )
    data = hardware.spread(samples)
    if nbytes:
        data["memory_gbps"] = round(moved(kernel, world_size, nbytes) / data["median_us"] / 1e3, 3)
    return data


def repeating(comm: Communicator, kernel: Kernel, nbytes: int) -> timing.Call:
    """A rank's call on its own bf16 input of `nbytes` bytes, all rows together."""
    x, y = collective_calls.tensors(comm, kernel.collective, _count(kernel, comm.world_size, nbytes), torch.bfloat16)
    return lambda: collective_calls.call(comm, kernel.collective, 0, x, y, kernel)


def moved(kernel: Kernel, world_size: int, nbytes: int) -> int:
    """The least bytes that all ranks together load and store, with `nbytes` of input each, because they share a memory.

    Inputs are loaded once and outputs stored once. The bytes between ranks are the registry's, LL words with their
    flags: a push stores and loads them, a pull loads them after they were staged. Not counted are a rank's own part in
    its own mailbox, headers, early polls, and the wider sums of narrow types on a cube mesh's relays.
    """
    kind = kernel.kind
    written, read = kernel.written(world_size), kernel.read(world_size)
    # The registry counts the busiest rank. Each rank that gets a shard of a broadcast passes (N - 2)/N of it on, so
    # that all ranks together push N/2 times as much as the root.
    pushers: Fraction | int = {"src": 1, "dst": world_size - 1}.get(kind.root, world_size)
    if kind.root == "src" and kernel.shards is not None:
        pushers = Fraction(world_size, 2)
    loaders = 1 if kind.root == "src" else world_size
    storers = {"broadcast": world_size - 1, "reduce": 1, "gather": 1}.get(kind.name, world_size)
    output = Fraction(kind.rows_out(world_size), kind.rows_in(world_size))
    mailbox = 2 * written * pushers + (read + 1 if read else 0) * world_size
    return int((loaders + mailbox + storers * output) * nbytes)


STAGE = Stage(
    "device_time", "Time on the device, against the limits of its memory", _cases, hardware.no_gpu,
    columns=("median_us", "p10_us", "p90_us", "memory_gbps"), environment=STREAMS, needs=(TWO, GRAPH), share=2.0,
)  # fmt: skip
