"""Times on one GPU, for the report: kernels in CUDA graphs with all ranks resident, and the host's part of a call.

The limits of the same run: a copy of 1 GiB (memory), a repeated copy of 4 MiB (L2 cache), and a kernel that does
nothing. Fused calls are compared with `unfused`: the all-reduce that a communicator chooses, and torch's norm.
Run with `-m gpu`. Not yet run on hardware.
"""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
import triton
from torch._C._distributed_c10d import HashStore

import tricomm
from tests.gpu import streams
from tests.gpu.exact import checks, row_checks, variants
from tricomm import Options
from tricomm.core.fused.fused_call import FUSED
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import kernel_launch
from tricomm.kernels.specialization import CompiledSpecialization, Specialization
from tricomm.perf import units
from tricomm.perf.bench import collective_calls, fused_bench
from tricomm.perf.bench.request import Case
from tricomm.perf.row_calls import RowForm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
FIRST_SIZE = SIZES[2]
CALLS, ROUNDS = 20, 15
OPTIONS = Options(arena_bytes=64 << 20)
FORMS, ROWS = (RowForm(8192), RowForm(8192, "fp8_per_token")), (1, 32)
KERNELS = [pytest.param(k, n, id=f"{k.name}-{n}ranks") for n in (2, 4, 8) for k in checks.kernels(n)]
WAYS = [
    pytest.param(way, n, form, rows, id=f"{way}-{n}ranks-{rows}-{form.name}")
    for n in (2, 4, 8)
    for form, rows in itertools.product(FORMS, ROWS)
    for way in (*(k.name for k in row_checks.kernels(n)), fused_bench.UNFUSED)
]


@triton.jit
def empty(x_ptr):
    """A kernel that does nothing."""


@pytest.fixture
def told(record_property):
    """Record a spread, and GB/s of `nbytes`, for the report."""

    def tell(samples, nbytes=0, factor=1.0):
        times = streams.spread(samples)
        for name, value in times.items():
            record_property(name, value)
        if nbytes:
            record_property("gbps", round(units.algorithm_bandwidth(nbytes, times["median_us"]) * factor, 3))
        assert times["median_us"] > 0

    return tell


def test_limit_of_launches(told):
    run = kernel_launch.prepare(empty, 1, (torch.zeros(16, device="cuda"),), {}, torch.device(streams.DEVICE))
    told(streams.alone(run, CALLS, ROUNDS))


@pytest.mark.parametrize("nbytes", [1 << 22, 1 << 30], ids=["l2", "memory"])
def test_limit_of_copies(nbytes, told):
    x = torch.ones(nbytes // 4, device="cuda")
    y = torch.empty_like(x)
    told(streams.alone(lambda: y.copy_(x), CALLS, ROUNDS), 2 * nbytes)


def kernel_time(kernel, world_size, nbytes, told):
    """A rank's bf16 input has `nbytes` bytes, all rows together."""
    count = nbytes // kernel.kind.rows_in(world_size) // 2
    call = checks.CheckedCall(count, "sum" if kernel.reduces else "none", 0)
    wanted = {"bfloat16": [call]}
    variants.compile_all(variants.jobs(kernel, world_size, variants.capability(), wanted, OPTIONS))

    def make(comm):
        x, y = collective_calls.tensors(comm, kernel.collective, count, torch.bfloat16)
        return lambda: collective_calls.call(comm, kernel.collective, 0, x, y, kernel)

    size = units.total_bytes(kernel.collective, count, 2, world_size)
    factor = units.bus_factor(kernel.collective, world_size)
    told(streams.resident(world_size, make, CALLS, ROUNDS, OPTIONS), size, factor)


@pytest.mark.parametrize(("kernel", "world_size"), KERNELS)
def test_kernels_one_size(kernel, world_size, told):
    kernel_time(kernel, world_size, 0 if kernel.collective == "barrier" else FIRST_SIZE, told)


@pytest.mark.parametrize("nbytes", [size for size in SIZES if size != FIRST_SIZE])
@pytest.mark.parametrize(("kernel", "world_size"), [p for p in KERNELS if p.values[0].collective != "barrier"])
def test_kernels(kernel, world_size, nbytes, told):
    kernel_time(kernel, world_size, nbytes, told)


@pytest.mark.parametrize(("way", "world_size", "form", "rows"), WAYS)
def test_fused_rows(way, world_size, form, rows, told):
    kernel = next((k for k in row_checks.kernels(world_size) if k.name == way), None)
    chosen = (kernel.algorithm, kernel.protocol) if kernel is not None else (None, None)
    case = Case(FUSED, *chosen, "bfloat16", hidden=form.hidden, quantize=form.quantize)

    def make(comm):
        made = fused_bench.tensors(comm, case, rows * form.hidden)
        made.load(comm, 0)
        return fused_bench.ours(comm, case, made) if kernel is not None else fused_bench.unfused_call(comm, made)

    told(streams.resident(world_size, make, CALLS, ROUNDS, OPTIONS))


def enqueued(run, calls=300):
    """Microseconds on the host until a call is enqueued, a number a round; the queue of launches never fills."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - began) / calls * 1e6)
        torch.cuda.synchronize()
    return times[1:]


@pytest.fixture
def alone():
    with tricomm.Communicator(HashStore(), 0, 1, "cuda", options=Options(arena_bytes=8 << 20, nccl=False)) as comm:
        yield comm
        comm.synchronize()


def test_host_time_of_an_all_reduce(alone, told):
    """The aim is 3 us."""
    x = torch.ones(4096, device="cuda")
    told(enqueued(lambda: alone.all_reduce(x)))


def test_host_time_of_tritons_launcher(alone, told):
    """A kernel by `kernel[grid](...)`, which inspects its arguments every time."""
    kernel = next(k for k in registry.KERNELS if k.collective == "barrier").function
    alone.barrier()
    group, number = alone.group_table, itertools.count(2)
    spec = CompiledSpecialization(Specialization(WORLD_SIZE=1, BLOCK=512, LANES=256, PTX=True))
    told(enqueued(lambda: kernel[(1,)](group, next(number) << 32 | 1, SPEC=spec, num_warps=8)))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL, which both backends need")
@pytest.mark.parametrize("backend", ["tricomm", "nccl"])
def test_host_time_of_torch_distributed(backend, told):
    dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
    try:
        x = torch.ones(4096, device="cuda")
        told(enqueued(lambda: dist.all_reduce(x)))
    finally:
        dist.destroy_process_group()
