"""The rank's side of a comparison: contenders are checked one by one, then timed in turns.

Only what is exactly right on every rank is timed. Ranks tell each other over Gloo, which is not measured, how it went,
so that all of them time the same; who falls silent is found by the parent (`stages.peers.compare`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tricomm.kernels.collectives import registry
from tricomm.perf.bench import baselines, check_data, timing
from tricomm.perf.bench.baselines import ComparedCall, Implementation, Make
from tricomm.perf.bench.collective_calls import Unavailable
from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import checks
from tricomm.perf.evidence.stage import Wrong

_SAID = 400  # bytes
_PERIOD = 1_000_003  # elements after which data repeat: prime, so that nothing of a kernel's falls together with it
_TRIALS = 2  # the two calls use different mailboxes
Run = Callable[[], torch.Tensor | None]
Say = Callable[..., None]
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


@dataclass(frozen=True)
class Timed:
    """`once` brings the ranks together, `many` is what is measured: `calls` calls."""

    once: Run
    many: Run
    calls: int


@dataclass
class Race:
    """All that are right, by name, and the others with the reason. A name ends in _graph for a CUDA graph."""

    call: ComparedCall
    calls: int
    graphs: bool
    say: Say
    ready: dict[str, Timed] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def admit(self, offered: Iterable[tuple[str, Make]]) -> None:
        for name, make in offered:
            contender = self._agreed(name, partial(self._eager, make))
            if contender is None:
                continue
            self.ready[name] = Timed(contender.run, timing.repeated(contender.run, self.calls), self.calls)
            if self.graphs:
                graph = self._agreed(f"{name}_graph", partial(self._graph, contender))
                self.ready |= {f"{name}_graph": graph} if graph is not None else {}
            contender.load(torch.zeros(self.call.rows_in * self.call.count, dtype=self.call.dtype))

    def times(self, rounds: int, seconds: float) -> dict[str, list[float]]:
        """Microseconds a call on this rank, one number a round, of `rounds` rounds or what fits into `seconds`.

        Whoever was first in one round is last in the next.
        """
        found: dict[str, list[float]] = {name: [] for name in self.ready}
        began = time.perf_counter()
        self._round(list(self.ready))  # warm
        took = max(float(text) for text in told(repr(time.perf_counter() - began), self.call.context.host))
        for number in range(min(rounds, max(3, int(seconds / took)))):
            names = list(self.ready) if number % 2 else list(reversed(self.ready))
            for name, value in self._round(names).items():
                found[name].append(value)
        return found

    def _round(self, names: list[str]) -> dict[str, float]:
        return {name: self._turn(name) for name in names}

    def _turn(self, name: str) -> float:
        timed, ground = self.ready[name], self.call.context
        self.say("turn", name=name)
        dist.barrier(ground.host)
        timed.once()
        ground.sync()
        start = time.perf_counter()
        timed.many()
        ground.sync()
        return (time.perf_counter() - start) / timed.calls * 1e6

    def _agreed(self, name: str, step: Callable[[], T]) -> T | None:
        """What `step` gives, where it went well on every rank; the first rank's trouble is noted otherwise."""
        self.say("trying", name=name)
        result, mine = None, ""
        try:
            result = step()
        except Unavailable as missing:
            mine = str(missing)
        except Wrong as error:
            mine = f"wrong result: {error}"
        except Exception as error:  # whatever a library may raise
            mine = f"{type(error).__name__}: {error}"
        trouble = next(filter(None, told(mine, self.call.context.host)), None)
        if trouble is None:
            return result
        self.call.context.sync()  # raises where the trouble has cost the device: this rank has to begin anew
        self.missing[name] = trouble
        return None

    def _eager(self, make: Make) -> Implementation:
        contender = make(self.call)
        self._check(contender, contender.run)
        return contender

    def _graph(self, contender: Implementation) -> Timed:
        ground = self.call.context
        if ground.comm.simulated:
            once, many = contender.run, timing.repeated(contender.run, self.calls)
        else:
            stream = torch.cuda.current_stream()
            once, many = (timing.capture(contender.run, calls, stream) for calls in (1, self.calls))
        self._check(contender, once)
        return Timed(once, many, self.calls)

    def _check(self, contender: Implementation, run: Run) -> None:
        """All calls are made whatever comes of them: another rank, where all is well, makes them too."""
        bad = 0
        for data, exact in self._trials:
            contender.load(data)
            result = run()
            self.call.context.sync()
            bad = max(bad, check_data.wrong(result, exact) if result is not None else 0)
        if bad:
            raise Wrong(f"{bad} of {exact.numel()} elements on rank {self.call.context.comm.rank}")

    @cached_property
    def _trials(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [trial(self.call, number) for number in range(_TRIALS)]


def trial(call: ComparedCall, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's data, and the exact result of the call with everybody's."""
    comm, block = call.context.comm, min(call.count, _PERIOD)
    if call.collective == "barrier":
        return torch.zeros(0, dtype=call.dtype), torch.zeros(0, dtype=call.dtype)
    facts = (call.collective, "sum", comm.world_size)
    data = check_data.values(*facts, comm.rank, call.number(number), block, call.dtype)
    exact = check_data.expected(*facts, call.number(number), block, comm.rank, call.dtype)
    return _periodic(data, call.rows_in, call), _periodic(exact, call.rows_out, call)


def _periodic(block: torch.Tensor, rows: int, call: ComparedCall) -> torch.Tensor:
    """Each row of `block` again and again, up to its length."""
    found = block.to(call.dtype).reshape(rows, -1)
    times = -(-call.count // found.shape[1])
    return found.repeat(1, times)[:, : call.count].reshape(-1)


def told(mine: str, host: Any) -> list[str]:
    """What every rank says at this point; the beginning of it, where it is long."""
    words: list[Any] = [torch.zeros(_SAID, dtype=torch.uint8) for _ in range(dist.get_world_size(host))]
    text = mine.encode()[:_SAID]
    own = torch.zeros(_SAID, dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.all_gather(words, own, group=host)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in words]
