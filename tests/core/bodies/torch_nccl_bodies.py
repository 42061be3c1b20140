"""A fake of ProcessGroupNCCL that enforces its rules, and ranks that send messages through it.

Its tensors are the CPU's. The ranks are processes that meet over a store. Each communicator has a stream on which
calls run one after another. A message moves once both sides run, as in NCCL, whose buffers are of no promised size.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import tricomm
from tests.c10d.bodies.groups import default_group, of, poisoned, refused, same
from tricomm.c10d.group_creation import WrappedGroup

HANG_SECONDS = 3.0


class Hang(RuntimeError):
    """Raised where NCCL would hang."""


class FakeNccl:
    """The messages of ProcessGroupNCCL."""

    supports_coalescing = True

    def __init__(self, store, rank, world_size):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.streams, self.sent, self.groups = {}, {}, 0
        self.group = None  # the operations since _start_coalescing

    def _start_coalescing(self):
        assert self.group is None, "ncclGroupStart in a group"
        self.group = []

    def _end_coalescing(self):
        """None if nothing was coalesced, as ProcessGroupNCCL gives a null pointer."""
        group, self.group = self.group, None
        if not group:
            return None
        self.groups += 1
        return self._enqueue("all", range(self.world_size), group)

    def shutdown(self):
        pass

    def send(self, tensors, dst, tag):
        return self._message("send", tensors[0], dst)

    def recv(self, tensors, src, tag):
        return self._message("recv", tensors[0], src)

    def _message(self, kind, x, peer):
        if self.group is not None:
            self.group.append((kind, x, peer))
            return None  # the group has the handle
        pair = sorted((self.rank, peer))
        return self._enqueue(f"pair {pair}", pair, [(kind, x, peer)])

    def _enqueue(self, key, members, operations):
        """A communicator is made at its first call, which blocks until all its members call."""
        if key not in self.streams:
            self.store.set(f"{key} {self.rank}", "here")
            self._wait([f"{key} {member}" for member in members])
            self.streams[key] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(key, self.streams[key]), daemon=True).start()
        work = Done()
        work.over = threading.Event()
        self.streams[key].put((operations, work))
        return work

    def _run(self, key, stream):
        while True:
            operations, work = stream.get()
            keys = {}
            for at, (kind, x, peer) in enumerate(operations):
                ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
                number = self.sent[key, ends] = self.sent.get((key, ends), 0) + 1
                keys[at] = name = f"{key} {ends} {number}"
                if kind == "send":
                    held = io.BytesIO()
                    torch.save(x, held)
                    self.store.set(name, held.getvalue())
                else:
                    self.store.set(f"{name} taken", "")
            for at, (kind, x, _) in enumerate(operations):
                self._wait([f"{keys[at]} taken" if kind == "send" else keys[at]])
                if kind == "recv":
                    x.copy_(torch.load(io.BytesIO(self.store.get(keys[at]))))
            work.over.set()

    def _wait(self, keys):
        end = time.monotonic() + HANG_SECONDS
        while not self.store.check(keys):
            if time.monotonic() > end:
                raise Hang(f"NCCL would hang: no rank calls {keys}")
            time.sleep(1e-3)


class Done(dist.Work):
    over = None

    def wait(self, timeout=timedelta(0)):
        if self.over is not None and not self.over.wait(HANG_SECONDS + 1):
            raise Hang("NCCL would hang")
        return True


def over_nccl(group):
    """Make `group` use the fake NCCL for CPU tensors."""
    fake = FakeNccl(PrefixStore("fake nccl", group._config.store), group.rank(), group.size())
    group._backends.native["cpu"], group._point_to_point = fake, None
    return fake


def ring(group, call, shape=(7,)):
    """One step of a pipeline: from the rank before, to the rank after, the operations of `dist.batch_isend_irecv`."""
    rank, size = group.rank(), group.size()
    out = poisoned(shape)
    ops = [
        dist.P2POp(dist.isend, of(rank, shape, call=call), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, out, (rank - 1) % size, group),
    ]
    return ops, out, of((rank - 1) % size, shape, call=call)


def batches(rank, world_size, tell, url):
    """Rings of messages, each in one group of NCCL; the first one is the communicator's first call."""
    with default_group(rank, world_size, url) as group:
        fake = over_nccl(group)
        for call in range(3):
            ops, out, want = ring(group, call)
            for op in ops:
                op.group = group if call else None  # the default group
            works = dist.batch_isend_irecv(ops)
            assert len(works) == 1, "one handle for NCCL's group, as of torch's own groups"
            works[0].wait()
            assert same(out, want)
        assert fake.groups == 3 and list(fake.streams) == ["all"]
        del group._backends.native["cpu"]
    return True


def refused_batch(rank, world_size, tell, url):
    """An invalid operation is refused on this rank before anything is sent, and a corrected batch runs."""
    with default_group(rank, world_size, url) as group:
        fake = over_nccl(group)
        ops, out, want = ring(group, 0, (4, 4))
        right, ops[1].tensor = ops[1].tensor, ops[1].tensor.t()
        if rank == 0:
            refused(lambda: dist.batch_isend_irecv(ops), "recv: a contiguous tensor is needed")
            refused(lambda: dist.batch_isend_irecv([]), kind=IndexError)
            refused(lambda: dist.batch_isend_irecv(ops[0]), kind=ValueError)
        assert fake.group is None and not fake.streams
        ops[1].tensor = right
        dist.batch_isend_irecv(ops)[-1].wait()
        assert same(out, want)
        del group._backends.native["cpu"]
    return True


def ungrouped(rank, world_size, tell, url):
    """The same messages one by one: NCCL hangs, and so does the fake."""
    with default_group(rank, world_size, url) as group:
        over_nccl(group)
        ops, *_ = ring(group, 0)
        hung = False
        try:
            for op in ops:
                op.op(op.tensor, group_dst=op.group_peer) if op.op is dist.isend else op.op(op.tensor, op.peer)
        except (Hang, tricomm.GroupAborted):  # on this rank or on the one that called first
            hung = True
        del group._backends.native["cpu"]
        return hung


def coalesced(rank, world_size, tell, url):
    """Coalescing blocks without a call of NCCL, and messages within an outer block."""
    cpu = torch.device("cpu")
    with default_group(rank, world_size, url) as group:
        fake = over_nccl(group)
        with dist._coalescing_manager(device=cpu, async_ops=True) as manager:
            pass
        manager.wait()
        with dist._coalescing_manager(device=cpu):
            dist.broadcast(torch.ones(3), 0)  # by the connections
        ops, out, want = ring(group, 0)
        with dist._coalescing_manager(device=cpu, async_ops=True) as manager:
            assert dist.batch_isend_irecv(ops) == []
        manager.wait()
        assert same(out, want) and fake.groups == 1
        del group._backends.native["cpu"]
    return True


def others(rank, world_size, tell, url):
    """A group of another backend, its batches, and its wrapped form, whose backend is the group's own."""
    with default_group(rank, world_size, url, backend="gloo") as group:
        for over in (group, tricomm.wrap(group)):
            ops, out, want = ring(over, 0)
            works = dist.batch_isend_irecv(ops)
            for work in works:
                work.wait()
            assert len(works) == 2 and same(out, want)
        assert isinstance(over, WrappedGroup)
    return True
