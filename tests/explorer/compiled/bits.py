"""Every kernel, type and operation through the machine and through the interpreter, compared bit for bit."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.marks import compiles
from tricomm import simulate
from tricomm.arguments import DTYPES
from tricomm.explorer import shipped
from tricomm.explorer.compiled.compiled_runtime import checked_options
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import OPS, reduction
from tricomm.options import Options
from tricomm.perf.bench import collective_calls

COUNT = 193  # elements a row: odd, and no multiple of a vector
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Case:
    """One kernel for one type and operation ("" if it does not reduce)."""

    kernel: registry.Kernel
    dtype: torch.dtype
    op: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.kernel.name, str(self.dtype).removeprefix("torch."), self.op)))

    @property
    def world_size(self) -> int:
        return 8 if self.kernel.needs_cube else 3 if self.kernel.algorithm == "one_shot" else 2


def cases() -> Iterator[Case]:
    """All that this Triton compiles."""
    for kernel in filter(compiles, registry.ALL):
        if kernel.collective == "recv":
            continue  # the other half of a send
        if kernel.collective == "barrier":
            yield Case(kernel, torch.float32)
            continue
        for dtype, known in DTYPES.items():
            if kernel.reduces:
                ops = (op for op in OPS if op in known.ops)
                yield from (Case(kernel, dtype, o) for o in ops if not kernel.why_not_reduced(*reduction(known, o)))
            else:
                yield Case(kernel, dtype)


def sample() -> list[Case]:
    """Each kernel once, each type once, each operation once."""
    everything, seen = list(cases()), Counter[object]()
    chosen = []
    for kernel in dict.fromkeys(case.kernel for case in everything):
        its = (case for case in everything if case.kernel is kernel)
        chosen.append(min(its, key=lambda c: (seen[c.dtype] + seen[c.op], seen[c.dtype])))
        seen.update((chosen[-1].dtype, chosen[-1].op))
    return chosen


def special(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random bits, small numbers, and for floats NaN, infinities, zeros of both signs, subnormals and the largest."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    lanes = 2 if part is not dtype else 1
    size, number = part.itemsize, count * lanes
    bits = torch.randint(0, 256, (number * size,), dtype=torch.uint8, generator=generator).view(part)
    if part.is_floating_point:
        info = torch.finfo(part)
        least = torch.ones((), dtype=_WORDS[size]).view(part)
        values = [0.0, -0.0, 1.0, -1.5, info.max, info.min, info.tiny, -info.tiny, math.nan, math.inf, -math.inf]
        table = torch.cat([torch.tensor(values, dtype=torch.float64).to(part), least.reshape(1)])
    else:
        info = torch.iinfo(part)
        table = torch.tensor([0, 1, 3, info.max, info.min, info.max - 1, info.min + 1], dtype=part)
    raw = table.view(_WORDS[size])
    picked = raw[torch.randint(0, len(raw), (number,), generator=generator)].view(part)
    small = torch.randint(-8 if part.is_signed else 0, 9, (number,), generator=generator).to(part)
    kind = torch.randint(0, 3, (number,), generator=generator)
    words = torch.where(kind == 0, bits.view(_WORDS[size]), picked.view(_WORDS[size]))
    mixed = torch.where(kind == 2, small.view(_WORDS[size]), words).view(part)
    return torch.view_as_complex(mixed.reshape(-1, 2)) if lanes == 2 else mixed


def body(case: Case) -> Callable[[Any], list[torch.Tensor]]:
    """A rank function: makes some calls and returns this rank's results."""

    def run(comm: Any) -> list[torch.Tensor]:
        return [_call(comm, case, number) for number in range(1 if case.kernel.needs_cube else 2)]

    return run


def _call(comm: Any, case: Case, number: int) -> torch.Tensor:
    kernel, size, rank = case.kernel, comm.world_size, comm.rank
    name = kernel.collective
    data = special(case.dtype, kernel.kind.rows_in(size) * COUNT, 1000 * number + rank)
    if name == "send":
        y = torch.zeros_like(data)
        if rank % 2 == 0 and rank + 1 < size:
            comm.send(data, rank + 1, protocol=kernel.protocol)
        elif rank % 2:
            comm.recv(y, rank - 1, protocol=kernel.protocol)
        return y
    if name == "all_to_all_v":
        splits = [(rank + r) % size * 17 for r in range(size)]
        y = torch.zeros(sum(splits), dtype=case.dtype)
        forced = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
        return comm.all_to_all_v(data[: sum(splits)], splits, splits, y, **forced)
    x, y = collective_calls.tensors(comm, name, COUNT, case.dtype, kernel)
    collective_calls.local(x).copy_(data)
    if kernel.zero_copy:
        comm.barrier()
    elif name == "all_reduce":
        y = x  # in place
    result = collective_calls.call(comm, name, size - 1, x, y, kernel, case.op)
    return (collective_calls.local(x) if result is None else result).clone()


def options_of(case: Case) -> Options:
    if case.kernel.wire:  # a tile of codes needs more room than the smallest arena has
        return shipped.options(case.world_size, compiled="sm_90", kernel=case.kernel)
    return checked_options(case.world_size, None)


def through_machine(case: Case, architecture: str = "sm_90") -> list[list[torch.Tensor]]:
    return simulate(body(case), case.world_size, options=options_of(case), compiled=architecture)


def through_interpreter(case: Case) -> list[list[torch.Tensor]]:
    return simulate(body(case), case.world_size, options=options_of(case))


def difference(case: Case, machine: list[list[torch.Tensor]], interpreter: list[list[torch.Tensor]]) -> str:
    """A text on the first difference, or "". If values are computed, any two NaNs are equal: PTX keeps no payload."""
    for rank, (ours, theirs) in enumerate(zip(machine, interpreter, strict=True)):
        for call, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"rank {rank}, call {call}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
            part = torch.view_as_real(a).dtype if a.is_complex() else a.dtype
            one, other = (t.contiguous().reshape(-1).view(part) if t.numel() else t for t in (a, b))
            words = _WORDS[part.itemsize]
            apart = one.view(words) != other.view(words)
            if case.op and part.is_floating_point:
                apart &= ~(one.isnan() & other.isnan())
            if apart.any():
                at = int(torch.nonzero(apart)[0])
                bits = [np.uint64(t.view(words)[at].item() & (1 << 8 * part.itemsize) - 1) for t in (one, other)]
                return (
                    f"rank {rank}, call {call}: {int(apart.sum())} of {apart.numel()} elements, the first is {at}: "
                    f"{one[at].item()} ({bits[0]:#x}) by the machine, {other[at].item()} ({bits[1]:#x}) interpreted"
                )
    return ""
