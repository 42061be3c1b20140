"""An invalid setting on one rank is named on all ranks at once; torch's default device and dtype have no effect."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import SMALL, attempt, communicator

SENSELESS = [
    ("communicator", "TRICOMM_BATCH_INVARIANT", "perhaps"),
    ("communicator", "TRICOMM_WIRE", "e5m2"),
    ("communicator", "TRICOMM_STATS", "soon"),
    ("communicator", "TRICOMM_STATS_EVERY", "x"),
    ("communicator", "TRICOMM_LOG", "bogus"),
    ("communicator", "RANK", "x"),
    ("communicator", "WORLD_SIZE", "many"),
    ("kernels", "TRICOMM_ARENA_BYTES", "100"),
    ("kernels", "TRICOMM_STATS", "soon"),
    ("gloo", "TRICOMM_CHECK", "x"),
    ("gloo", "TRICOMM_LOG", "bogus"),
]


def senseless(rank, world_size, tell, url, route, name, value):
    """Rank 1 sets the variable `name`; return each rank's error, and whether a group can be made without it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    before = os.environ.get(name)
    if rank == 1:
        os.environ[name] = value
        time.sleep(0.3)  # its peers wait for it

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


@pytest.mark.parametrize("route, name, value", SENSELESS)
def test_an_invalid_variable_on_one_rank_is_reported_on_all(route, name, value, url):
    ((kind, text, seconds), x), (mine, y) = ranks.run(2, senseless, url, route, name, value)
    assert mine[0] == "InvalidArgument" and f"{name}=" in mine[1]
    assert kind in ("InvalidArgument", "RendezvousError") and name in text and "rank" in text, (kind, text)
    assert seconds < 1.0 + ranks.BUSY
    assert x == y == [2.0, 2.0]


@ranks.each(2, [2.0, 2.0])
def test_a_token_and_a_name_of_a_node_are_bytes(rank, world_size, tell, url):
    os.environb[b"TRICOMM_TOKEN"], os.environb[b"TRICOMM_NODE_ID"] = b"\xffsecret\xfe", b"n\xf6de"
    with communicator(rank, world_size, url, timeout=5.0) as comm:
        x = torch.ones(2)
        comm.all_reduce(x)
        return x.tolist()


def elsewhere(rank, world_size, tell, url, route):
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


@pytest.mark.parametrize("route", ["communicator", "gloo", "kernels"])
def test_torchs_default_device_and_dtype_have_no_effect(route, url):
    ones, twos = [1.0] * 4, [2.0] * 4
    want = [twos, twos]
    if route == "communicator":
        want = [twos, ones + ones, [2.0, 2.0], ones, ones, ones, twos]
    assert ranks.run(2, elsewhere, url, route) == [want] * 2
