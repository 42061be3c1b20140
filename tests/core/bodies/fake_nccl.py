"""A `nccl.core` that runs on the CPU and enforces nccl4py's rules; ranks are threads, or processes over `STORE`.

Rules: see `Communicator` of nccl4py 0.6.0. A call that NCCL would refuse raises `NcclInvalid`. One that would hang
NCCL (different calls, a send without a receive) raises on all ranks if they are threads, and hangs if they are
processes; an abort makes it return, as it does a kernel.
"""

from __future__ import annotations

import io
import secrets
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch

SUM, PROD, MAX, MIN, AVG = range(5)
_NO_DTYPE = (torch.int16, torch.uint16, torch.complex64, torch.complex128)
STORE = None  # a torch Store if ranks are processes
_worlds: dict[bytes, _World] = {}
_lock = threading.Lock()
_local = threading.local()


class NcclInvalid(Exception):
    pass


class UniqueId:
    def __init__(self, data):
        self._data = data

    def __bytes__(self):
        return self._data

    @classmethod
    def from_bytes(cls, data):
        if len(data) != 128 or not any(data):
            raise NcclInvalid("a unique id has 128 bytes")
        return cls(data)


def get_unique_id():
    return UniqueId(secrets.token_bytes(128))


def get_version():
    return SimpleNamespace(libnccl=SimpleNamespace(version="2.30.7"))


class _World:
    def __init__(self, nranks):
        self.nranks = nranks
        self.barrier = threading.Barrier(nranks)
        self.slots = [None] * nranks

    def meet(self, comm, kind, facts, payload, do):
        """All ranks post equal facts; then `do(payloads)` reads the peers' payloads before any rank returns."""
        self.slots[comm.rank] = (kind, facts, payload)
        self.barrier.wait(20)
        mine = [(k, f) for k, f, _ in self.slots]
        if any(other != mine[0] for other in mine):
            raise RuntimeError(f"ranks would hang: {mine}")
        do([p for *_, p in self.slots])
        self.barrier.wait(20)


class _StoreWorld:
    """Ranks that are processes."""

    def __init__(self, nranks, unique_id):
        self.nranks, self._prefix, self._step = nranks, f"fake nccl {unique_id.hex()}", 0

    def meet(self, comm, kind, facts, payload, do):
        self._step += 1
        key = f"{self._prefix} {self._step}"
        held = io.BytesIO()
        torch.save((kind, facts, payload), held)
        STORE.set(f"{key} {comm.rank}", held.getvalue())
        end = time.monotonic() + 40
        for rank in range(self.nranks):
            while not STORE.check([f"{key} {rank}"]):
                if comm.ended is not None:
                    return
                assert time.monotonic() < end, f"rank {rank} never called {kind}"
                time.sleep(2e-3)
        held = [io.BytesIO(STORE.get(f"{key} {rank}")) for rank in range(self.nranks)]
        said = [torch.load(data, weights_only=False) for data in held]
        while any(other[:2] != (kind, facts) for other in said):
            if comm.ended is not None:
                return
            assert time.monotonic() < end, f"no abort ended this hang: {[other[:2] for other in said]}"
            time.sleep(2e-3)
        do([p for *_, p in said])


def _buffer(x, what):
    if not isinstance(x, torch.Tensor) or not x.is_contiguous():
        raise NcclInvalid(f"{what}: a contiguous tensor is needed")
    if x.dtype in _NO_DTYPE:
        raise NcclInvalid(f"Unsupported torch dtype {x.dtype}")
    return x


def _stream(stream):
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError("stream must be a handle")


@contextmanager
def group():
    if getattr(_local, "ops", None) is not None:
        raise NcclInvalid("nested groups are not faked")
    _local.ops = []
    try:
        yield
    finally:
        ops, _local.ops = _local.ops, None
        for comm in {op[0] for op in ops}:
            comm._post([op[1:] for op in ops if op[0] is comm])


class Communicator:
    def __init__(self, world, rank):
        self._world, self.rank, self.nranks = world, rank, world.nranks
        self.error, self.ended = 0, None
        self._valid, self._finalized = True, False

    @classmethod
    def init(cls, nranks, rank, unique_id, config=None):
        if STORE is not None:
            return cls(_StoreWorld(nranks, bytes(unique_id)), rank)
        with _lock:
            world = _worlds.setdefault(bytes(unique_id), _World(nranks))
        if world.nranks != nranks or not 0 <= rank < nranks:
            raise NcclInvalid("rank or nranks")
        world.barrier.wait(20)
        return cls(world, rank)

    def _check(self):
        if not self._valid:
            raise NcclInvalid("Communicator not initialized")

    def get_async_error(self):
        self._check()
        return self.error

    def get_last_error(self):
        return "a link went down"

    def finalize(self):
        self._check()
        self._finalized = True

    def destroy(self):
        if self._valid and not self._finalized:
            raise NcclInvalid("finalize first: the recommended pattern")
        self._valid, self.ended = False, "destroyed"

    def abort(self):
        self._valid, self.ended = False, "aborted"

    def _collective(self, kind, facts, send, do, stream):
        self._check()
        _stream(stream)

        self._world.meet(self, kind, facts, None if send is None else send.clone(), do)

    def allreduce(self, s, r, op, *, stream=None, config=None):
        self.reduce(s, r, op, stream=stream)

    def reduce(self, s, r, op, root=None, *, stream=None, config=None):
        _buffer(s, "sendbuf")
        if root is None or root == self.rank:
            _buffer(r, "recvbuf")
            if s.dtype != r.dtype or r.numel() < s.numel():
                raise NcclInvalid("Dtype or count mismatch")

        def do(data):
            if root is None or root == self.rank:
                r.view(-1)[: s.numel()].copy_(_fold(data, op))

        self._collective("reduce", (s.dtype, s.numel(), op, root), s, do, stream)

    def reduce_scatter(self, s, r, op, *, stream=None, config=None):
        _buffer(s, "sendbuf"), _buffer(r, "recvbuf")
        count = s.numel() // self.nranks
        if s.dtype != r.dtype or count < 1 or r.numel() < count:
            raise NcclInvalid("Buffer count mismatch")

        def do(data):
            r.view(-1)[:count].copy_(_fold(data, op)[self.rank * count : (self.rank + 1) * count])

        self._collective("reduce_scatter", (s.dtype, s.numel(), op), s, do, stream)

    def broadcast(self, s, r, root, *, stream=None, config=None):
        _buffer(r, "recvbuf")
        if root == self.rank and (_buffer(s, "sendbuf").dtype != r.dtype or s.numel() != r.numel()):
            raise NcclInvalid("Buffer count mismatch")
        send = s if root == self.rank else None
        self._collective(
            "broadcast", (r.dtype, r.numel(), root), send, lambda data: r.view(-1).copy_(data[root].view(-1)), stream
        )

    def allgather(self, s, r, *, stream=None, config=None):
        _buffer(s, "sendbuf"), _buffer(r, "recvbuf")
        if s.dtype != r.dtype or r.numel() < self.nranks * s.numel():
            raise NcclInvalid("Buffer count mismatch")
        self._collective("allgather", (s.dtype, s.numel()), s, lambda data: r.view(-1).copy_(torch.cat(data)), stream)

    def send(self, buffer, peer, *, stream=None):
        self._point("send", buffer, peer, stream)

    def recv(self, buffer, peer, *, stream=None):
        self._point("recv", buffer, peer, stream)

    def _point(self, kind, buffer, peer, stream):
        self._check()
        _stream(stream)
        _buffer(buffer, kind)
        if not 0 <= peer < self.nranks:
            raise NcclInvalid("peer")
        if getattr(_local, "ops", None) is None:
            raise RuntimeError("a send or recv outside of a group would hang where the peer does the same")
        _local.ops.append((self, kind, buffer, peer))

    def _post(self, ops):
        """In this fake every rank must take part in a group, even without operations."""

        def do(others):
            for kind, buffer, peer in ops:
                wanted = "recv" if kind == "send" else "send"
                theirs = [op for op in others[peer] if op[0] == wanted and op[2] == self.rank]
                if len(theirs) != 1 or theirs[0][1].numel() != buffer.numel():
                    raise RuntimeError(f"{kind} of {buffer.numel()} with rank {peer} has no partner: it would hang")
                if kind == "recv":
                    buffer.copy_(theirs[0][1])

        self._world.meet(self, "group", (), ops, do)


def _fold(data, op):
    stack = torch.stack([d.view(-1) for d in data])
    wide = stack.double() if stack.is_floating_point() else stack.long()
    if op == SUM:
        total = wide.sum(0)
    elif op == AVG:
        total = wide.sum(0).div(len(data), rounding_mode=None if stack.is_floating_point() else "trunc")
    else:
        total = {PROD: wide.prod(0), MAX: wide.amax(0), MIN: wide.amin(0)}[op]
    return total.to(stack.dtype)
