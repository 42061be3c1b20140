"""FSDP2 with tricomm's collectives gives the bits of plain FSDP2, and reuses a bounded amount of memory."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests import ranks
from tests.c10d.bodies.groups import default_group, of, refused, same
from tricomm import GroupAborted, fsdp2

MIXED_TYPES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ONE_TYPE = MixedPrecisionPolicy()
RESHARD, KEEP, MIXED, PLAIN = True, False, True, False  # reshard_after_forward, mixed precision


def model(mesh, reshard, policy):
    """A model with numbers of rows that no world size divides, biases of any length, and a scale in the root module."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(net, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def trained(net, rank, steps=2):
    """Losses and parameters after some steps."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.0625)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses, [p.full_tensor().detach() for p in net.parameters()]


@contextmanager
def handles_seen(group):
    """The handles of the calls made in this block; None for a call over ordinary memory."""
    seen = []

    def spied(method):
        def call(out, x, options, handle=None):
            seen.append(handle)
            return method(out, x, options, handle)

        return call

    group.all_gather_single = spied(group.all_gather_single)
    group.reduce_scatter_single = spied(group.reduce_scatter_single)
    try:
        yield seen
    finally:
        del group.all_gather_single, group.reduce_scatter_single


def same_as_plain(rank, world_size, tell, url, route, cases):
    """Train over `route` with each of `cases`, (reshard_after_forward, mixed precision); return the wrong results."""
    wrong = []
    with default_group(rank, world_size, url, route) as world:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
        for reshard, mixed in cases:
            policy = MIXED_TYPES if mixed else ONE_TYPE
            losses, parameters = trained(model(mesh, reshard, policy), rank)
            net = model(mesh, reshard, policy)
            mine = fsdp2.use(net)
            with handles_seen(world) as seen:
                result, others = trained(net, rank)
            if result != losses or not all(map(same, others, parameters)):
                wrong.append((reshard, mixed, result, losses))
            in_place = route == "kernels" and world_size > 1
            if any((handle is not None) != in_place for handle in seen) or not seen:
                wrong.append((reshard, mixed, "not in symmetric memory" if in_place else "in symmetric memory"))
            sizes = [comm.nbytes for comm in mine]
            trained(net, rank, 1)
            if [comm.nbytes for comm in mine] != sizes or (min(sizes) > 0) != in_place:
                wrong.append((reshard, mixed, "memory grows", sizes))
            for comm in mine:
                comm.close()
    return wrong


@pytest.mark.parametrize(
    ("world_size", "route", "cases"),
    [
        (2, "kernels", [(RESHARD, PLAIN), (KEEP, MIXED)]),
        pytest.param(3, "kernels", [(RESHARD, MIXED)], marks=pytest.mark.exhaustive),
        pytest.param(3, "kernels", [(KEEP, PLAIN)], marks=pytest.mark.exhaustive),
        (2, "gloo", [(RESHARD, MIXED)]),
    ],
)
def test_trains_to_the_bits_of_the_plain_backend(world_size, route, cases, url):
    assert ranks.run(world_size, same_as_plain, url, route, cases, timeout=120) == [[]] * world_size


@ranks.each(2, True)
def test_whole_numbers_give_the_gradients_of_gloo(rank, world_size, tell, url):
    """Integer gradients are exact in any order of addition, so torch's Gloo and the kernels agree."""

    def gradients(group, ours):
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
        for p in net.parameters():
            p.data = of(0, p.shape, call=p.numel())
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if ours:
            fsdp2.use(net, group)
        else:
            for module in net.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)
        loss = net(of(rank, (4, 5), call=7)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad.full_tensor() for p in net.parameters())]

    with default_group(rank, world_size, url, "kernels") as world:
        gloo = dist.new_group(backend="gloo")
        return all(map(same, gradients(gloo, False), gradients(world, True)))


@ranks.each(2, True)
def test_memory_is_bounded_reused_and_given_back(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
        losses, parameters = trained(model(mesh, True, ONE_TYPE), rank)
        net = model(mesh, True, ONE_TYPE)
        mine = fsdp2.use(net, max_bytes=600)  # enough for some of the layers
        result, others = trained(net, rank)
        assert result == losses and all(map(same, others, parameters))
        assert [0 < comm.nbytes <= 600 for comm in mine] == [True, True], [comm.nbytes for comm in mine]
        gather, scatter = mine

        size, given = (4 * world_size,), {"dtype": torch.float32, "device": torch.device("cpu")}
        first = gather.allocate(size, **given)
        address, part = first.data_ptr(), first[1:3]
        del first  # a view is left
        second = gather.allocate(size, **given)
        assert second.data_ptr() != address
        del part
        assert gather.allocate(size, **given).data_ptr() == address

        other = dist.new_group(list(range(world_size)))
        row = second[: len(second) // world_size]
        refused(lambda: gather(second, row, other), "made for group", "get_group")
        refused(lambda: fsdp2.use(nn.Linear(2, 2)), "fully_shard first")
        refused(lambda: fsdp2.AllGather(max_bytes=-1), "max_bytes=-1")
        kept = fsdp2.ReduceScatter(other)
        dist.destroy_process_group(other)
        refused(lambda: kept.allocate(size, **given), "destroyed", kind=GroupAborted)
        for comm in mine:
            comm.close()
            comm.close()
        second.fill_(1)  # still mapped
        result, others = trained(model(mesh, True, ONE_TYPE), rank)
        return result == losses


def other_buffers(rank, world_size, tell, url):
    with default_group(rank, world_size, url, "kernels") as world:
        gather = fsdp2.AllGather()
        size, cpu = (4 * world_size,), torch.device("cpu")
        first = gather.allocate(size, dtype=torch.float32, device=cpu)
        second = gather.allocate(size, dtype=torch.float32, device=cpu)
        lent = second if rank else first
        gather(lent, lent[4 * rank : 4 * rank + 4], world)


def test_ranks_that_lend_different_buffers_get_an_error(url):
    with ranks.start(2, other_buffers, url) as started:
        assert [outcome.error for outcome in started.results()] == ["CollectiveMismatch"] * 2


class _Stream:
    def __init__(self):
        self.after = []

    def wait_stream(self, other):
        self.after.append(other)


def test_a_buffer_of_another_stream_is_ordered_after_it(monkeypatch):
    """As with torch's allocator: a stream may still use a buffer after FSDP has freed it."""
    streams = [_Stream(), _Stream()]
    monkeypatch.setattr(fsdp2, "wrap", lambda group: _Group())
    buffers = fsdp2._Buffers("AllGather", "all_gather", "group", 1 << 20)
    cuda = torch.device("cuda", 0)
    for turn in (0, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, turn=turn: streams[turn])
        lent = buffers.allocate((8,), torch.float32, cuda)
        assert lent.numel() == 8 and buffers.nbytes == 32
        del lent
    assert [stream.after for stream in streams] == [[], [streams[0]]]


class _Group:
    """A fake group of two ranks on a GPU; its memory is on the CPU."""

    def size(self):
        return 2

    def symmetric(self, call, numel):
        assert (call.collective, call.count, call.device.type) == ("all_gather", numel // 2, "cuda")
        return _Handle(numel)


class _Handle:
    def __init__(self, numel):
        self.local = torch.zeros(numel)

    def lend(self, shape, given_back):
        lent = torch.zeros(shape)
        weakref.finalize(lent.untyped_storage(), given_back)
        return lent
