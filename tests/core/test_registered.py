"""Tensors that users have already, read and written where they lie; by real processes on a CPU."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.core.bodies import registered_bodies as bodies
from tests.core.bodies.suspension_bodies import and_left
from tricomm.store import segments


def test_collectives_read_and_write_where_the_tensor_lies(url):
    for wrong, left in ranks.run(3, and_left, bodies.in_place, url):
        assert wrong == []
        assert left == {"fds": [], "maps": [], "threads": []}


WORDS = {
    "private": ("ResourceError", "rank 0", "share_memory_()", "comm.symmetric()"),
    "one rank's is private": ("ResourceError", "rank 0: the tensor does not lie in shared memory"),
    "shape": ("InvalidArgument", "rank 0 has torch.float32 of shape [16], rank 1 has torch.float32 of shape [20]"),
    "dtype": ("InvalidArgument", "torch.int32", "torch.float32"),
    "alignment": ("InvalidArgument", "rank 1: register: the tensor begins 4 bytes past a multiple of 16"),
    "strided": ("InvalidArgument", "a contiguous tensor with elements is needed"),
    "empty": ("InvalidArgument", "a contiguous tensor with elements is needed"),
    "no tensor": ("InvalidArgument", "rank 1: register"),
    "explained": ("tensors are staged, because", "share_memory_()"),
}


def test_every_rank_is_told_of_a_tensor_that_cannot_be(url):
    for said, right, mixed in ranks.run(2, bodies.refusals, url):
        for name, words in WORDS.items():
            assert all(word in said[name] for word in words), (name, said[name])
        assert right
        assert mixed.startswith("CollectiveMismatch") and "all_reduce" in mixed


def test_a_tensor_that_is_given_other_memory_is_refused_and_the_registered_memory_stays(url):
    for rank, (sums, moved, theirs, rows, numbers, mixed) in enumerate(ranks.run(2, bodies.other_memory, url)):
        assert sums == ([1.0, 3.0, 5.0, 7.0, 9.0], 5.0)
        assert (rank or "has other memory now" in moved) and theirs == (sums[0] if rank else [])
        assert "shape ()" in rows and "multiple of the world size 2" in rows
        assert numbers == ([2], 3, [0, 3], [0])
        assert mixed.startswith("CollectiveMismatch") and "handle 4" in mixed and "handle 5" in mixed


def test_torchs_pointers_are_those_of_segments(url):
    for same, offsets, order, outside, none in ranks.run(2, bodies.of_torch, url):
        assert same == [256, 256]
        assert "rank 0's tensor lies 256 bytes into its segment, rank 1's 320" in offsets
        assert "rank 0 of 2 is rank 1 of 2 in the given group" in order
        assert "rank 1: the tensor does not lie in its segment" in outside
        assert outside.startswith("ResourceError") and "no tensor of torch's symmetric memory" in none


WHY_NOT = {
    "one rank has none": "rank 1: torch's symmetric memory has no multicast address here",
    "another kind of memory": "rank 0: torch gives no multicast address: NYI",
    "a pool": "rank 0: the tensor's storage begins inside a segment",
    "not aligned": "rank 0: torch's multicast address is no multiple of 16",
    "the group has none": "the switch refuses",
}


def test_torchs_multicast_address_is_used_if_all_ranks_have_it(url):
    for said in ranks.run(2, bodies.of_torch_through_the_switch, url):
        assert said["all"] == (64, "") and said["right"] == (True, "multicast")
        for name, why in WHY_NOT.items():
            address, reason, forced, explained = said[name]
            assert address == 0 and reason.startswith(why), (name, said[name])
            assert forced.startswith("InvalidArgument") and why in forced, (name, forced)
            assert f"not through a switch: {why}" in explained, (name, explained)


def test_memory_of_this_library_has_to_be_sealed_all_the_same(monkeypatch):
    import os

    import torch

    from tricomm.errors import ResourceError

    x = torch.ones(1024).share_memory_()
    fd, size = x.untyped_storage()._share_fd_cpu_()
    with pytest.raises(ResourceError, match="not sealed"):
        segments.Segment.attach([os.dup(fd)], size, readonly=False)
    segments.Segment.attach([os.dup(fd)], size, readonly=False, sealed=False).close()
