"""Run in new processes, with TRITON_INTERPRET=1 set before triton is imported: prints the result of each part."""

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.user_kernel import rotate
from tricomm.kernels import reference
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import compiler, triton_adapter

_OPTIONS = tricomm.Options(arena_bytes=256 * 1024)


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def _add(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, _double(tl.load(x_ptr + at, mask=at < n)) + tl.cdiv(n, BLOCK), mask=at < n)


def _own(x):
    """The user's own kernel under Triton's own interpreter, as set up by the environment."""
    y = torch.zeros_like(x)
    _add[(2,)](x, y, x.numel(), BLOCK=8)
    return torch.equal(y, 2 * x + 2)


def _collectives(comm):
    x = torch.arange(100.0) * (comm.rank + 1)
    total = sum(range(1, comm.world_size + 1))
    right = [torch.equal(comm.all_reduce(x.clone()), torch.arange(100.0) * total)]
    for kernel in registry.ALL:
        if kernel.collective == "all_reduce" and not kernel.zero_copy and not kernel.needs_cube:
            y = x.to(torch.bfloat16)
            comm.all_reduce(y, algorithm=kernel.algorithm, protocol=kernel.protocol)
            parts = [(torch.arange(100.0) * (r + 1)).to(torch.bfloat16) for r in range(comm.world_size)]
            right.append(torch.equal(y, reference.expected("all_reduce", "sum", parts, wire=kernel.wire)))
    rows = comm.all_gather(x[:3])
    right.append(torch.equal(rows.view(comm.world_size, 3)[comm.rank], x[:3]))
    w = comm.symmetric((15,), torch.int32)
    w.local.fill_(comm.rank)
    comm.barrier()
    out = torch.full((15,), 99, dtype=torch.int32)
    comm.launch(rotate, 1, w.peers, out, comm.rank, WORLD_SIZE=comm.world_size, BLOCK=16)
    right.append(bool((out == (comm.rank + 1) % comm.world_size).all()))
    y = torch.zeros(10)
    comm.launch(_add, 2, torch.arange(10.0), y, 10, BLOCK=8)
    right.append(torch.equal(y, torch.arange(10.0) * 2 + 2))
    comm.barrier()
    return all(right)


def communicator(rank, world_size, tell, url):
    with tricomm.init(url, rank, world_size, device="cpu", options=_OPTIONS) as comm:
        return _own(torch.arange(10.0)) and _collectives(comm) and _own(torch.arange(10.0))


def group(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels"):
        x = torch.full((10,), float(rank + 1))
        dist.all_reduce(x)
        return bool((x == 3).all()) and tricomm.stats()["kernels"] == {"all_reduce": 1}


@triton.jit
def _fails(x):
    return x.there_is_no_such_thing


@triton.jit
def _calls_what_fails(x_ptr):
    _fails(x_ptr)


def _error_in_a_device_function() -> str:
    """Errors are raised unchanged, also those that end a wait."""
    try:
        tricomm.simulate(lambda comm: comm.launch(_calls_what_fails, 1, torch.ones(1)), 1)
    except Exception as error:
        return type(error).__name__
    return "none"


def _without_the_adapters_part() -> str:
    """Negative control: device functions of the kind that the variable makes are left to Triton."""
    kinds, triton_adapter._JITTED = triton_adapter._JITTED, (triton.JITFunction,)
    triton_adapter.patches.clear()
    triton_adapter.is_kernel, is_kernel = lambda kernel: True, triton_adapter.is_kernel
    try:
        return _error_in_a_device_function()
    finally:
        triton_adapter._JITTED, triton_adapter.is_kernel = kinds, is_kernel
        triton_adapter.patches.clear()


def main() -> None:
    assert not isinstance(rotate, triton.JITFunction), "TRITON_INTERPRET has no effect"
    ranks.CONTEXT = multiprocessing.get_context("fork")  # these run first, before any thread has started
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        results = {
            "ranks": ranks.run(2, communicator, f"file://{folder}/comm"),
            "group": ranks.run(2, group, f"file://{folder}/group"),
            "simulate": tricomm.simulate(_collectives, 3),
            "check": tricomm.check(_collectives, 2, schedules=3, options=_OPTIONS).ok,
            "own": _own(torch.arange(10.0)),
            "interpreted": triton_adapter.interpreted(),
            "errors": [_error_in_a_device_function(), _without_the_adapters_part()],
        }
    try:
        compiler.compile_kernel(registry.ALL[0].function, {}, None, True, 90)
    except tricomm.ResourceError as error:
        results["compile"] = str(error)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
