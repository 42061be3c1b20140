"""Several GPUs, one for each rank: peer access, copies, one-way latency, exact results. Run with `-m gpu`.

Not yet run on hardware. `tricomm bench --against nccl` has the times of the collectives.
"""

from itertools import permutations
from statistics import median

import pytest
import torch

from tests import ranks
from tests.gpu import latency
from tests.gpu.exact import checks, process_bodies, variants
from tests.gpu.gpu_limits import stopwatch
from tricomm.kernels import layout

GPUS = min(torch.cuda.device_count(), layout.MAX_WORLD_SIZE)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")]
COPY = 256 << 20  # bytes
EACH = [kernel for kernel in checks.of_processes(max(GPUS, 2))]


def test_every_gpu_reaches_every_other_one(record_property):
    closed = [pair for pair in permutations(range(GPUS), 2) if not torch.cuda.can_device_access_peer(*pair)]
    record_property("pairs", GPUS * (GPUS - 1))
    assert closed == []


def test_copies_between_gpus(record_property):
    """GB/s of a copy from each GPU to each other one, one copy at a time."""
    for a, b in permutations(range(GPUS), 2):
        x = torch.ones(COPY, dtype=torch.uint8, device=f"cuda:{a}")
        y = torch.zeros(COPY, dtype=torch.uint8, device=f"cuda:{b}")
        times = []
        for _ in range(10):
            with torch.cuda.device(x.device):  # on whose current stream torch copies
                elapsed = stopwatch(x.device)
                y.copy_(x, non_blocking=True)
                times.append(elapsed())
        assert bool((y == 1).all()), (a, b)
        record_property(f"{a}to{b}_gbps", round(COPY / median(times[1:]) / 1e3, 1))


def probed(rank, world_size, tell, url):
    with process_bodies.join(rank, world_size, url, "many gpus") as comm:
        return latency.of_pairs(comm, 1000, 7)


def test_one_way_latency(url, record_property):
    for times in ranks.run(GPUS, probed, url, timeout=200):
        for ((a, b), way), samples in times.items():
            record_property(f"{a}-{b}_{way}_us", round(median(samples), 3))


def test_multicast_kernels(url):
    results = ranks.run(GPUS, process_bodies.multicast, url, "many gpus", timeout=240)
    if any(errors is None for _, errors in results):
        pytest.skip("no memory with a multicast address; tricomm doctor says why")
    assert [errors for _, errors in results] == [[]] * GPUS


@pytest.mark.parametrize("kernel", EACH, ids=lambda kernel: kernel.name)
def test_every_size_type_and_operation(kernel, url):
    parts = checks.parts(kernel)
    variants.compile_all(variants.sweep(kernel, GPUS, parts, variants.capability()))
    results = ranks.run(GPUS, process_bodies.swept, url, "many gpus", [kernel.name], parts, timeout=240)
    assert [errors for _, errors in results] == [[]] * GPUS
