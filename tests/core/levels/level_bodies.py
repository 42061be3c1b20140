"""What ranks of several nodes do, as far as TRICOMM_NODE_ID goes: Gloo between them, or a fake NCCL."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from functools import partial

import torch

import tricomm
from tests.core.bodies import nccl_bodies
from tests.core.bodies.common_bodies import attempt
from tricomm import errors
from tricomm.core import bootstrap
from tricomm.core.levels import across, bridge
from tricomm.kernels.dtypes import DTYPES

SMALL = 256 * 1024


def joined(rank, world_size, url, per_node=2, fake=False, **options):
    """A communicator of nodes of `per_node` ranks; `fake`: with a fake NCCL behind the kernels and across."""
    os.environ["TRICOMM_NODE_ID"] = f"host {rank // per_node}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if fake:
        return nccl_bodies.joined(rank, world_size, url, **options)
    given = tricomm.Options(**{"timeout": 30.0, "arena_bytes": SMALL, **options})
    return tricomm.init(url, rank, world_size, "cpu", options=given)


def data(rank, count, dtype, op, number):
    """Values whose result is exact in every order: small ones, and for avg multiples of the number of ranks."""
    most = 2 if op == "prod" else 4
    x = torch.randint(0, most, (count,), generator=torch.Generator().manual_seed(101 * number + rank))
    if dtype.is_complex:
        return torch.complex(x.double(), 1 - x.double()).to(dtype)
    return x.to(dtype)


def expected(world_size, count, dtype, op, number):
    parts = [data(rank, count, dtype, op, number) for rank in range(world_size)]
    wide = [p.to(torch.complex128 if dtype.is_complex else torch.int64) for p in parts]
    stack = torch.stack(wide)
    if op in ("sum", "avg"):
        total = stack.sum(0)
        if dtype == torch.bool:
            total = total > 0
        if op == "avg":
            whole = not (dtype.is_floating_point or dtype.is_complex)
            total = torch.div(total, world_size, rounding_mode="trunc") if whole else total / world_size
    elif op in ("min", "max", "prod"):
        total = {"min": stack.amin, "max": stack.amax, "prod": stack.prod}[op](0)
    else:
        total = wide[0]
        for other in wide[1:]:
            total = {"band": total & other, "bor": total | other, "bxor": total ^ other}[op]
    return total.to(dtype)


def one_call(comm, count, dtype, op, number, offset=0, protocol=None, way="place"):
    """One all_reduce, over poisoned surroundings; what is wrong with it, or None."""
    x = torch.full((count + offset + 3,), 77, dtype=torch.float64).to(dtype)
    x[offset : offset + count] = data(comm.rank, count, dtype, op, number)
    mine, want = x[offset : offset + count], expected(comm.world_size, count, dtype, op, number)
    how = {"algorithm": "two_level", "protocol": protocol} if protocol else {}
    before = mine.clone()
    out = None
    if way == "out":
        out = torch.full((count + 1,), 77, dtype=torch.float64).to(dtype)[1:]
        how["out"] = out
    if way == "strided":
        wide = torch.stack([mine, mine], 1)
        mine = wide[:, 0]
    if way == "async":
        work = comm.all_reduce(mine, op, async_op=True, **how)
        got = work.wait()
    else:
        got = comm.all_reduce(mine, op, **how)
    poison = torch.full((3,), 77, dtype=torch.float64).to(dtype)
    beside = nccl_bodies.same(x[offset + count :], poison)
    kept = way != "out" or nccl_bodies.same(mine.clone(), before)
    if not (
        nccl_bodies.same(got.clone(memory_format=torch.contiguous_format).as_strided(want.shape, (1,)), want)
        and beside
        and kept
    ):
        return (str(dtype), op, count, offset, protocol, way, beside, kept)
    return None


def all_kinds(rank, world_size, tell, url, per_node, fake, dtypes):
    """Every type and operation in both forms, odd sizes, misaligned, in place and not; then what it says of itself."""
    wrong = []
    with joined(rank, world_size, url, per_node, fake) as comm:
        number = 0
        for name in dtypes:
            dtype = getattr(torch, name)
            for op in DTYPES[name].ops:
                if op == "avg" and (
                    world_size & (world_size - 1) or dtype.itemsize < 4 and not dtype.is_floating_point
                ):
                    continue
                if fake and (op in ("band", "bor", "bxor") or name in ("int16", "complex64", "complex128")):
                    continue
                number += 1
                protocol = ("shards", "shards", "leaders")[number % 3]
                count = (1, 7, 64, 129, 1000)[number % 5]
                way = ("place", "out", "strided", "async")[number % 4]
                wrong.append(one_call(comm, count, dtype, op, number, number % 7, protocol, way))
        for count in (0, 1, 300, 40001):  # by the table; the last one goes in several chunks
            wrong.append(one_call(comm, count, torch.float32, "sum", 1000 + count))
        xs = [torch.full((n,), float(rank + 1)) for n in (3, 5)]
        comm.all_reduce(xs)
        total = world_size * (world_size + 1) / 2
        wrong.append(None if all((x == total).all() for x in xs) else "list")
        floats = torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
        bits = []
        for protocol in ("shards", "leaders"):
            y = floats.clone()
            comm.all_reduce(y, algorithm="two_level", protocol=protocol)
            bits.append(hashlib.sha256(y.view(torch.uint8).numpy().tobytes()).hexdigest())
        said = comm.explain("all_reduce", 4096), comm.explain("all_reduce", 64)
        stats = tricomm.stats()
        return [w for w in wrong if w], bits, [(c.algorithm, c.protocol, c.route, c.reason) for c in said], stats


def faults(rank, world_size, tell, url, fake, names):
    """One group after another, each lost by another fault; what this rank got."""

    def interrupted(comm):
        if rank == 2:
            time.sleep(0.5)
            comm.interrupted(KeyboardInterrupt())
        comm.all_reduce(torch.ones(9))

    def other(comm):
        comm.broadcast(torch.ones(500), 0) if rank == 1 else comm.all_reduce(torch.ones(500))

    scenes = {
        "inside": lambda comm: comm.all_reduce(torch.ones(500 + (rank == 1))),
        "between": lambda comm: comm.all_reduce(torch.ones(500 + (rank > 1))),
        "other collective": other,
        "rank late": lambda comm: time.sleep(3.5) if rank == 3 else comm.all_reduce(torch.ones(500)),
        "node late": lambda comm: time.sleep(3.5) if rank > 1 else comm.all_reduce(torch.ones(500)),
        "interrupt": interrupted,
    }
    results = {}
    for name in names:
        limit = 2.0 if "late" in name else 30.0
        with joined(rank, world_size, f"{url}{name}", fake=fake, timeout=limit) as comm:
            comm.all_reduce(torch.ones(5))
            results[name] = attempt(partial(scenes[name], comm))
    end = time.monotonic() + 5.0  # a thread in Gloo ends with the other side's connections
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.02)
    return results, sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())


def unprotected(rank, world_size, tell, url, without):
    """Nodes that make different calls of one size; without the comparison both take the other's data for their own."""
    if without:
        across.GlooAcross._compare = lambda *_: None
    with joined(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(5))
        return attempt(lambda: comm.all_reduce(torch.ones(500), "max" if rank > 1 else "sum"))


def unbridged(rank, world_size, tell, url, fake, victims, **options):
    """As `hurt`, and nothing carries faults between the levels and the nodes."""
    bridge.Bridge.look = lambda *_: None
    return hurt(rank, world_size, tell, url, fake, victims, **options)


def hurt(rank, world_size, tell, url, fake, victims, **options):
    """`victims` are killed or stopped while the others are in a call; what those get."""
    with joined(rank, world_size, url, fake=fake, **options) as comm:
        comm.all_reduce(torch.ones(700))
        tell(os.getpid())
        if rank in victims:
            time.sleep(60)
        kind, text, _ = attempt(lambda: comm.all_reduce(torch.ones(700)))
        return kind, text, time.monotonic()


def refused(rank, world_size, tell, url, case):
    """What a group says that has no two levels, of an all_reduce that is forced and of one that is not."""
    options = {"two_level": False} if case == "off" else {"batch_invariant": True} if case == "invariant" else {}
    if case == "uneven":
        world_size -= 1
        if rank == world_size:
            return None
    if case == "memory":
        real = bootstrap.open_arena

        def scarce(*args):
            if rank == 3:
                raise errors.ResourceError("no memory on this node")
            return real(*args)

        bootstrap.open_arena = scarce
    said = []
    try:
        with joined(rank, world_size, url, fake=case != "uneven on a cpu", **options) as comm:
            x = torch.ones(300)
            for call in (
                lambda: comm.all_reduce(x),
                lambda: comm.all_reduce(x, algorithm="two_level"),
                lambda: comm.explain("all_reduce", 1200).reason,
            ):
                try:
                    said.append(str(call()))
                except errors.InvalidArgument as error:
                    said.append(str(error))
            said.append(x[0].item())
    except errors.TricommError as error:
        return f"{type(error).__name__}: {error}"
    return said


def bad_requests(rank, world_size, tell, url):
    """Forms, types and collectives that two levels have not; the group goes on. Then what an ordinary group says."""
    said = []

    def tried(call):
        try:
            call()
        except errors.InvalidArgument as error:
            said.append(str(error))

    with joined(rank, world_size, url) as comm:
        x = torch.ones(6)
        tried(lambda: comm.all_reduce(x, algorithm="two_level", protocol="ll"))
        tried(lambda: comm.all_reduce(x, algorithm="one_shot"))
        tried(lambda: comm.all_reduce(x.to(torch.int8), "avg"))
        tried(lambda: comm.all_reduce(x.to(torch.uint16)))
        tried(lambda: comm.all_gather(x, algorithm="two_level"))
        tried(lambda: comm.all_gather(x))
        tried(lambda: comm.barrier())
        tried(lambda: comm.symmetric((4,), torch.float32))
        tried(lambda: comm.register(x))
        tried(lambda: comm.send(x, comm.rank ^ 1))
        comm.all_reduce(x)
        assert x[0] == world_size
    with joined(rank, world_size, f"{url}again", per_node=world_size) as comm:
        tried(lambda: comm.all_reduce(x, algorithm="two_level"))
    return said


def islands(rank, world_size, tell, url, file):
    """Islands on one node, by a file: every form, then by the table; what it says, and a mismatch between islands."""
    wrong = []
    given = tricomm.Options(timeout=20.0, arena_bytes=SMALL, topology=file)
    with tricomm.init(url, rank, world_size, "cpu", options=given) as comm:
        for number, name in enumerate(("float32", "bfloat16", "int8", "bool")):
            for op in ("sum", "max"):
                how = ("shards", "leaders")[number % 2]
                wrong.append(one_call(comm, 257 + number, getattr(torch, name), op, number, number, how, "out"))
        wrong.append(one_call(comm, 300, torch.float32, "sum", 9))
        said = comm.explain("all_reduce", 4096), comm.explain("all_reduce", 4096, algorithm="two_level")
        lost = attempt(lambda: comm.all_reduce(torch.ones(300 + (rank > 1)), algorithm="two_level"))
    return [w for w in wrong if w], [(c.route, c.reason) for c in said], lost
