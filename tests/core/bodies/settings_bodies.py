"""Ranks of which one has a setting that makes no sense, or that torch's factories follow."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

import tricomm
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import SMALL, attempt, communicator


def senseless(rank, world_size, tell, url, route, name, value):
    """Rank 1 has the variable `name`; what each rank hears of it, and whether a group can be made without it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    before = os.environ.get(name)
    if rank == 1:
        os.environ[name] = value
        time.sleep(0.3)  # the others wait for it

    def make():
        if route == "communicator":
            options = tricomm.Options(**SMALL)
            tricomm.init(url, device="cpu", options=options).close()
        else:
            os.environ["TRICOMM_CPU"] = route
            dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size)
            dist.all_reduce(torch.ones(2))

    heard = attempt(make)
    if rank == 1:
        del os.environ[name]
    if before is not None:
        os.environ[name] = before
    with communicator(rank, world_size, f"{url}-again") as comm:
        x = torch.ones(2)
        comm.all_reduce(x)
    return heard, x.tolist()


def token_of_bytes(rank, world_size, tell, url, token, node):
    os.environb[b"TRICOMM_TOKEN"], os.environb[b"TRICOMM_NODE_ID"] = token, node
    with communicator(rank, world_size, url, timeout=5.0) as comm:
        x = torch.ones(2)
        comm.all_reduce(x)
        return x.tolist()


def elsewhere(rank, world_size, tell, url, route):
    """Every kind of call while torch makes tensors on another device, and of another type, by default."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(4, device="cpu", dtype=torch.float32)
    said = []
    if route == "communicator":
        with communicator(rank, world_size, url) as comm:
            said += [comm.all_reduce(ones.clone()), comm.all_gather(ones), comm.reduce_scatter(ones)]
            said += [comm.all_to_all(ones), comm.broadcast(ones.clone(), 0)]
            w = comm.symmetric((4,), torch.float32)
            w.local.fill_(rank)
            said.append(comm.all_reduce(w).local.clone())
            x = ones.clone()
            comm.send(ones * 3, 1) if rank == 0 else comm.recv(x, 0)
            comm.suspend()
            comm.resume()
            comm.barrier()
            said.append(comm.split([1, 0]).all_reduce(ones.clone()))
    else:
        with default_group(rank, world_size, url, route):
            outs = [torch.empty_like(ones) for _ in range(world_size)]
            x, sparse = ones.clone(), ones.to_sparse()
            for call in (
                lambda: dist.all_reduce(x),
                lambda: dist.all_reduce(sparse),
                lambda: dist.all_gather(outs, ones),
                lambda: dist.all_gather_into_tensor(torch.empty(8, device="cpu", dtype=torch.float32), ones),
                lambda: dist.reduce_scatter_tensor(outs[0][:2], ones),
                lambda: dist.reduce(outs[0], 0),
                lambda: dist.scatter(outs[1], [ones, ones] if rank == 0 else None),
                lambda: dist.gather(ones, outs if rank == 0 else None),
                lambda: dist.all_to_all_single(torch.empty_like(ones), ones),
                lambda: dist.all_reduce(outs[1].bfloat16()),
                lambda: dist.send(ones, 1) if rank == 0 else dist.recv(outs[0], 0),
                dist.barrier,
            ):
                call()
            said += [x, sparse.to_dense()]
    return [y.tolist() for y in said]
