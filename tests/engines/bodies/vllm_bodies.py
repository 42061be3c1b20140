"""Ranks that use vLLM's GroupCoordinator, to which the plugin has given tricomm's communicator, or not."""

from __future__ import annotations

import io
import os
import time
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.plugins import load_general_plugins

import tricomm
from tests.engines.bodies import value
from tricomm.engines import engine_group

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)
SHAPES = ((1,), (7,), (4, 8), (3, 5), (33, 129), (2, 3, 5), (0, 8))


@contextmanager
def coordinator(rank, world_size, url, name="tp", **environment):
    """vLLM's group of all ranks, as its workers make it."""
    os.environ.update({"VLLM_DIST_IDENT": f"tricomm-{os.getppid()}-{url[-8:]}", "VLLM_TRICOMM": "1", **environment})
    os.environ.setdefault("TRICOMM_CPU", "kernels")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", url, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    load_general_plugins()
    group = parallel_state.GroupCoordinator(
        group_ranks=[list(range(world_size))],
        local_rank=rank,
        torch_distributed_backend="gloo",
        use_device_communicator=True,
        group_name=name,
    )
    try:
        yield group
    finally:
        group.destroy()
        dist.destroy_process_group()


def calls():
    """Calls that the kernels ran in this process, by collective."""
    return dict(tricomm.stats()["kernels"])


def ran_since(before):
    """Calls that the kernels ran since `before`, by collective."""
    return {name: count - before.get(name, 0) for name, count in calls().items() if count > before.get(name, 0)}


def exact(rank, world_size, tell, url):
    """Every collective with many shapes and types; return errors and the calls that the kernels ran."""
    wrong = []
    with coordinator(rank, world_size, url) as group:
        before = calls()
        seed = 0
        for dtype in DTYPES:
            for shape in SHAPES:
                seed += 1
                parts = [value(r, shape, dtype, seed) for r in range(world_size)]
                total = torch.stack(parts).sum(0, dtype=dtype)
                if not torch.equal(group.all_reduce(parts[rank].clone()), total):
                    wrong.append(("all_reduce", dtype, shape))
                for dim in range(-1, len(shape)):
                    if not torch.equal(group.all_gather(parts[rank].clone(), dim), torch.cat(parts, dim)):
                        wrong.append(("all_gather", dtype, shape, dim))
                dim = seed % len(shape)
                whole = [torch.cat([part] * world_size, dim) for part in parts]
                whole = [w + value(0, w.shape, dtype, seed) for w in whole]
                sums = torch.stack(whole).sum(0, dtype=dtype).chunk(world_size, dim)
                got = group.reduce_scatter(whole[rank].clone(), dim)
                if total.numel() and not torch.equal(got, sums[rank]):
                    wrong.append(("reduce_scatter", dtype, shape, dim))
        strided = value(rank, (6, 10), torch.float32, 77).t()
        total = sum(value(r, (6, 10), torch.float32, 77).t() for r in range(world_size))
        if not torch.equal(group.all_reduce(strided), total):
            wrong.append("strided")
        odd = torch.cat([torch.zeros(1), value(rank, (31,), torch.float32, 78)])[1:]
        if not torch.equal(group.all_reduce(odd), sum(value(r, (31,), torch.float32, 78) for r in range(world_size))):
            wrong.append("misaligned")
        kind = type(group.device_communicator).__name__
        ran = ran_since(before)
    return wrong, kind, ran


def compiled(rank, world_size, tell, url):
    wrong = []
    with coordinator(rank, world_size, url) as group:

        @torch.compile(fullgraph=True, dynamic=True, backend="eager")
        def step(x):
            y = group.all_reduce(x * 2) + 1
            return y, group.all_gather(y, 1), group.reduce_scatter(y.repeat(world_size, 1), 0)

        before = calls()
        for seed, rows in enumerate((3, 5, 8)):
            parts = [value(r, (rows, 6), torch.float32, seed) for r in range(world_size)]
            y = sum(parts) * 2 + 1
            got = step(parts[rank])
            want = (y, torch.cat([y] * world_size, 1), y * world_size)
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                wrong.append(rows)
        ran = ran_since(before)
    return wrong, ran


def limited(rank, world_size, tell, url):
    """vLLM runs sizes above the limit and types without a kernel; return errors and counts."""
    wrong, said = [], io.StringIO()
    with (
        coordinator(rank, world_size, url, TRICOMM_ENGINE_MAX_BYTES="1024", TRICOMM_LOG="routing") as group,
        redirect_stdout(said),
    ):
        before = calls()
        for seed, count in enumerate((256, 257, 300, 16)):
            parts = [value(r, (count,), torch.float32, seed) for r in range(world_size)]
            if not torch.equal(group.all_reduce(parts[rank].clone()), sum(parts)):
                wrong.append(count)
        ran = ran_since(before)
        if group.device_communicator.tricomm.takes("all_gather", torch.zeros(3, dtype=torch.uint16)):
            wrong.append("no kernel takes uint16")
    return wrong, ran, said.getvalue()


def _broken(group, comm):
    raise RuntimeError("no compiler")


def one_cannot(rank, world_size, tell, url, how):
    """If rank 1 cannot use tricomm, or has it turned off, no rank uses it, and vLLM works without it."""
    environment = {}
    engine_group.MEETING_SECONDS = 3.0
    if rank == 1:
        environment = {
            "gloo": {"TRICOMM_CPU": "gloo"},
            "memory": {"TRICOMM_ARENA_BYTES": "300000"},
            "limit": {"TRICOMM_ENGINE_MAX_BYTES": "77"},
            "bad limit": {"TRICOMM_ENGINE_MAX_BYTES": "many"},
            "unset": {"VLLM_TRICOMM": "0"},
            "broken": {},
        }[how]
        if how == "broken":
            engine_group.EngineGroup._compare = _broken
    with coordinator(rank, world_size, url, **environment) as group:
        parts = [value(r, (100,), torch.float32, 5) for r in range(world_size)]
        right = torch.equal(group.all_reduce(parts[rank].clone()), sum(parts))
        held = getattr(group.device_communicator, "tricomm", None)
        return right, held.comm is None if held is not None else None, held.why_not if held is not None else None


def unset(rank, world_size, tell, url):
    from vllm.platforms import current_platform

    own = vars(type(current_platform))["get_device_communicator_cls"]
    with coordinator(rank, world_size, url, VLLM_TRICOMM="") as group:
        same = vars(type(current_platform))["get_device_communicator_cls"] is own
        return same, type(group.device_communicator).__name__, group.all_reduce(torch.ones(3)).tolist()


def other_groups(rank, world_size, tell, url):
    with coordinator(rank, world_size, url, name="ep") as group:
        held = group.device_communicator.tricomm
        return held.comm is None, group.all_reduce(torch.ones(3)).tolist()


def sleeping(rank, world_size, tell, url):
    """suspend frees the memory, vLLM runs the calls until resume maps it again; destroy closes the communicator."""
    with coordinator(rank, world_size, url) as group:
        results = []
        comm = group.device_communicator
        for step in ("first", "suspended", "resumed"):
            if step == "suspended":
                parallel_state.suspend_device_comms()
            if step == "resumed":
                parallel_state.resume_device_comms()
            before = calls().get("all_reduce", 0)
            got = group.all_reduce(torch.full((5,), float(rank + 1)))
            results.append((got.tolist(), calls().get("all_reduce", 0) - before, comm.tricomm.comm.suspended))
        held = comm.tricomm
    return results, held.comm is None


def killed(rank, world_size, tell, url):
    with coordinator(rank, world_size, url) as group:
        group.all_reduce(torch.ones(4))
        tell("ready")
        if rank == 1:
            time.sleep(60)
        time.sleep(0.5)
        try:
            for _ in range(1000):
                group.all_reduce(torch.ones(4))
        except tricomm.TricommError as error:
            tell((type(error).__name__, str(error)))
            os._exit(0)  # vLLM's groups cannot be destroyed without the peer
