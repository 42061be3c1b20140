"""The calls by which `tricomm check` runs the shipped kernels: a few, of changing sizes, on integers, compared
exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tricomm.communicator import Communicator
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.explorer.campaign import smallest
from tricomm.explorer.compiled.compiled_runtime import capability_of, checked_options
from tricomm.explorer.shipped_calls import ShippedCalls
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.left_out import by_reason
from tricomm.options import Options, tuned
from tricomm.policy.launch_shapes import LEAST_WIRE_TILE

# Sizes in 64-bit words (of a shard, if the kernel has shards). With two blocks, the second one has work in every other
# # call. There are calls with full tiles, with a partial tile, and with no tile.
SIZES = (36, 1, 40)
RANKS = 3
BLOCKS, TILE = 2, 16  # words of a tile; fewer if a kernel's buffers need that
# Sizes for compiled kernels, whose tiles have 512 words.
COMPILED_SIZES = (1028, 1, 1032)
_OFFERED = (75, 80, 90, 100)  # architectures to suggest if no requested kernel can be compiled
# Each block serves a queue of a pair of ranks, so two blocks need two queues.
_QUEUES = 2


def body(kernel: Kernel, sizes: Sequence[float] = SIZES) -> Callable[[Communicator], list[torch.Tensor]]:
    """A function `fn(comm)` that calls `kernel` once per size, on numbers that differ in every call, rank and element.
    For numbers of 32 bits (half a word), a sum shows the order in which it was added."""

    def fn(comm: Communicator) -> list[torch.Tensor]:
        calls = ShippedCalls(comm)
        results = (calls.make(kernel, number, size) for number, size in enumerate(sizes))
        return [result for result in results if result is not None]

    fn.__qualname__ = kernel.name
    fn.subject = {"kernel": kernel.name, "sizes": list(sizes)}  # type: ignore[attr-defined]
    return fn


def sizes(kernel: Kernel, world_size: int, memory: Options, compiled: str | None = None) -> tuple[float, ...]:
    """The sizes of the calls of `tricomm check`: `SIZES`, but the first call takes three chunks. Its last chunk uses
    the mailbox of its first chunk again, and has an odd number of words. Compiled kernels, which take longer, and a
    cube mesh, which has eight ranks, get at least two chunks.

    The end of a launch orders it before the next one. Only chunks of one launch show what orders chunks.
    """
    first, *others = SIZES if compiled is None else COMPILED_SIZES
    if kernel.collective == "barrier" or kernel.needs_cube or kernel.collective == FUSED:
        return (first, *others)
    plan = layout.plan(world_size, memory.arena_bytes)
    if kernel.pairwise:
        # The plain message of the second call (`MessageCalls`) gets slots that have held LL words. In queue 1 the next
        # piece of its slot fills the slot; in queue 0 it is one word, and only the piece after that fills it.
        slot = plan.slot_words(kernel.protocol)
        if compiled is not None:
            return (slot + 5, 1, 37, 1, slot + 5)  # few words, until slots are reused
        return (5 * slot + 37, 5 * slot + 37, 2 * slot + 5, 5 * slot + 37)
    # a switch has an order of its own
    ordered = (0.5,) if compiled is None and kernel.reduces and not kernel.multicast else ()
    if kernel.zero_copy:
        return (first, first, 1, *ordered)  # one handle in two consecutive calls; there are no chunks
    chunk = plan.buffer_words(kernel.algorithm, kernel.protocol, kernel.collective)
    chunk *= world_size if kernel.staged else 1
    return (max(first, chunk * (2 if compiled is None else 1) + 5), *others, *ordered)


def kernels(collective: str | None, algorithm: str | None, protocol: str | None) -> list[Kernel]:
    """The shipped kernels that match; None or "all" matches all. Raises `InvalidArgument` if none does."""
    wanted = {"collective": collective, "algorithm": algorithm, "protocol": protocol}
    wanted = {name: value for name, value in wanted.items() if value not in (None, "all")}
    handles = (*registry.ZERO_COPY, *registry.MULTICAST_ZERO_COPY)
    sends = [k for k in registry.MESSAGES if k.collective == "send"]  # each is run together with its recv
    known = [*registry.KERNELS, *registry.MULTICAST, *handles, *registry.of(FUSED, 2), *sends, *registry.WIRE]
    chosen = [k for k in known if all(getattr(k, n) in str(v).split(",") for n, v in wanted.items())]
    if not chosen:
        same = [k for k in known if k.collective in (wanted.get("collective") or k.collective).split(",")]
        names = [registry.name_of(k.algorithm, k.protocol) for k in same] or [k.collective for k in known]
        asked = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise InvalidArgument(f"no shipped kernel has {asked}; there is {', '.join(dict.fromkeys(names))}")
    return chosen


def usable(
    wanted: list[Kernel], world_size: int | None, architecture: str | None
) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels of `wanted` that `world_size` ranks (None: the number that each kernel needs) can run, and that the
    installed Triton compiles for `architecture` (None: they are interpreted); and, by name, why the others are left
    out. If none is usable, raises `InvalidArgument` with options that would work."""
    capability = None if architecture is None else capability_of(architecture)
    reasons = {k.name: reason for k in wanted if (reason := _why_not(k, world_size, capability)) is not None}
    left = [kernel for kernel in wanted if kernel.name not in reasons]
    if not left:
        why = "; ".join(by_reason(reasons.items()))
        ways = " or ".join(_ways(wanted, world_size, capability))
        raise InvalidArgument(f"no shipped kernel that was asked for can run so: {why}. Run it {ways}")
    return left, reasons


def _why_not(kernel: Kernel, world_size: int | None, capability: int | None) -> str | None:
    ranks = None if world_size is None else kernel.why_not_ranks(world_size)
    return ranks or (None if capability is None else kernel.why_not_compiled(capability))


def _ways(wanted: list[Kernel], world_size: int | None, capability: int | None) -> list[str]:
    """Changes of the options that would make some of `wanted` usable."""

    def some(world_size: int | None, capability: int | None) -> bool:
        return any(_why_not(kernel, world_size, capability) is None for kernel in wanted)

    newer = [] if capability is None else [other for other in _OFFERED if some(world_size, other)]
    ways = {
        "without --compiled, which interprets the kernels,": some(world_size, None),
        f"with --compiled {' or '.join(f'sm_{other}' for other in newer)}": bool(newer),
        "without --world-size": some(None, capability),
    }
    return [way for way, works in ways.items() if works] or ["without --compiled and --world-size"]


def ranks(kernel: Kernel) -> int:
    """The number of ranks on which `tricomm check` runs it by default."""
    return registry.CUBE_RANKS if kernel.needs_cube else RANKS


def options(
    world_size: int,
    blocks: int = BLOCKS,
    tile: int | None = None,
    compiled: str | None = None,
    kernel: Kernel | None = None,
) -> Options:
    """Options with the smallest memory, and with blocks and tiles so small that `kernel` (or every kernel) takes all
    its paths."""
    memory = smallest(world_size) if compiled is None else checked_options(world_size, None)
    plan = layout.plan(world_size, memory.arena_bytes)
    while kernel is not None and _too_small(plan, kernel):
        memory = replace(memory, arena_bytes=memory.arena_bytes * 2)
        plan = layout.plan(world_size, memory.arena_bytes)
    if tile is None and kernel is not None and kernel.pairwise:
        tile = plan.slot_words("ll") // 2
    elif tile is None and compiled is None:
        users = registry.KERNELS if kernel is None else (kernel,)
        tile = min(_most_of_tile(kernel), *(plan.largest_tile(k.algorithm, k.protocol) for k in users))
    return tuned(memory, blocks=blocks, tile=tile)


def _too_small(plan: layout.Layout, kernel: Kernel) -> bool:
    """True if an arena lacks queues for the blocks of a message, or room for a block of quantised values."""
    if kernel.pairwise:
        return plan.queues < _QUEUES
    return bool(kernel.wire) and plan.largest_tile(kernel.algorithm, kernel.protocol) < LEAST_WIRE_TILE


def _most_of_tile(kernel: Kernel | None) -> int:
    """The tile with which three chunks (`sizes`) take few steps."""
    if kernel is not None and kernel.wire:
        return LEAST_WIRE_TILE
    if kernel is None or kernel.needs_cube:
        return TILE
    if kernel.collective == FUSED:
        return 2 * TILE if kernel.wide else TILE  # a tile of rows has planes, each as long as a tile of another kernel
    return 4 * TILE if kernel.staged else 2 * TILE
