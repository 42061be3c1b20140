"""Ranks whose fallback is NCCL, here a fake that takes CPU tensors instead of a GPU's."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

import tricomm
from tests.c10d.bodies.groups import of, refused, same
from tests.core.bodies import fake_nccl
from tests.core.bodies.common_bodies import attempt
from tricomm import errors
from tricomm.core import bootstrap
from tricomm.core.watch.monitor import Monitor
from tricomm.policy import backend_choice
from tricomm.store import process
from tricomm.store.rendezvous import open_store

LIMIT = 4096  # bytes over which NCCL is taken
MOVED = [torch.uint16, torch.uint32, torch.uint64]


def joined(rank, world_size, url, there=True, memory=True, **options):
    """A communicator with a fake NCCL as fallback; `there`: this rank has it, `memory`: the ranks share memory."""
    package = ModuleType("nccl")
    package.core = fake_nccl
    sys.modules["nccl"], sys.modules["nccl.core"] = package, fake_nccl if there else None
    fake_nccl.STORE, *_ = open_store(url + "fake", rank, world_size, 30.0)
    bootstrap.fallback = lambda device, options: ("nccl", "") if options.nccl else (None, "Options(nccl=False)")
    backend_choice.nccl_threshold = lambda device, collective, world_size: LIMIT
    if not memory:

        def refused(*args):
            raise errors.ResourceError("no peer access on this machine")

        bootstrap.open_arena = refused
    given = tricomm.Options(**{"timeout": 30.0, "arena_bytes": 256 * 1024, **options})
    return tricomm.init(url, rank, world_size, "cpu", options=given)


def every_collective(comm, rows, dtype, wrong):
    """Run every collective into poisoned outputs, `rows` rows of two elements a rank; add the wrong ones to `wrong`."""
    rank, n = comm.rank, comm.world_size
    parts = [of(r, (rows * n, 2), dtype, 3) for r in range(n)]
    total = torch.stack([p.to(torch.int64) for p in parts]).sum(0).to(dtype)
    mine, root = slice(rows * rank, rows * rank + rows), n - 1

    def check(name, got, want):
        wrong.extend([] if same(got, want) else [(name, str(dtype))])

    def poison(*shape):
        return torch.full(shape, 77).to(dtype)

    if dtype != torch.uint16:  # NCCL reduces no 16-bit integers
        x = parts[rank].clone()
        assert comm.all_reduce(x) is x
        check("all_reduce", x, total)
        out = poisoned = poison(rows * n, 2)
        comm.all_reduce(parts[rank], "sum", out)
        check("all_reduce out", poisoned, total)
        x = parts[rank].t().contiguous().t()
        comm.all_reduce(x)
        check("all_reduce strided", x, total)
        x = parts[rank].clone()
        comm.reduce(x, root)
        check("reduce", x, total if rank == root else parts[rank])
        check("reduce_scatter", comm.reduce_scatter(parts[rank], "sum", poison(rows, 2)), total[mine])
        xs = [p[:rows].clone() for p in (parts[rank], 2 * parts[rank].to(torch.int64).to(dtype))][:1]
        check("list", comm.all_reduce(xs)[0], total[:rows])
    x = parts[rank].clone()
    comm.broadcast(x, root)
    check("broadcast", x, parts[root])
    check("all_gather", comm.all_gather(parts[rank], poison(rows * n * n, 2)), torch.cat(parts))
    got = comm.gather(parts[rank], root)
    wrong.extend([("gather", "None")] if (got is None) != (rank != root) else [])
    check("gather", torch.cat(parts) if got is None else got, torch.cat(parts))
    check("scatter", comm.scatter(parts[root] if rank == root else None, root, poison(rows, 2)), parts[root][mine])
    check("all_to_all", comm.all_to_all(parts[rank], poison(rows * n, 2)), torch.cat([p[mine] for p in parts]))
    sent = [(rank + peer) % 3 * rows for peer in range(n)]
    pieces = [of(rank, (k, 2), dtype, 10 + p) for p, k in enumerate(sent)]
    want = torch.cat([of(p, ((rank + p) % 3 * rows, 2), dtype, 10 + rank) for p in range(n)])
    check("all_to_all_v", comm.all_to_all_v(torch.cat(pieces), sent, sent), want)
    comm.barrier()


def fused(comm, wrong):
    """An all_reduce_rms_norm above the threshold runs on NCCL and torch; its rows, one call each, on a fused kernel."""
    residual, weight = of(7, (20, 64)), of(8, (64,)) - 1.5
    x = of(comm.rank, (20, 64), call=20)

    def call(rows):
        norm = torch.full_like(x[rows], 77)
        result = comm.all_reduce_rms_norm_quantized(
            x[rows].clone(), residual[rows].clone(), weight, 0.5, quantize="fp8_per_token", norm_out=norm
        )
        return [t.view(torch.uint8) for t in result]

    long, short = call(slice(0, 20)), call(slice(3, 7))
    counted = [tricomm.stats()[route].get("all_reduce_rms_norm") for route in ("nccl", "kernels")]
    wrong.extend([] if counted == [1, 1] else [f"fused: {counted}"])
    wrong.extend([] if all(torch.equal(a[3:7], b) for a, b in zip(long, short, strict=True)) else ["fused: bits"])
    total = sum(of(r, (20, 64), call=20) for r in range(comm.world_size)) + residual
    wrong.extend([] if torch.equal(long[2], total.view(torch.uint8)) else ["fused: sums"])
    names = {c.algorithm for c in comm.stats().calls if c.collective == "all_reduce_rms_norm"}
    wrong.extend([] if names == {"nccl", "one_shot"} else [str(names)])


def by_route(rank, world_size, tell, url):
    """Kernels run small calls; NCCL runs large ones and types without a kernel; counted, explained, printed."""
    os.environ["TRICOMM_LOG"] = "routing"
    wrong, out = [], io.StringIO()
    with joined(rank, world_size, url) as comm, contextlib.redirect_stdout(out):
        every_collective(comm, 2, torch.float32, wrong)
        assert comm._planner.nccl is None and not tricomm.stats()["nccl"]
        small = dict(tricomm.stats()["kernels"])
        every_collective(comm, 2000, torch.float32, wrong)
        large = dict(tricomm.stats()["nccl"])
        for dtype in MOVED:
            every_collective(comm, 2, dtype, wrong)
        choices = comm.explain("all_reduce", 64), comm.explain("all_reduce", LIMIT + 1)
        forced = comm.explain("all_reduce", LIMIT + 1, algorithm="two_shot")
        before = tricomm.stats()["nccl"]["all_reduce"]
        x = torch.ones(LIMIT)
        comm.all_reduce(x, algorithm="one_shot", protocol="simple")
        assert x[0] == world_size and tricomm.stats()["nccl"]["all_reduce"] == before
        routes = [choice.route for choice in (*choices, forced, comm.explain("send", LIMIT + 1))]
        refusals = [
            refused(call)
            for call in (
                lambda: comm.all_reduce(torch.ones(3, dtype=torch.uint32), algorithm="one_shot"),
                lambda: comm.all_reduce(torch.ones(3, dtype=torch.uint16)),
                lambda: comm.all_reduce(torch.ones(3, dtype=torch.uint32), "bxor"),
                lambda: comm.explain("all_reduce", 8, torch.uint16),
                lambda: comm.send(torch.ones(2, dtype=torch.uint16), (rank + 1) % world_size),
            )
        ]
        y = torch.ones(2)
        comm.all_reduce(y)
        fused(comm, wrong)
        inner = comm._planner.nccl._comm
    lines = [line for line in out.getvalue().splitlines() if "tricomm routing" in line]
    return wrong, small, large, routes, choices[1].reason, refusals, y[0].item(), inner.ended, lines


def without_memory(rank, world_size, tell, url):
    wrong = []
    with joined(rank, world_size, url, memory=False) as comm:
        every_collective(comm, 2, torch.float32, wrong)
        choice = comm.explain("all_reduce", 8)
        for call in (lambda: comm.symmetric((2,), torch.int32), lambda: comm.all_reduce(torch.ones(2), protocol="ll")):
            text = refused(call)
            wrong.extend([] if "reach" in text or "no peer access" in text else [text])
        return wrong, comm.kind, choice.route, choice.reason, tricomm.stats()["kernels"]


def without_memory_or_nccl(rank, world_size, tell, url, how):
    try:
        joined(rank, world_size, url, memory=False, there=rank != 1, nccl=how != "not wanted")
    except errors.ResourceError as error:
        return str(error)


def nodes(rank, world_size, tell, url):
    """Two hosts by TRICOMM_NODE_ID: NCCL runs calls between them, the kernels run calls of a group within one."""
    os.environ["TRICOMM_NODE_ID"] = f"host {rank // 2}"
    wrong = []
    with joined(rank, world_size, url) as comm:
        every_collective(comm, 2, torch.float32, wrong)
        reason = comm.explain("all_gather", 8).reason
        inside = [comm.split([0, 1]), comm.split([2, 3])][rank // 2]
        assert tricomm.stats()["kernels"] == {} and {"all_gather", "all_reduce"} <= set(tricomm.stats()["nccl"])
        across = comm.split([3, 0])
        for group in (inside, across):
            if group is not None:
                x = torch.full((3,), float(rank))
                group.all_reduce(x)
                tell((group.kind, x[0].item()))
                group.close()
        return wrong, reason, comm.kind


def nodes_on_a_cpu(rank, world_size, tell, url):
    os.environ["TRICOMM_NODE_ID"] = f"host {rank}"
    try:
        tricomm.init(url, rank, world_size, "cpu")
    except errors.RendezvousError as error:
        return type(error).__name__, str(error)


def nccl_is_missing(rank, world_size, tell, url):
    """Rank 1 lacks NCCL: the kernels run the calls that they can; the others are refused on all ranks with a reason."""
    with joined(rank, world_size, url, there=rank != 1) as comm:
        x = torch.ones(LIMIT)
        comm.all_reduce(x)
        said = [refused(lambda: comm.all_gather(torch.ones(2, dtype=torch.uint16))) for _ in range(2)]
        y = torch.ones(3)
        comm.all_reduce(y)
        return x[0].item(), y[0].item(), said, comm.explain("all_reduce", LIMIT + 1).route, tricomm.stats()


def fails_on_its_own(rank, world_size, tell, url):
    """NCCL reports an error on rank 0 while no rank is in a call."""
    with joined(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(LIMIT))
        inner = comm._planner.nccl._comm
        left = Path(url.removeprefix("file://") + ".left")
        if rank == 1:
            left.touch()
        else:
            end = time.monotonic() + 60
            while not left.exists():  # otherwise the error may end rank 1's first call
                assert time.monotonic() < end, "rank 1 does not leave its first call"
                time.sleep(0.01)
            inner.error = 6
        time.sleep(1.0)
        result = attempt(lambda: comm.all_reduce(torch.ones(LIMIT)))
        return *result, inner.ended


def dies(rank, world_size, tell, url):
    """A rank is killed while the others are in NCCL, which would wait for it for ever."""
    with joined(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(LIMIT))
        inner = comm._planner.nccl._comm
        tell(os.getpid())
        if rank == 1:
            time.sleep(60)
        kind, text, _ = attempt(lambda: comm.all_reduce(torch.ones(LIMIT)))
        return kind, text, time.monotonic(), inner.ended


def different_calls(rank, world_size, tell, url, sizes, before, compared=True):
    """Ranks that call with different sizes: one in a kernel and one in NCCL, or both in NCCL."""
    if not compared:
        Monitor.diverging = lambda monitor: False
    with joined(rank, world_size, url, timeout=30.0 if compared else 3.0) as comm:
        for size in before:
            comm.all_reduce(torch.ones(size))
        return attempt(lambda: comm.all_reduce(torch.ones(sizes[rank])))


def namespaces(rank, world_size, tell, url):
    """Ranks with one boot id, as in containers, that cannot see each other's processes, nor open a pidfd for them."""
    process.pid_namespace, process.is_pidfd = lambda: 42 + rank, lambda fd: False
    with joined(rank, world_size, url) as comm:
        x = torch.ones(3)
        comm.all_reduce(x)
        return x.tolist(), comm.kind, comm.explain("all_reduce", 8).reason


def absent_on_another_node(rank, world_size, tell, url):
    """A rank on another node does not call; only the timeout can end the other rank's call."""
    os.environ["TRICOMM_NODE_ID"] = f"host {rank}"
    with joined(rank, world_size, url, timeout=3.0) as comm:
        comm.all_reduce(torch.ones(2))
        inner = comm._planner.nccl._comm
        if rank == 1:
            time.sleep(6.0)
            return "slept", "", 0.0, inner.ended
        return *attempt(lambda: comm.all_reduce(torch.ones(2))), inner.ended
