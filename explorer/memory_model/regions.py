"""The memory of one execution: named regions, and the places of accesses within them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from tricomm.errors import TricommError
from tricomm.kernels import layout
from tricomm.store.arenas.local_arena import host_bytes

Array = NDArray[Any]

_NAMES = (
    "rank control ll_base ll_buffer wide_base wide_buffer simple_base simple_buffer "
    "message_arrivals queue_states slot_data slot_bytes queues"
)
_TABLE: dict[int, str] = {getattr(layout, name.upper()): name for name in _NAMES.split()}
_ABORT_WORDS = [layout.ABORT, layout.STATUS]
_CHANGING = (range(layout.MESSAGE_ARRIVALS, layout.QUEUE_STATES), range(layout.EPOCHS, layout.HEADERS // 8))


class OutOfBounds(TricommError):
    """An access outside of all memory that the kernel was given."""


@dataclass(eq=False)
class Region:
    """A range of bytes. `kind` is arena, symmetric, control (words of the host, not examined) or private (of one
    launch).

    `rank` owns the memory; `plan` is the layout of an arena; `closed` says where each rank has closed its handle."""

    kind: str
    rank: int
    base: int
    nbytes: int
    name: str
    plan: layout.Layout | None = None
    shadow: Any = None
    closed: dict[int, str] = field(default_factory=dict)
    bytes: Array = field(init=False, repr=False)  # a late repr would read memory that is freed

    def __post_init__(self) -> None:
        self.end = self.base + self.nbytes
        self.bytes = host_bytes(self.base, self.nbytes)

    @property
    def shared(self) -> bool:
        """True if kernels of other ranks can access it."""
        return self.kind in ("arena", "symmetric")

    def offsets(self, addresses: Array) -> Array:
        """The offsets of addresses (uint64) in the region, as int64."""
        return (addresses - np.uint64(self.base)).astype(np.int64)

    def label(self, offset: int) -> str:
        """A readable name for byte `offset`."""
        if self.plan is None:
            return f"{self.name} byte {offset}"
        return f"rank {self.rank}'s arena, {_arena_label(self.plan, offset)}"

    def acknowledges(self, offset: int) -> bool:
        """True for words in which receivers acknowledge slots. No rank may have read the last acknowledgement."""
        if self.plan is None or not self.plan.queue_states <= offset < self.plan.slots:
            return False
        word = (offset - self.plan.queue_states) % layout.QUEUE_STATE // 8
        return layout.ACKS <= word < layout.ACKS + layout.SLOTS

    def holds_messages(self, offset: int) -> bool:
        """True for the slots of messages between two ranks."""
        return self.plan is not None and offset >= self.plan.slots

    def constant(self, lowest: int, highest: int) -> bool:
        """True if these are words of a group table that no kernel writes. Reads of such words are not recorded."""
        if self.plan is None:
            return False
        return highest < layout.HEADERS and not any(lowest < 8 * w.stop and highest >= 8 * w.start for w in _CHANGING)


def closed_by(region: Region, rank: int) -> str:
    return f"{region.name}, which rank {rank} has closed at {region.closed[rank]}"


def _arena_label(plan: layout.Layout, offset: int) -> str:
    if offset < layout.HEADERS:
        word = offset // 8
        name = f"peer {word - layout.PEERS}" if word >= layout.PEERS else f"word {word}"
        if word >= layout.EPOCHS:
            name = f"epoch of block {word - layout.EPOCHS}"
        return f"group table, {_TABLE.get(word, name)}"
    if offset < plan.ll:
        row, block = divmod((offset - layout.HEADERS) // 8, layout.MAX_BLOCKS)
        row, source = divmod(row, plan.world_size)
        return f"header of rank {source}, block {block}, phase {row // 2}, parity {row % 2}"
    if offset >= plan.queue_states:
        return _message_label(plan, offset)
    mailboxes = (("simple", plan.simple, plan.simple_buffer), ("ll128", plan.wide, plan.wide_buffer))
    kind, start, buffer = next((m for m in mailboxes if offset >= m[1]), ("ll", plan.ll, plan.ll_buffer))
    part, at = divmod(offset - start, buffer)
    return f"{kind} mailbox, parity {part // plan.world_size}, from rank {part % plan.world_size}, byte {at}"


def _message_label(plan: layout.Layout, offset: int) -> str:
    if offset < plan.slots:
        line, at = divmod(offset - plan.queue_states, layout.QUEUE_STATE)
        rank, queue = divmod(line, plan.queues)
        word, heads = at // 8, 2 * layout.SLOTS
        own = {
            layout.SENT: "number to send",
            layout.NEXT: "number to receive",
            layout.RECEIVED_AHEAD: "received ahead",
            layout.PLAIN: "slots with plain data",
        }
        name = f"header of slot {word // 2}" if word < heads else own.get(word, f"ack of slot {word - layout.ACKS}")
        return f"messages with rank {rank}, queue {queue}, {name}"
    slot, at = divmod(offset - plan.slots, plan.slot)
    queue, slot = divmod(slot, layout.SLOTS)
    return f"messages from rank {queue // plan.queues}, queue {queue % plan.queues}, slot {slot}, byte {at}"


@dataclass(slots=True)
class Place:
    """The part of an access within one region: `offsets` (int64, bytes) of its elements.

    `lanes` picks them among the access's elements; None: all of them."""

    region: Region
    offsets: Array
    lanes: Array | None = None


def present(places: list[Place], itemsize: int, count: int) -> bytes:
    """The present bytes of the elements of an access, in lane order."""
    out = np.empty((count, itemsize), np.uint8)
    for place in places:
        lanes = slice(None) if place.lanes is None else place.lanes
        out[lanes] = place.region.bytes[place.offsets[:, None] + np.arange(itemsize)]
    return out.tobytes()


class Memory:
    """All regions of one execution. `multicast` (only of compiled kernels): addresses that stand for memory of all
    ranks, each with its size and the address in each rank's memory."""

    def __init__(self) -> None:
        self.multicast: list[tuple[int, int, tuple[int, ...]]] = []
        self._regions: list[Region] = []
        self._bases: list[int] = []

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def add(self, region: Region) -> None:
        at = bisect.bisect(self._bases, region.base)
        self._regions.insert(at, region)
        self._bases.insert(at, region.base)

    def remove(self, base: int) -> None:
        at = bisect.bisect(self._bases, base) - 1
        if at >= 0 and self._bases[at] == base:
            del self._regions[at], self._bases[at]

    def region(self, low: int, high: int, private: list[Region], rank: int = -1) -> Region | None:
        """The region that holds all bytes from `low` to before `high`; None if `rank` has closed it."""
        at = bisect.bisect(self._bases, low) - 1
        if at >= 0 and high <= self._regions[at].end:
            return self._regions[at] if rank not in self._regions[at].closed else None
        return next((r for r in private if r.base <= low and high <= r.end), None)

    def split(
        self, addresses: Array, nbytes: int, private: list[Region], rank: int
    ) -> list[tuple[Region, Array | None]] | int:
        """The regions of accesses to `nbytes` from each address, each with the numbers of the accesses to it (None:
        all). If an address is in no region, or in one that `rank` has closed, returns that address."""
        whole = self.region(int(addresses.min()), int(addresses.max()) + nbytes, private, rank)
        if whole is not None:
            return [(whole, None)]
        by_region: dict[int, tuple[Region, list[int]]] = {}
        for number, address in enumerate(addresses.tolist()):
            region = self.region(address, address + nbytes, private, rank)
            if region is None:
                return int(address)
            by_region.setdefault(id(region), (region, []))[1].append(number)
        return [(region, np.array(numbers)) for region, numbers in by_region.values()]

    def places(self, addresses: Array, itemsize: int, private: list[Region], rank: int = -1) -> list[Place] | int:
        """The places of the elements, one per region; or an address, as `split`."""
        found = self.split(addresses, itemsize, private, rank)
        if isinstance(found, int):
            return found
        places = []
        for region, numbers in found:
            lanes, mine = None, addresses
            if numbers is not None:
                lanes, mine = np.zeros(len(addresses), bool), addresses[numbers]
                lanes[numbers] = True
            places.append(Place(region, region.offsets(mine), lanes))
        return places

    def abort_words(self, rank: int) -> bytes:
        """The abort and status words of a rank."""
        control = next(r for r in self if r.kind == "control" and r.rank == rank)
        return control.bytes.view(np.int64)[_ABORT_WORDS].tobytes()

    def nearest(self, address: int, private: list[Region], rank: int) -> str:
        """Describe a bad address: the region that `rank` has closed, or the region closest to an address outside of
        all."""
        inside = self.region(address, address + 1, private)
        if inside is not None and rank in inside.closed:
            return closed_by(inside, rank)
        known = [*self._regions, *private]
        if not known:
            return "no memory is known"
        region = min(known, key=lambda r: max(r.base - address, address - r.end))
        gap = region.base - address if address < region.base else address - region.end
        side = "before" if address < region.base else "past the end of"
        return f"{gap} bytes {side} {region.name}"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments, however they are nested."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the address after the last one."""
    count = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.itemsize
