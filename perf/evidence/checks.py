"""Calls whose result is known exactly: every kernel, type and operation, sizes that are odd and sizes of many chunks.

Used by ranks as streams of one process and by ranks as processes alike; runs on whatever device `comm` is on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tricomm import Communicator, Options, Symmetric
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf.bench import check_data, collective_calls
from tricomm.perf.evidence import uneven_splits

# Of all that a kernel is checked with, by value: a kernel's first call says more than its hundredth type.
PARTS = ("one size", "every size", "every type", "every operation")
FIRST_TYPE = "bfloat16"
# Elements a row. One, odd ones, a tile and one more or less, and (of 8 bytes) several times a mailbox of `OPTIONS`.
COUNTS = (1, 3, 517, 4095, 4096, 4097, 100_003, 1_000_001)
OTHERS = (517, 4097)  # of all operations but a type's first one: each is a variant to compile
FEW, FEW_OTHERS = (1, 37), (37,)
_ONE = {False: COUNTS[4], True: FEW[1]}  # elements of the one size; in a dry run
OPTIONS = Options(timeout=60.0, arena_bytes=8 << 20, nccl=False)
FEW_OPTIONS = Options(timeout=60.0, arena_bytes=1 << 20, blocks=1, tile=64, nccl=False)
# Of a dry run: an LL kernel, one without flags in its data, one with a root, and the barrier.
_FEW_KERNELS = (("all_reduce", "one_shot", "ll"), ("reduce_scatter", "one_shot", "simple"),
                ("gather", "one_shot", "ll"), ("barrier", "one_shot", "simple"))  # fmt: skip
_EXACT_RANKS = 8  # a product of more is beyond the narrow types
_PADDING = 16


@dataclass(frozen=True)
class Call:
    """One call: elements a row, operation, and by how many elements input and output are misaligned."""

    count: int
    op: str
    offset: int

    def aligned(self, kernel: Kernel, itemsize: int) -> bool:
        """True where the kernel is compiled for 16-byte accesses; of most, every row has to be aligned."""
        even = kernel.collective in ("all_reduce", "all_to_all_v") or self.count * itemsize % 16 == 0
        return even and self.offset * itemsize % 16 == 0


def kernels(world_size: int, dry_run: bool) -> list[Kernel]:
    """Every registered kernel that so many ranks can run; in a dry run a few that stand for all."""
    if dry_run:
        return [registry.find(*key) for key in _FEW_KERNELS]
    return [k for k in registry.KERNELS if not k.needs_cube or world_size == registry.CUBE_RANKS]


def of_processes(world_size: int, dry_run: bool) -> list[Kernel]:
    """Those and the ones over symmetric memory, which ranks of one process have no need of."""
    return kernels(world_size, dry_run) + list(registry.ZERO_COPY)


def dtypes(kernel: Kernel, dry_run: bool) -> tuple[str, ...]:
    """Names of the types that the kernel takes; in a dry run a narrow one, and one of two lanes."""
    if kernel.collective == "barrier":
        return ("float32",)
    return ("bfloat16", "complex64") if dry_run else tuple(DTYPES)


def options(dry_run: bool) -> Options:
    """Mailboxes that the larger calls go through several times."""
    return FEW_OPTIONS if dry_run else OPTIONS


def tier(part: str, smallest: bool) -> int:
    """The value of a part of the checks (see `stage.Case`): other worlds come later, their first call not by much."""
    if part == PARTS[0]:
        return 0 if smallest else 2
    return 2 * PARTS.index(part) - 1 + (0 if smallest else 3)


def parts(kernel: Kernel) -> tuple[str, ...]:
    """Those of `PARTS` in which there is something to call `kernel` with."""
    if kernel.collective == "barrier":
        return PARTS[:1]
    return PARTS if kernel.reduces else PARTS[:-1]


def of_part(kernel: Kernel, world_size: int, part: str, dry_run: bool) -> dict[str, list[Call]]:
    """What to call `kernel` with in one of `PARTS`, by type: one size of one type, its other sizes, every size of the
    other types, and a few sizes of all other operations. Nothing if so many ranks cannot run the kernel."""
    found: dict[str, list[Call]] = {}
    for name in dtypes(kernel, dry_run):
        every = calls(kernel, world_size, name, dry_run)
        sizes = [call for call in every if call.op == every[0].op]
        if part == PARTS[3]:
            wanted = [call for call in every if call.op != every[0].op]
        elif part == PARTS[2]:
            wanted = sizes if name != FIRST_TYPE else []
        elif kernel.collective == "barrier":
            wanted = sizes if part == PARTS[0] else []
        else:
            first = [call for call in sizes if call.count == _ONE[dry_run]] if name == FIRST_TYPE else []
            wanted = first if part == PARTS[0] else [call for call in sizes if call not in first]
            wanted = wanted if name == FIRST_TYPE else []
        found |= {name: wanted} if wanted else {}
    return found


def calls(kernel: Kernel, world_size: int, dtype: str, dry_run: bool) -> list[Call]:
    """All parts' calls of a type: every size for its first operation, every second one misaligned, and a few for its
    others."""
    if kernel.needs_cube and world_size != registry.CUBE_RANKS:
        return []
    if kernel.collective == "barrier":
        return [Call(0, "none", 0)] * 3
    ops = [op for op in DTYPES[dtype].ops if op != "prod" or world_size <= _EXACT_RANKS]
    first, *others = ops if kernel.reduces else ["none"]
    counts, fewer = (FEW, FEW_OTHERS) if dry_run else (COUNTS, OTHERS)
    whole = kernel.zero_copy and collective_calls.in_place(kernel.collective, kernel)  # a handle has no offset
    found = [Call(count, first, 0 if whole else n % 2 * (1 + n % 3)) for n, count in enumerate(counts)]
    return found + [Call(count, op, 0) for op in (others[:1] if dry_run else others) for count in fewer]


def sweep(comm: Communicator, kernel: Kernel, part: str, dry_run: bool) -> tuple[int, list[str]]:
    """A part of the checks: how many calls were made, and what came out wrong."""
    made, found = 0, []
    for name, wanted in of_part(kernel, comm.world_size, part, dry_run).items():
        found += [f"{name}: {text}" for text in wrong(comm, kernel, getattr(torch, name), wanted)]
        made += len(wanted)
        if kernel.collective == "all_to_all_v" and part != PARTS[0]:
            found += [f"{name}: {text}" for text in uneven_splits.wrong(comm, kernel, getattr(torch, name), dry_run)]
    return made, found


def wrong(comm: Communicator, kernel: Kernel, dtype: torch.dtype, wanted: Iterable[Call]) -> list[str]:
    """Make the calls, one after another with other data and another root each time; what was wrong, in words."""
    found = []
    for number, call in enumerate(wanted):
        if kernel.collective == "barrier":
            comm.barrier()
        else:
            found += [f"rank {comm.rank}, {call}: {text}" for text in _trouble(comm, kernel, dtype, call, number)]
    return found


def _trouble(comm: Communicator, kernel: Kernel, dtype: torch.dtype, call: Call, number: int) -> list[str]:
    name, world_size = kernel.collective, comm.world_size
    with comm.device:  # a row for each of eight ranks would take a CPU seconds
        data = check_data.values(name, call.op, world_size, comm.rank, number, call.count, dtype)
        exact = check_data.expected(name, call.op, world_size, number, call.count, comm.rank, dtype)
    source = target = _Shared(comm, dtype, call) if kernel.zero_copy else _Memory(comm, dtype, data.numel(), call)
    if not collective_calls.in_place(name, kernel):
        target = _Memory(comm, dtype, call.count * kernel.kind.rows_out(world_size), call)
    source.inside.copy_(data)
    source.note()
    target.note()
    collective_calls.call(comm, name, number, source.argument, target.inside, kernel, call.op)
    comm.synchronize()
    found = []
    if check_data.gets(name, world_size, comm.rank, number):
        bad = check_data.wrong(target.inside, exact.cpu())
        found += [f"{bad} elements are wrong"] if bad else []
        target.forget()
    found += ["memory beside the output was written"] if target.changed() else []
    found += ["the input was written"] if target is not source and source.changed() else []
    source.close()
    return found


class _Memory:
    """A tensor `inside` others' memory, all of it poisoned at first, and the `argument` that it is passed as."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, count: int, call: Call) -> None:
        self._over(torch.empty(count + 2 * call.offset + _PADDING, dtype=dtype, device=comm.device), count, call.offset)
        self.argument: torch.Tensor | Symmetric = self.inside

    def _over(self, whole: torch.Tensor, count: int, offset: int) -> None:
        check_data.poison(whole)
        self._bytes = whole.view(torch.uint8)
        self._part = slice(offset * whole.itemsize, (offset + count) * whole.itemsize)
        self.inside = whole[offset : offset + count]

    def note(self) -> None:
        """From here on, nothing is to change."""
        self._noted = self._bytes.clone()

    def forget(self) -> None:
        """What is inside may have changed."""
        self._noted[self._part] = self._bytes[self._part]

    def changed(self) -> bool:
        return not torch.equal(self._bytes, self._noted)

    def close(self) -> None:
        """Nothing is to be given back."""


class _Shared(_Memory):
    """The whole of a symmetric tensor: a handle has no offset."""

    def __init__(self, comm: Communicator, dtype: torch.dtype, call: Call) -> None:
        self._handle = self.argument = comm.symmetric((call.count,), dtype)
        self._over(self._handle.local, call.count, 0)

    def close(self) -> None:
        self._handle.close()
