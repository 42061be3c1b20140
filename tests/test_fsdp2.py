"""FSDP2 over symmetric memory: losses, parameters and gradients to the bit; memory that is reused, and bounded."""

from __future__ import annotations

import pytest
import torch

from tests import ranks
from tests.c10d.bodies import fsdp2_bodies as bodies
from tricomm import fsdp2

RESHARD, KEEP, MIXED, PLAIN = True, False, True, False  # reshard_after_forward, mixed precision


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
    assert ranks.run(world_size, bodies.same_as_plain, url, route, cases, timeout=120) == [[]] * world_size


def test_whole_numbers_give_the_gradients_of_gloo(url):
    assert ranks.run(2, bodies.integers, url) == [True, True]


def test_memory_is_bounded_reused_and_given_back(url):
    assert ranks.run(2, bodies.limits, url) == [True, True]


def test_ranks_that_lend_different_buffers_are_told(url):
    with ranks.start(2, bodies.other_buffers, url) as started:
        assert [outcome.error for outcome in started.results()] == ["CollectiveMismatch"] * 2


class _Stream:
    def __init__(self):
        self.after = []

    def wait_stream(self, other):
        self.after.append(other)


def test_a_buffer_of_another_stream_is_ordered_after_it(monkeypatch):
    """As a block of torch's allocator: what FSDP let go of on a stream may still be in use there."""
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
    """Two ranks on a GPU, whose memory lies on the CPU."""

    def size(self):
        return 2

    def symmetric(self, call, numel):
        assert (call.collective, call.count, call.device.type) == ("all_gather", numel // 2, "cuda")
        return _Handle(numel)


class _Handle:
    def __init__(self, numel):
        self.local = torch.zeros(numel)

    def lend(self, shape, given_back):
        import weakref

        lent = torch.zeros(shape)
        weakref.finalize(lent.untyped_storage(), given_back)
        return lent
