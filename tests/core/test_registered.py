"""Registered user tensors are read and written without a copy, by real processes on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests import ranks
from tests.core.bodies.common_bodies import and_left, communicator, refused
from tricomm.store import segments
from tricomm.store.arenas import registered


def _shared(numbers):
    """A tensor in torch's shared memory, not at its beginning."""
    whole = torch.full((numbers.numel() + 16,), 77, dtype=numbers.dtype).share_memory_()
    part = whole[16 : 16 + numbers.numel()].view(numbers.shape)
    part.copy_(numbers)
    return part


def in_place(rank, world_size, tell, url):
    """Every collective over a registered tensor, twice, with different numbers; return the wrong ones."""
    wrong = []
    with communicator(rank, world_size, url) as comm:
        for turn, shape in enumerate([(world_size,), (3 * world_size, 5), (world_size * 700,)]):
            parts = [torch.arange(torch.Size(shape).numel()).view(shape) + 100 * r + turn for r in range(world_size)]
            x = _shared(parts[rank])
            address = x.data_ptr()
            w = comm.register(x)
            wrong += [] if w.local.data_ptr() == x.data_ptr() == address else [(turn, "local")]
            peers = [peer.clone() for peer in w.peers]
            comm.barrier()
            wrong += [] if all(map(torch.equal, peers, parts)) else [(turn, "peers")]
            total = sum(parts)
            out = torch.full(shape, -1)
            wrong += [] if torch.equal(comm.all_reduce(w, out=out), total) else [(turn, "out of place")]
            wrong += [] if torch.equal(comm.all_gather(w), torch.cat(parts)) else [(turn, "all_gather")]
            rows = total.view(world_size, -1)[rank].reshape(-1)
            wrong += [] if torch.equal(comm.reduce_scatter(w).reshape(-1), rows) else [(turn, "reduce_scatter")]
            wrong += [] if comm.all_reduce(w) is w and torch.equal(x, total) else [(turn, "in place")]
            comm.suspend()
            wrong += [] if "suspended" in refused(lambda w=w: w.local) else [(turn, "use while suspended")]
            comm.resume()
            wrong += [] if torch.equal(x, total) else [(turn, "contents are the user's, and stay")]
            wrong += [] if comm.all_reduce(w) is w and torch.equal(x, world_size * total) else [(turn, "after resume")]
            comm.barrier()
            w.close()
            wrong += (
                [] if torch.equal(x, world_size * total) and "closed" in refused(lambda w=w: w.local) else ["close"]
            )
        names = {(c.algorithm, c.protocol) for c in comm.stats().calls if c.collective == "all_reduce"}
        # Sizes that are pushed as LL words if they are staged.
        wrong += [] if names == {("one_shot", "simple"), ("two_shot", "simple")} else [names]
        kept = comm.register(_shared(torch.ones(4)))
        comm.barrier()
    wrong += [] if "closed" in refused(lambda: kept.local) or kept.local.sum() == 4 else ["after the end"]
    return wrong


def test_collectives_read_and_write_the_registered_tensor_itself(url):
    for wrong, left in ranks.run(3, and_left, in_place, url):
        assert wrong == []
        assert left == {}


WORDS = {
    "private": ("ResourceError", "rank 0", "share_memory_()", "comm.symmetric()"),
    "one rank's is private": ("ResourceError", "rank 0: the tensor is not in shared memory"),
    "shape": ("InvalidArgument", "rank 0 has torch.float32 of shape [16], rank 1 has torch.float32 of shape [20]"),
    "dtype": ("InvalidArgument", "torch.int32", "torch.float32"),
    "alignment": ("InvalidArgument", "rank 1: register: the tensor begins 4 bytes past a multiple of 16"),
    "strided": ("InvalidArgument", "a contiguous tensor with elements is needed"),
    "empty": ("InvalidArgument", "a contiguous tensor with elements is needed"),
    "no tensor": ("InvalidArgument", "rank 1: register"),
    "explained": ("tensors are staged, because", "share_memory_()"),
}


def refusals(rank, world_size, tell, url):
    said = {}
    with communicator(rank, world_size, url) as comm:
        one = torch.arange(32.0).share_memory_()
        private, other = torch.ones(32), one if rank else torch.ones(32)
        bad = {
            "private": private,
            "one rank's is private": other,
            "shape": one[: 16 + rank * 4],
            "dtype": one if rank else one.view(torch.int32),
            "alignment": one[1:5] if rank else one[:4],
            "strided": one[::2],
            "empty": one[:0],
            "no tensor": [1.0] if rank else one,
        }
        for name, x in bad.items():
            said[name] = refused(lambda x=x: comm.register(x))
        said["explained"] = comm.explain("all_reduce", nbytes=4000).reason
        w = comm.register(one)
        x = one.clone()
        comm.all_reduce(w)
        right = torch.equal(one, world_size * x)
        mixed = refused(lambda: comm.all_reduce(one if rank else w))  # for a handle on one rank only
    return said, right, mixed


def test_a_tensor_that_cannot_be_registered_is_reported_on_every_rank(url):
    for said, right, mixed in ranks.run(2, refusals, url):
        for name, words in WORDS.items():
            assert all(word in said[name] for word in words), (name, said[name])
        assert right
        assert mixed.startswith("CollectiveMismatch") and "all_reduce" in mixed


def other_memory(rank, world_size, tell, url):
    """A registered tensor that is given other memory on one rank, a handle without dimensions, mixed up handles."""
    with communicator(rank, world_size, url) as comm:
        x = _shared(torch.arange(5.0) + rank)
        w, single = comm.register(x), comm.register(_shared(torch.tensor(2.0 + rank)))
        sums = comm.all_reduce(w).local.tolist(), comm.all_reduce(single).local.item()
        if rank == 0:
            x.data = torch.zeros(5)
        moved = refused(lambda: comm.all_reduce(w)) if rank == 0 else ""
        comm.barrier()
        theirs = w.peers[0].tolist() if rank else []  # rank 0's registration still works
        rows = refused(lambda: single.rows)
        comm.barrier()
        w.close()
        kept = comm.symmetric((4,), torch.float32)
        numbers = sorted(comm._group.registered), kept.number, sorted(comm._group.live_arenas())
        kept.close()
        numbers += (sorted(comm._group.live_arenas()),)
        one, other = comm.register(_shared(torch.ones(4))), comm.register(_shared(torch.ones(4)))
        mixed = refused(lambda: comm.all_reduce(one if rank else other))
    return sums, moved, theirs, rows, numbers, mixed


def test_a_tensor_that_is_given_other_memory_is_refused_and_the_registered_memory_stays(url):
    for rank, (sums, moved, theirs, rows, numbers, mixed) in enumerate(ranks.run(2, other_memory, url)):
        assert sums == ([1.0, 3.0, 5.0, 7.0, 9.0], 5.0)
        assert (rank or "has other memory now" in moved) and theirs == (sums[0] if rank else [])
        assert "shape ()" in rows and "multiple of the world size 2" in rows
        assert numbers == ([2], 3, [0, 3], [0])
        assert mixed.startswith("CollectiveMismatch") and "handle 4" in mixed and "handle 5" in mixed


def _given(handle):
    """Make torch's rendezvous return `handle`."""
    registered._of_torch.__defaults__ = (lambda tensor, group: handle,)


class _Handle:
    """A fake of the handle of torch's rendezvous, with the attributes that tricomm reads."""

    def __init__(self, rank, world_size, base, ranks=None, multicast=0):
        self.rank, self.world_size = ranks[rank] if ranks else rank, world_size
        self.buffer_ptrs, self.buffer_size = [0x1000 + p for p in range(world_size)], 4096
        self.buffer_ptrs[self.rank] = base
        self._multicast = multicast

    @property
    def multicast_ptr(self):
        if isinstance(self._multicast, Exception):
            raise self._multicast
        return self._multicast


def of_torch(rank, world_size, tell, url):
    """torch's symmetric memory at equal and different offsets, of other ranks, and of none."""
    said = []
    with communicator(rank, world_size, url) as comm:
        x = torch.arange(64.0)
        whole = x.data_ptr() - 256  # where the segment begins
        results = {
            "same": _Handle(rank, world_size, whole),
            "offsets": _Handle(rank, world_size, whole - 64 * rank),
            "ranks": _Handle(rank, world_size, whole, [1, 0]),
            "outside": _Handle(rank, world_size, whole - 4096 * rank),
            "none": None,
        }
        for handle in results.values():
            _given(handle)
            arena = None
            try:
                arena = registered.open_registered(comm._group.control, x, 10.0, "a group")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            if arena is not None:
                said.append([base - pointer for base, pointer in zip(arena.bases, handle.buffer_ptrs, strict=True)])
                assert arena.bases[rank] == x.data_ptr()
    return said


def test_torchs_pointers_are_those_of_segments(url):
    for same, offsets, order, outside, none in ranks.run(2, of_torch, url):
        assert same == [256, 256]
        assert "rank 0's tensor begins 256 bytes into its segment, rank 1's 320" in offsets
        assert "rank 0 of 2 is rank 1 of 2 in the given group" in order
        assert "rank 1: the tensor is not in its segment" in outside
        assert outside.startswith("ResourceError") and "no tensor of torch's symmetric memory" in none


WHY_NOT = {
    "one rank has none": "rank 1: torch's symmetric memory has no multicast address here",
    "another kind of memory": "rank 0: torch gives no multicast address: NYI",
    "a pool": "rank 0: the tensor's storage begins inside a segment",
    "not aligned": "rank 0: torch's multicast address is no multiple of 16",
    "the group has none": "the switch refuses",
}


class _Without:
    """An arena without a multicast address."""

    def __init__(self, arena):
        self._arena = arena

    no_multicast = "the switch refuses"

    def __getattr__(self, name):
        return getattr(self._arena, name)


def of_torch_through_the_switch(rank, world_size, tell, url):
    """An all_reduce through torch's multicast address, and why there is none: by case the handle's address less the
    tensor's place, the reason, and what `explain` says of a call that is forced to it."""
    said = {}
    with communicator(rank, world_size, url) as comm:
        whole = torch.zeros(64, dtype=torch.float32).share_memory_()
        mapped = comm.register(whole)  # the peers' memory, as torch would have mapped it
        segment = [int(base) for base in mapped.table.tolist()]
        x = whole[16:59]  # 43 elements, and the switch takes 4 at a time
        cases = {
            "all": (segment, [0x7000_0000_0000 + 0x1000 * rank] * world_size),
            "one rank has none": (segment, [0x7000_0000_0000, 0]),
            "another kind of memory": (segment, [RuntimeError("NYI\nmore")] * world_size),
            "a pool": ([base - 32 for base in segment], [0x7000_0000_0000] * world_size),
            "not aligned": (segment, [0x7000_0000_0008] * world_size),
            "the group has none": (segment, [0x7000_0000_0000] * world_size),
        }
        for name, (bases, addresses) in cases.items():
            handle = _Handle(rank, world_size, bases[rank], multicast=addresses[rank])
            handle.buffer_ptrs = bases
            _given(handle)
            own = comm._group.arena
            comm._group.arena = _Without(own) if name == "the group has none" else own
            w = comm.register(x, "a group")
            comm._group.arena = own
            said[name] = w.multicast and w.multicast - addresses[rank], w.no_multicast
            if name == "all":
                v, parts = comm.register(x, "a group"), [torch.arange(43.0) + 5 * r for r in range(world_size)]
                x.copy_(parts[rank])
                comm.barrier()
                comm.all_reduce(w, algorithm="multicast")
                right = torch.equal(x, sum(parts)) and whole[:16].eq(0).all() and whole[59:].eq(0).all()
                said["right"] = bool(right), comm.explain("all_reduce", w, algorithm="multicast").algorithm
                v.close()
            else:
                said[name] += (refused(lambda w=w: comm.all_reduce(w, algorithm="multicast")),)
                said[name] += (comm.explain("all_reduce", w).reason,)
            w.close()
    return said


def test_torchs_multicast_address_is_used_if_all_ranks_have_it(url):
    for said in ranks.run(2, of_torch_through_the_switch, url):
        assert said["all"] == (64, "") and said["right"] == (True, "multicast")
        for name, why in WHY_NOT.items():
            address, reason, forced, explained = said[name]
            assert address == 0 and reason.startswith(why), (name, said[name])
            assert forced.startswith("InvalidArgument") and why in forced, (name, forced)
            assert f"not through a switch: {why}" in explained, (name, explained)


def test_unsealed_memory_is_refused_unless_it_is_registered(monkeypatch):
    import os

    import torch

    from tricomm.errors import ResourceError

    x = torch.ones(1024).share_memory_()
    fd, size = x.untyped_storage()._share_fd_cpu_()
    with pytest.raises(ResourceError, match="not sealed"):
        segments.Segment.attach([os.dup(fd)], size, readonly=False)
    segments.Segment.attach([os.dup(fd)], size, readonly=False, sealed=False).close()
