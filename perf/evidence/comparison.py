"""The rank's side of a comparison of implementations: each is checked, then all are timed in turns.

Only an implementation whose results are exact on every rank is timed. The ranks agree on that over Gloo, outside of the
measurement, so that all of them time the same. If a rank falls silent, the parent notices (`stages.peers.compare`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import tricomm
from tricomm import Options
from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.bench import baselines, check_data, timing
from tricomm.perf.bench.baselines import BenchContext, ComparedCall, Implementation, Make
from tricomm.perf.bench.collective_calls import Unavailable
from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import checks, hardware
from tricomm.perf.evidence.stage import Wrong

_TEXT_BYTES = 400  # of a text that ranks exchange
_PERIOD = 1_000_003  # elements after which data repeat: prime, so that it coincides with no block of a kernel
_TRIALS = 2  # the two calls use different mailboxes
_RENDEZVOUS = timedelta(seconds=20)  # less than the parent's timeout, so that the rank can report its own
# torch disables multicast if devices may overlap, so ranks with a GPU each must not have the first of these.
_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
Emit = Callable[..., None]
T = TypeVar("T")


def offered(collective: str, world_size: int, dry_run: bool) -> dict[str, Make]:
    """By name: tricomm's choice, each of its kernels, and the baselines. In a dry run Gloo stands in for NCCL."""
    makers: dict[str, Make] = {OURS: partial(baselines.ours, kernel=None)}
    kernels = registry.of(collective, world_size)
    if len(kernels) > 1:
        few = [k for k in kernels if k in checks.kernels(world_size, dry_run)]
        few += [k for k in registry.ZERO_COPY if k.collective == collective]
        makers |= {k.name.replace(collective, OURS, 1): partial(baselines.ours, kernel=k) for k in few}
    for library in ("gloo", "nccl", "symm_mem", "kraken") if dry_run else ("nccl", "symm_mem", "kraken"):
        makers |= baselines.of_library(library, collective)
    return makers


def rank_main(emit: Emit, rank: int, world_size: int, url: str, data: Any) -> None:
    """One rank, a process of its own: emits which implementation is running, and for every size the times of all."""
    emit("trying", name=OURS)  # before the device is used, which may take seconds
    dtype = getattr(torch, data["dtype"])
    with bench_context(rank, world_size, url, data) as context:
        makers = offered(data["collective"], world_size, data["dry_run"])
        for nbytes in data["sizes"]:
            count = units.row_elements(data["collective"], nbytes, dtype.itemsize, world_size) if nbytes else 0
            call = ComparedCall(context, data["collective"], dtype, count)
            comparison = Comparison(call, data["calls"], data["graphs"], emit)
            comparison.prepare((name, makers[name]) for name in data["names"])
            choice = context.comm.explain(data["collective"], call.rows_in * count * dtype.itemsize)
            times = comparison.times(data["rounds"], data["seconds"])
            emit(
                "times",
                size=nbytes,
                count=count,
                choice=f"{choice.algorithm}/{choice.protocol}",
                times=times,
                missing=comparison.missing,
            )


@contextmanager
def bench_context(rank: int, world_size: int, url: str, data: Any) -> Iterator[BenchContext]:
    """tricomm's group and Gloo's of the same ranks, on one GPU for all, or on one for each."""
    for name, value in _ONE_GPU.items():
        os.environ.pop(name, None)
        if data["one_gpu"]:
            os.environ[name] = value
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    device = hardware.begin_rank(rank, data)
    stream = torch.cuda.Stream() if device != "cpu" else None
    store = FileStore(url.removeprefix("file://") + "-peers", world_size)
    store.set_timeout(_RENDEZVOUS)
    nbytes = (1 << 20) if data["dry_run"] else (64 << 20)
    options = Options(timeout=60.0, arena_bytes=nbytes, nccl=False, share_device=data["one_gpu"])
    with torch.cuda.stream(stream), tricomm.init(url, rank, world_size, device, options=options) as comm:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_RENDEZVOUS)
        host = dist.new_group(backend="gloo", timeout=_RENDEZVOUS)
        yield BenchContext(comm, host, data["one_gpu"], Path(data["peers"]) if data["peers"] else None)
        dist.destroy_process_group()


@dataclass(frozen=True)
class TimedCalls:
    """`once` synchronizes the ranks; `many` makes `calls` calls, which are timed."""

    once: timing.Call
    many: timing.Call
    calls: int


@dataclass
class Comparison:
    """The implementations that are right, by name, and the reasons for the others.

    With `graphs` each of them takes part a second time, as a CUDA graph, under a name that ends in _graph.
    """

    call: ComparedCall
    calls: int
    graphs: bool
    emit: Emit
    ready: dict[str, TimedCalls] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def prepare(self, makers: Iterable[tuple[str, Make]]) -> None:
        """Make and check the implementations; those that are right on all ranks are `ready`."""
        for name, make in makers:
            made = self._on_all_ranks(name, partial(self._eager, make))
            if made is None:
                continue
            self.ready[name] = TimedCalls(made.run, timing.repeated(made.run, self.calls), self.calls)
            if self.graphs:
                graph = self._on_all_ranks(f"{name}_graph", partial(self._graph, made))
                self.ready |= {f"{name}_graph": graph} if graph is not None else {}
            made.load(torch.zeros(self.call.rows_in * self.call.count, dtype=self.call.dtype))

    def times(self, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Microseconds a call on this rank, one number a round, for `rounds` rounds or as many as fit into `seconds`.

        The order of the implementations is reversed from round to round.
        """
        times: dict[str, list[float]] = {name: [] for name in self.ready}
        began = time.perf_counter()
        self._round(list(self.ready))  # warm-up
        took = max(float(text) for text in exchange(repr(time.perf_counter() - began), self.call.context.host))
        for number in range(min(rounds, max(3, int(seconds / took)))):
            names = list(self.ready) if number % 2 else list(reversed(self.ready))
            for name, value in self._round(names).items():
                times[name].append(value)
        return times

    def _round(self, names: list[str]) -> dict[str, float]:
        return {name: self._turn(name) for name in names}

    def _turn(self, name: str) -> float:
        timed, context = self.ready[name], self.call.context
        self.emit("turn", name=name)
        dist.barrier(context.host)
        timed.once()
        context.sync()
        start = time.perf_counter()
        timed.many()
        context.sync()
        return (time.perf_counter() - start) / timed.calls * 1e6

    def _on_all_ranks(self, name: str, step: Callable[[], T]) -> T | None:
        """The result of `step` if it succeeds on every rank; otherwise the first rank's error goes to `missing`."""
        self.emit("trying", name=name)
        result, error_text = None, ""
        try:
            result = step()
        except Unavailable as missing:
            error_text = str(missing)
        except Wrong as error:
            error_text = f"wrong result: {error}"
        except Exception as error:  # whatever a library may raise
            error_text = f"{type(error).__name__}: {error}"
        first_error = next(filter(None, exchange(error_text, self.call.context.host)), None)
        if first_error is None:
            return result
        self.call.context.sync()  # raises if the error has cost the device: then this rank has to start again
        self.missing[name] = first_error
        return None

    def _eager(self, make: Make) -> Implementation:
        made = make(self.call)
        self._check(made, made.run)
        return made

    def _graph(self, made: Implementation) -> TimedCalls:
        if self.call.context.comm.simulated:
            once, many = made.run, timing.repeated(made.run, self.calls)
        else:
            stream = torch.cuda.current_stream()
            once, many = (timing.capture(made.run, calls, stream) for calls in (1, self.calls))
        self._check(made, once)
        return TimedCalls(once, many, self.calls)

    def _check(self, made: Implementation, run: timing.Call) -> None:
        """Make all trials, even after a wrong one, because the other ranks make them, too. Raises `Wrong`."""
        bad = 0
        for data, exact in self._trials:
            made.load(data)
            result = run()
            self.call.context.sync()
            bad = max(bad, check_data.wrong(result, exact) if result is not None else 0)
        if bad:
            raise Wrong(f"{bad} of {exact.numel()} elements on rank {self.call.context.comm.rank}")

    @cached_property
    def _trials(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [trial(self.call, number) for number in range(_TRIALS)]


def trial(call: ComparedCall, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's data, and its exact result of the call with all ranks' data."""
    comm, block = call.context.comm, min(call.count, _PERIOD)
    if call.collective == "barrier":
        return torch.zeros(0, dtype=call.dtype), torch.zeros(0, dtype=call.dtype)
    facts = (call.collective, "sum", comm.world_size)
    data = check_data.values(*facts, comm.rank, call.number(number), block, call.dtype)
    exact = check_data.expected(*facts, call.number(number), block, comm.rank, call.dtype)
    return _periodic(data, call.rows_in, call), _periodic(exact, call.rows_out, call)


def _periodic(block: torch.Tensor, rows: int, call: ComparedCall) -> torch.Tensor:
    """Each row of `block`, repeated up to the length of the call's rows."""
    values = block.to(call.dtype).reshape(rows, -1)
    times = -(-call.count // values.shape[1])
    return values.repeat(1, times)[:, : call.count].reshape(-1)


def exchange(mine: str, host: Any) -> list[str]:
    """The texts of all ranks, each cut to `_TEXT_BYTES`."""
    rows: list[Any] = [torch.zeros(_TEXT_BYTES, dtype=torch.uint8) for _ in range(dist.get_world_size(host))]
    text = mine.encode()[:_TEXT_BYTES]
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.all_gather(rows, own, group=host)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
