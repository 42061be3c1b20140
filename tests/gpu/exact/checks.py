"""Collectives with results that are known exactly: every kernel, type and operation, odd sizes, several chunks.

For ranks that are streams of one process or processes, on the device of `comm`. `few` takes a few small calls, which
Triton's interpreter makes in seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tests.marks import compiles
from tricomm import Communicator, Options
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES
from tricomm.kernels.wide_words import FIRST_ARCHITECTURE
from tricomm.options import Tuning
from tricomm.perf.bench import check_data, collective_calls

# The parts of a kernel's checks, the most informative first.
PARTS = ("one size", "every size", "every type", "every operation")
FIRST_TYPE = "bfloat16"
# Elements a row: one, odd ones, a tile and one more or less, and (of 8 bytes) several times a mailbox of `OPTIONS`.
COUNTS = (1, 3, 517, 4095, 4096, 4097, 100_003, 1_000_001)
OTHERS = (517, 4097)  # of all operations but a type's first one, because each is a variant to compile
FEW, FEW_OTHERS = (1, 37), (37,)
_ONE = {False: COUNTS[4], True: FEW[1]}  # elements of part `one size`, by `few`
OPTIONS = Options(timeout=60.0, arena_bytes=8 << 20, nccl=False)
FEW_OPTIONS = Options(timeout=60.0, arena_bytes=1 << 20, nccl=False, _tuning=Tuning(blocks=1, tile=64))
_EXACT_RANKS = 8  # a product over more ranks overflows the narrow types
_PADDING = 16
UNEVEN_WIDTHS = (1, 37, 4097)  # elements a row in calls with uneven rows


@dataclass(frozen=True)
class CheckedCall:
    """One call: elements a row, operation, and the misalignment of input and output in elements."""

    count: int
    op: str
    offset: int

    def aligned(self, kernel: Kernel, itemsize: int) -> bool:
        """True if the call uses the kernel that is compiled for 16-byte accesses; most need every row aligned."""
        even = kernel.collective in ("all_reduce", "all_to_all_v") or self.count * itemsize % 16 == 0
        return even and self.offset * itemsize % 16 == 0


def kernels(world_size: int) -> list[Kernel]:
    """The registered kernels that `world_size` ranks can run and this Triton compiles."""
    known = [k for k in registry.KERNELS if compiles(k, FIRST_ARCHITECTURE)]
    return [k for k in known if not k.needs_cube or world_size == registry.CUBE_RANKS]


def of_processes(world_size: int) -> list[Kernel]:
    """`kernels`, and the kernels over symmetric memory, which need ranks that are processes."""
    return kernels(world_size) + list(registry.ZERO_COPY)


def parts(kernel: Kernel) -> tuple[str, ...]:
    """The parts of `PARTS` that have calls of `kernel`."""
    if kernel.collective == "barrier":
        return PARTS[:1]
    return PARTS if kernel.reduces else PARTS[:-1]


def of_part(kernel: Kernel, world_size: int, part: str, few: bool = False) -> dict[str, list[CheckedCall]]:
    """The calls of `kernel` in one of `PARTS`, by type: one size of one type, its other sizes, every size of the other
    types, and a few sizes of all other operations. Empty if `world_size` ranks cannot run the kernel."""
    names = ("float32",) if kernel.collective == "barrier" else (FIRST_TYPE, "complex64") if few else tuple(DTYPES)
    by_type = {}
    for name in names:
        every = calls(kernel, world_size, name, few)
        wanted = [call for call in every if _part(kernel, name, call, every[0].op, few) == part]
        by_type |= {name: wanted} if wanted else {}
    return by_type


def _part(kernel: Kernel, name: str, call: CheckedCall, first_op: str, few: bool) -> str:
    if kernel.collective == "barrier":
        return PARTS[0]
    if call.op != first_op:
        return PARTS[3]
    if name != FIRST_TYPE:
        return PARTS[2]
    return PARTS[0] if call.count == _ONE[few] else PARTS[1]


def calls(kernel: Kernel, world_size: int, dtype: str, few: bool = False) -> list[CheckedCall]:
    """The calls of all parts for a type: every size with its first operation, half of them misaligned, and a few sizes
    with its other operations."""
    if kernel.needs_cube and world_size != registry.CUBE_RANKS:
        return []
    if kernel.collective == "barrier":
        return [CheckedCall(0, "none", 0)] * 3
    ops = [op for op in DTYPES[dtype].ops if op != "prod" or world_size <= _EXACT_RANKS]
    first, *others = ops if kernel.reduces else ["none"]
    counts, fewer = (FEW, FEW_OTHERS) if few else (COUNTS, OTHERS)
    whole = kernel.zero_copy and collective_calls.in_place(kernel.collective, kernel)  # a handle has no offset
    made = [CheckedCall(count, first, 0 if whole else n % 2 * (1 + n % 3)) for n, count in enumerate(counts)]
    return made + [CheckedCall(count, op, 0) for op in (others[:1] if few else others) for count in fewer]


def sweep(comm: Communicator, kernel: Kernel, wanted: Iterable[str], few: bool = False) -> list[str]:
    """Make the calls of the parts `wanted`; return the errors as texts."""
    errors = []
    for part in wanted:
        for name, each in of_part(kernel, comm.world_size, part, few).items():
            errors += [f"{kernel.name}, {name}: {text}" for text in wrong(comm, kernel, getattr(torch, name), each)]
            if kernel.collective == "all_to_all_v" and part != PARTS[0]:
                uneven = wrong_uneven(comm, kernel, getattr(torch, name), few)
                errors += [f"{kernel.name}, {name}: {text}" for text in uneven]
    return errors


def wrong(comm: Communicator, kernel: Kernel, dtype: torch.dtype, wanted: Iterable[CheckedCall]) -> list[str]:
    """Make the calls one after another, each with other data and another root; return the errors as texts."""
    errors = []
    for number, call in enumerate(wanted):
        if kernel.collective == "barrier":
            comm.barrier()
        else:
            errors += [f"rank {comm.rank}, {call}: {text}" for text in _errors(comm, kernel, dtype, call, number)]
    return errors


def _errors(comm: Communicator, kernel: Kernel, dtype: torch.dtype, call: CheckedCall, number: int) -> list[str]:
    name, world_size = kernel.collective, comm.world_size
    with comm.device:  # on a CPU, a row for each of eight ranks would take seconds
        data = check_data.values(name, call.op, world_size, comm.rank, number, call.count, dtype)
        exact = check_data.expected(name, call.op, world_size, number, call.count, comm.rank, dtype)
    source = target = _Memory(comm, dtype, data.numel(), call.offset, kernel.zero_copy)
    if not collective_calls.in_place(name, kernel):
        target = _Memory(comm, dtype, call.count * kernel.kind.rows_out(world_size), call.offset, False)
    source.inside.copy_(data)
    source.snapshot()
    target.snapshot()
    collective_calls.call(comm, name, number, source.argument, target.inside, kernel, call.op)
    comm.synchronize()
    errors = []
    if check_data.gets(name, world_size, comm.rank, number):
        bad = check_data.wrong(target.inside, exact.cpu())
        errors += [f"{bad} elements are wrong"] if bad else []
        target.accept_inside()
    errors += ["memory around the output was written"] if target.changed() else []
    errors += ["the input was written"] if target is not source and source.changed() else []
    source.close()
    return errors


def uneven_rows(world_size: int, number: int) -> list[list[int]]:
    """The numbers of rows from rank s to rank d in call number `number`, at [s][d]."""
    return [[(3 * s + 5 * d + number) % 4 for d in range(world_size)] for s in range(world_size)]


def wrong_uneven(comm: Communicator, kernel: Kernel, dtype: torch.dtype, few: bool = False) -> list[str]:
    """all_to_all_v with another number of rows for every pair of ranks, some 0; return the errors as texts."""
    errors = []
    for number, width in enumerate(UNEVEN_WIDTHS[:2] if few else UNEVEN_WIDTHS):
        rows = uneven_rows(comm.world_size, number)
        mine = [row[comm.rank] for row in rows]
        data = [_sent(comm.world_size, source, number, rows[source], width, dtype) for source in range(comm.world_size)]
        x = torch.cat(data[comm.rank]).to(comm.device, dtype)
        y = torch.empty(sum(mine), width, dtype=dtype, device=comm.device)
        check_data.poison(y)
        comm.all_to_all_v(x, rows[comm.rank], mine, out=y, algorithm=kernel.algorithm, protocol=kernel.protocol)
        comm.synchronize()
        bad = check_data.wrong(y, torch.cat([parts[comm.rank] for parts in data]))
        errors += [f"rank {comm.rank}, rows {rows} of {width} elements: {bad} elements are wrong"] if bad else []
    return errors


def _sent(
    world_size: int, source: int, number: int, rows: list[int], width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """int64 [rows, width] for every rank: the rows that rank `source` sends to it."""
    numbers = check_data.values("broadcast", "none", world_size, source, number, sum(rows) * width, dtype)
    return tuple(torch.split(numbers.view(-1, width), rows))


class _Memory:
    """A tensor `inside` a larger one, which is poisoned at first, and the `argument` that it is passed as.

    A symmetric tensor is used as a whole, because a handle has no offset.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype, count: int, offset: int, symmetric: bool) -> None:
        offset, padding = (0, 0) if symmetric else (offset, 2 * offset + _PADDING)
        self._handle = comm.symmetric((count,), dtype) if symmetric else None
        whole = self._handle.local if self._handle else torch.empty(count + padding, dtype=dtype, device=comm.device)
        check_data.poison(whole)
        self._bytes = whole.view(torch.uint8)
        self._part = slice(offset * whole.itemsize, (offset + count) * whole.itemsize)
        self.inside = whole[offset : offset + count]
        self.argument = self._handle or self.inside

    def snapshot(self) -> None:
        """From here on no byte may change."""
        self._snapshot = self._bytes.clone()

    def accept_inside(self) -> None:
        """The tensor inside may have changed."""
        self._snapshot[self._part] = self._bytes[self._part]

    def changed(self) -> bool:
        return not torch.equal(self._bytes, self._snapshot)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
