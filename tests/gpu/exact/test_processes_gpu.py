"""Exact results of ranks that are processes on one GPU. Run with `-m gpu`. Not yet run on hardware.

Starting ranks takes seconds: the first test makes one size of every kernel, the sweeps all other calls of a kernel.
"""

import pytest
import torch

from tests import ranks
from tests.gpu.exact import checks, process_bodies, row_checks, variants
from tests.gpu.gpu_limits import meeting_seconds
from tricomm.kernels.collectives import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EVERY = [kernel for kernel in checks.of_processes(registry.CUBE_RANKS) if not kernel.needs_cube]
CUBE = [kernel for kernel in checks.kernels(registry.CUBE_RANKS) if kernel.needs_cube]
WORLDS = [pytest.param(n, id=f"{n}ranks") for n in (2, 4)]
EACH = [pytest.param(k, n, id=f"{k.name}-{n}ranks") for n in (2, 4) for k in EVERY]
EACH += [pytest.param(k, registry.CUBE_RANKS, id=f"{k.name}-{registry.CUBE_RANKS}ranks") for k in CUBE]
_REPLAYS_S = 20.0  # seconds


def right(results, kind="cuda_vmm"):
    assert [errors for _, errors in results] == [[]] * len(results)
    assert {each for each, _ in results} == {kind}


def run(body, world_size, url, *more):
    right(ranks.run(world_size, body, url, "one gpu", *more, timeout=240))


def compile_parts(kernels, world_size, parts):
    architecture = variants.capability()
    variants.compile_all(job for k in kernels for job in variants.sweep(k, world_size, parts, architecture))


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_size_of_every_kernel(world_size, url):
    compile_parts(EVERY, world_size, checks.PARTS[:1])
    run(process_bodies.swept, world_size, url, [k.name for k in EVERY], checks.PARTS[:1])


def test_one_size_of_every_kernel_over_cuda_ipc_2ranks(url, monkeypatch):
    """Where descriptors of memory cannot be passed."""
    monkeypatch.setenv("TRICOMM_CUDA_VMM", "0")
    names = [k.name for k in EVERY]
    right(ranks.run(2, process_bodies.swept, url, "one gpu", names, checks.PARTS[:1], timeout=240), "cuda_ipc")


@pytest.mark.parametrize("kernel", row_checks.kernels(4), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("world_size", WORLDS)
def test_rows_that_end_in_a_norm(world_size, kernel, url):
    run(process_bodies.fused, world_size, url, [kernel.name])


@pytest.mark.parametrize("world_size", WORLDS)
def test_registered_tensors_and_memory_that_is_suspended_under_a_graph(world_size, url):
    run(process_bodies.memory, world_size, url)


@pytest.mark.parametrize("first", [1, 2**32 - 6])
@pytest.mark.parametrize("world_size", WORLDS)
def test_messages_of_every_type_and_size(world_size, url, first):
    run(process_bodies.messages, world_size, url, first)


@pytest.mark.parametrize("world_size", WORLDS)
def test_two_groups_in_turns(world_size, url):
    run(process_bodies.two_groups, world_size, url, [k.name for k in EVERY] * 5)


@pytest.mark.parametrize(("kernel", "world_size"), EACH)
def test_rare_graph_replays_mixed_with_eager_calls(kernel, world_size, url):
    """Processes take turns on a device: each rank waits in each of two calls for all others' turns."""
    turn = max(meeting_seconds() / 2, 1e-6)
    replays = min(4000 // world_size**2, max(10, int(_REPLAYS_S / (2 * world_size * turn))))
    run(process_bodies.graphs, world_size, url, kernel.name, replays)


@pytest.mark.parametrize(("kernel", "world_size"), EACH)
def test_rare_ends_of_the_epoch(kernel, world_size, url):
    run(process_bodies.epochs, world_size, url, kernel.name)


@pytest.mark.parametrize(("kernel", "world_size"), EACH)
def test_sweep_of_every_size_type_and_operation(kernel, world_size, url):
    compile_parts([kernel], world_size, checks.parts(kernel))
    run(process_bodies.swept, world_size, url, [kernel.name], checks.parts(kernel))
