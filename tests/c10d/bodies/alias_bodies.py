"""Calls whose tensors share memory: each gives the result of its inputs as they were when the call was made."""

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from tests.c10d.bodies.groups import default_group, of, poisoned, same

N = 6


def _coalesced(parts, rank, xs):
    """all_reduce_coalesced of views of one tensor: later ones are written last, and all hold sums of the inputs."""
    dist.all_reduce_coalesced([view(xs) for view in VIEWS])
    return [(xs, sum(parts))]


VIEWS = [lambda x: x, lambda x: x[:4], lambda x: x[1:], lambda x: x[::2], lambda x: x.view(2, 3).t(), lambda x: x]


def _manager(parts, rank, x):
    with c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)
    return [(x, sum(parts))]


def _functional(parts, rank, x):
    outs = functional.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)
    return [(functional.wait_tensor(out), sum(parts)) for out in outs]


def _broadcast(parts, rank, x):
    dist._broadcast_coalesced(dist.group.WORLD, [x, x], 1 << 20, 1)
    return [(x, parts[1])]


def _gathers(parts, rank, x):
    """The output of the first all_gather holds the input of the second one."""
    first, second = poisoned((2 * N,)), poisoned((2 * N,))
    inner = first[3 : N + 3]
    inner.copy_(x)
    with c10d._coalescing_manager():
        dist.all_gather_into_tensor(first, 2 * x)
        dist.all_gather_into_tensor(second, inner)
    return [(first, 2 * torch.cat(parts)), (second, torch.cat(parts))]


def _scatters(parts, rank, x):
    """The output of the first reduce_scatter is in the input of the second one."""
    second = poisoned((N // 2,))
    before = [part.clone() for part in parts]
    with c10d._coalescing_manager():
        dist.reduce_scatter_tensor(x[1:4], 2 * x)
        dist.reduce_scatter_tensor(second, x)
    mine = slice(rank * N // 2, (rank + 1) * N // 2)
    return [(x[1:4], 2 * sum(before)[mine]), (second, sum(before)[mine])]


def _lists(parts, rank, x):
    """Lists of outputs that share memory: the last one is written last."""
    gathered, exchanged, out = poisoned((N,)), poisoned((N // 2,)), poisoned((N,))
    dist.all_gather([gathered, gathered], x)
    dist.all_to_all([exchanged, exchanged], [*x.split(N // 2)])
    dist.gather(x, [out, out] if rank == 0 else None)
    found = [(gathered, parts[1]), (exchanged, parts[1].split(N // 2)[rank])]
    return found + ([(out, parts[1])] if rank == 0 else [])


def _single(parts, rank, x):
    """Inputs inside of the only output, and not where a call in place has them."""
    out = poisoned((2 * N,))
    inner = out[3 : N + 3]
    inner.copy_(x)
    dist.all_gather_into_tensor(out, inner)
    y = x.clone()
    dist.all_to_all_single(y, y)
    z = x.clone()
    dist.reduce_scatter_tensor(z[1:4], z)
    swapped = torch.cat([part.split(N // 2)[rank] for part in parts])
    return [(out, torch.cat(parts)), (y, swapped), (z[1:4], sum(parts).split(N // 2)[rank])]


def _foreign(parts, rank, x):
    """Two tensors over one NumPy array, so they share memory but not a storage."""
    array = np.zeros(N + 1, np.float32)
    array[:N] = x.numpy()
    out = torch.from_numpy(array[1:])
    dist.all_to_all_single(out, torch.from_numpy(array[:N]))
    return [(out, torch.cat([part.split(N // 2)[rank] for part in parts]))]


def _in_place(parts, rank, x):
    out = poisoned((2 * N,))
    mine = out[rank * N : (rank + 1) * N]
    mine.copy_(x)
    dist.all_gather_into_tensor(out, mine)
    part = x[rank * N // 2 : (rank + 1) * N // 2]
    want = sum(parts).split(N // 2)[rank]
    dist.reduce_scatter_tensor(part, x)
    return [(out, torch.cat(parts)), (part, want)]


CASES = [_coalesced, _manager, _functional, _broadcast, _gathers, _scatters, _lists, _single, _foreign, _in_place]


def overlapping(rank, world_size, tell, url, route):
    wrong = []
    with default_group(rank, world_size, url, route, timeout=20.0):
        for number, call in enumerate(CASES):
            parts = [of(r, (N,), call=number) for r in range(world_size)]
            try:
                pairs = call(parts, rank, parts[rank].clone())
                wrong += [(call.__name__, got, want) for got, want in pairs if not same(got, want)]
            except Exception as error:
                wrong.append((call.__name__, f"{type(error).__name__}: {error}"))
    return [str(entry) for entry in wrong]
