"""The calls of `tricomm check` for the shipped kernels: a few of changing size, on integers, compared exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.core.fused import fused_checks, unfused
from tricomm.core.fused.fused_call import FUSED
from tricomm.core.fused.fused_checks import FusedArguments
from tricomm.errors import InvalidArgument
from tricomm.explorer.campaign import smallest
from tricomm.explorer.compiled.compiled_runtime import capability_of, checked_options
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.left_out import by_reason
from tricomm.options import Options

# In 64-bit words, of a shard if the kernel has shards. With two blocks, the second one has work in every other call.
# There are calls with full tiles, with a partial one, and with none.
SIZES = (36, 1, 40)
RANKS = 3
BLOCKS, TILE = 2, 16  # or fewer words, if the buffers of a kernel need that
# The same for compiled kernels, whose tiles have 512 words.
COMPILED_SIZES = (1028, 1, 1032)
_OFFERED = (75, 80, 90, 100)  # architectures that are suggested if no requested kernel can be compiled
_QUANTIZED = {
    ("one_shot", "ll"): "nvfp4", ("two_shot", "ll"): "fp8_per_token", ("one_shot", "ll128"): "fp8",
    ("two_shot", "ll128"): None,
}  # fmt: skip


def body(kernel: Kernel, sizes: Sequence[float] = SIZES) -> Callable[[Communicator], list[torch.Tensor]]:
    """`fn(comm)` that calls `kernel` once a size, on numbers that differ in every call, rank and element. Half a word
    is a number of 32 bits, and of those a sum tells in which order it was added."""

    def fn(comm: Communicator) -> list[torch.Tensor]:
        return [
            result for number, size in enumerate(sizes) if (result := _call(comm, kernel, number, size)) is not None
        ]

    fn.__qualname__ = kernel.name
    fn.subject = {"kernel": kernel.name, "sizes": list(sizes)}  # type: ignore[attr-defined]
    return fn


def sizes(kernel: Kernel, world_size: int, memory: Options, compiled: str | None = None) -> tuple[float, ...]:
    """The calls of `tricomm check`: `SIZES`, the first one so long that it takes three chunks, of which the last one
    uses the first one's mailbox again and has an odd number of words. Of compiled kernels, which take longer, and of a
    cube mesh, which has eight ranks, two chunks at least.

    Between two launches the end of the first one orders everything; only chunks of one launch show what orders them.
    """
    first, *others = SIZES if compiled is None else COMPILED_SIZES
    if kernel.collective == "barrier" or kernel.needs_cube or kernel.collective == FUSED:
        return (first, *others)
    plan = layout.plan(world_size, memory.arena_bytes)
    if kernel.pairwise:
        chunk = plan.slot_words(kernel.protocol)
    else:
        chunk = plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective)
        chunk *= world_size if kernel.staged else 1
    long = max(first, chunk * (2 if compiled is None else 1) + 5)
    if kernel.pairwise:
        return (long, 1, long)  # until slots are used again
    ordered = compiled is None and kernel.reduces and not kernel.multicast  # a switch has an order of its own
    return (long, *others, 0.5) if ordered else (long, *others)


def kernels(collective: str | None, algorithm: str | None, protocol: str | None) -> list[Kernel]:
    """The shipped kernels that match; None or "all" matches all. Raises `InvalidArgument` if none does."""
    wanted = {"collective": collective, "algorithm": algorithm, "protocol": protocol}
    wanted = {name: value for name, value in wanted.items() if value not in (None, "all")}
    sends = [k for k in registry.MESSAGES if k.collective == "send"]  # each with its recv
    known = [*registry.KERNELS, *registry.MULTICAST, *registry.of(FUSED, 2), *sends]
    chosen = [k for k in known if all(getattr(k, n) in str(v).split(",") for n, v in wanted.items())]
    if not chosen:
        names = ", ".join(f"{k.collective}/{k.algorithm}/{k.protocol}" for k in known)
        raise InvalidArgument(f"no shipped kernel is {wanted}; there is {names}")
    return chosen


def usable(
    wanted: list[Kernel], world_size: int | None, architecture: str | None
) -> tuple[list[Kernel], dict[str, str]]:  # fmt: skip
    """Those of `wanted` that `world_size` ranks can run (None: as many as each needs), and that this Triton compiles
    for `architecture` (None: they are interpreted); and by name why others are left out. If none is usable, raises
    `InvalidArgument` with options that would work."""
    capability = None if architecture is None else capability_of(architecture)
    reasons = {k.name: reason for k in wanted if (reason := _why_not(k, world_size, capability)) is not None}
    left = [kernel for kernel in wanted if kernel.name not in reasons]
    if not left:
        why = "; ".join(by_reason(reasons.items()))
        ways = "; ".join(_ways(wanted, world_size, capability))
        raise InvalidArgument(f"no shipped kernel that was asked for can run so: {why}. What works: {ways}")
    return left, reasons


def _why_not(kernel: Kernel, world_size: int | None, capability: int | None) -> str | None:
    ranks = None if world_size is None else kernel.why_not_ranks(world_size)
    return ranks or (None if capability is None else kernel.why_not_compiled(capability))


def _ways(wanted: list[Kernel], world_size: int | None, capability: int | None) -> list[str]:
    """Changes of the options with which some of `wanted` can run."""

    def some(world_size: int | None, capability: int | None) -> bool:
        return any(_why_not(kernel, world_size, capability) is None for kernel in wanted)

    newer = [] if capability is None else [other for other in _OFFERED if some(world_size, other)]
    ways = {
        "no --compiled, which interprets the kernels": some(world_size, None),
        f"--compiled {' or '.join(f'sm_{other}' for other in newer)}": bool(newer),
        "no --world-size": some(None, capability),
    }
    return [way for way, works in ways.items() if works] or ["neither --compiled nor --world-size"]


def ranks(kernel: Kernel) -> int:
    """The number of ranks on which `tricomm check` runs it by default."""
    return registry.CUBE_RANKS if kernel.needs_cube else RANKS


def options(
    world_size: int, blocks: int = BLOCKS, tile: int | None = None, compiled: str | None = None,
    kernel: Kernel | None = None,
) -> Options:  # fmt: skip
    """The smallest memory, and blocks and tiles so small that every path is taken: by `kernel`, or by any kernel."""
    if compiled is not None:
        return replace(checked_options(world_size, None), blocks=blocks)
    nbytes = smallest(world_size).arena_bytes
    if tile is None:
        memory = layout.plan(world_size, nbytes)
        users = registry.KERNELS if kernel is None else (kernel,)
        tile = min(_most_of_tile(kernel), *(memory.largest_tile(k.algorithm, k.protocol) for k in users))
        if kernel is not None and kernel.pairwise:
            tile = min(tile, memory.slot_words("ll"))  # of the two protocols, the one with fewer
    return Options(arena_bytes=nbytes, blocks=blocks, tile=tile)


def _most_of_tile(kernel: Kernel | None) -> int:
    """So long that three chunks (`sizes`) take few steps."""
    if kernel is None or kernel.needs_cube:
        return TILE
    if kernel.collective == FUSED:
        return 2 * TILE if kernel.wide else TILE  # a row's tile has planes, each as long as another kernel's tile
    return 4 * TILE if kernel.staged else 2 * TILE


def _call(comm: Communicator, kernel: Kernel, number: int, size: float) -> Any:
    if kernel.collective == "barrier":
        return comm.barrier()
    if kernel.pairwise:
        return _handed_on(comm, kernel.protocol, number, int(size))
    if kernel.collective == FUSED:
        return _normalised(comm, kernel, number)
    kind, shards = kernel.kind, 1 if kernel.shards is None else kernel.shards or comm.world_size
    if size < 1:
        count = shards
        # In rank order the large numbers cancel first. In most other orders they absorb the ones.
        value = (number + 1) * ((1e8, -1e8)[comm.rank] if comm.rank < 2 else 1.0)
        x = torch.full((count * kind.rows_in(comm.world_size),), value)
    else:
        count = int(size) * shards
        x = numbers(number, comm.rank, count * kind.rows_in(comm.world_size))
    how: dict[str, Any] = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    if kind.root:
        how[kind.root] = number % comm.world_size
    if kernel.collective == "all_to_all_v":
        return _uneven(comm, x, count, number, how)
    if kernel.collective not in ("broadcast", "reduce") and (kind.root != "dst" or how["dst"] == comm.rank):
        how["out"] = torch.full((count * kind.rows_out(comm.world_size),), -1, dtype=x.dtype)
    return getattr(comm, kernel.collective)(x, **how)


def _uneven(comm: Communicator, x: torch.Tensor, count: int, number: int, how: dict[str, Any]) -> Any:
    """Rows of 0 to `count` elements, by sender, receiver and call."""
    ranks, me = range(comm.world_size), comm.rank
    length = [[(count * (a + 2 * b + number)) % (count + 1) for b in ranks] for a in ranks]
    into, out = length[me], [length[r][me] for r in ranks]
    y = torch.full((sum(out),), -1, dtype=torch.int64)
    comm.all_to_all_v(x[: sum(into)], into, out, y, **how)
    firsts = [sum(row[:me]) for row in length]
    want = torch.cat([numbers(number, r, len(x))[firsts[r] :][: out[r]] for r in ranks])
    if not torch.equal(y, want):  # the oracle sees no uneven calls
        raise AssertionError(f"all_to_all_v gave {y.tolist()} instead of {want.tolist()}")
    return y


def _normalised(comm: Communicator, kernel: Kernel, number: int) -> torch.Tensor:
    """Rows that end in RMSNorm, by each kernel with another quantisation, beside the same steps without a kernel."""
    rows, hidden = (5, 1, 2)[number % 3], 160
    quantize = _QUANTIZED[kernel.algorithm, kernel.protocol]
    given = {"quantize": quantize, "scale": None if quantize in (None, "fp8_per_token") else 0.5}
    x, residual = (numbers(number, rank, rows * hidden) % 61 - 30 for rank in (comm.rank, comm.world_size))
    total = sum(numbers(number, rank, rows * hidden) % 61 - 30 for rank in range(comm.world_size))
    tensors = [each.to(torch.bfloat16).view(rows, hidden) for each in (x, residual, torch.as_tensor(total))]
    weight = (torch.arange(hidden) % 5).to(torch.bfloat16)
    call, exact = (
        fused_checks.checked(FusedArguments(start, tensors[1], weight, 1e-6, **given), comm.device)
        for start in (tensors[0], tensors[2])
    )
    comm.run_fused(call, kernel.algorithm, kernel.protocol)
    unfused.finish(exact, exact.x)
    for name in ("residual_out", "norm_out", "quant_out", "scale_out"):
        got, want = getattr(call, name), getattr(exact, name)
        if want is not None and not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):  # not the oracle's
            raise AssertionError(f"{kernel.name} of {rows} rows: {name} differs from the unfused steps")
    return call.residual_out


def _handed_on(comm: Communicator, protocol: str, number: int, size: int) -> Any:
    """Two messages from each rank to the next one: a word, and then `size` of them, which are received first. In
    every other call the word goes by the other protocol, which leaves words of another kind in its slot.

    Only acknowledgements come back, so the first rank runs ahead as far as they let it. The second message fits into
    the slots that the first one leaves, because the receiver would refuse a longer one.
    """
    size = min(size, (layout.SLOTS - 1) * comm.arena_layout.slot_words(protocol))
    protocols = ({"ll": "simple", "simple": "ll"}[protocol] if number % 2 else protocol, protocol)
    results: list[torch.Tensor] = []
    if comm.rank:
        results = [torch.full((count,), -1, dtype=torch.int64) for count in (1, size)]
        for tag in (1, 0):
            comm.recv(results[tag], comm.rank - 1, tag, protocol=protocols[tag])
            want = numbers(number, comm.rank - 1, len(results[tag])) + tag
            if not torch.equal(results[tag], want):  # the oracle sees no messages
                raise AssertionError(f"recv gave {results[tag].tolist()} instead of {want.tolist()}")
    if comm.rank < comm.world_size - 1:
        for tag, count in enumerate((1, size)):
            comm.send(numbers(number, comm.rank, count) + tag, comm.rank + 1, tag, protocol=protocols[tag])
    return torch.cat(results) if results else None


def numbers(number: int, rank: int, count: int) -> torch.Tensor:
    first = rank * 1000 + number * 100_000
    return torch.arange(first, first + 7 * count, 7, dtype=torch.int64)  # one operation of the stream
