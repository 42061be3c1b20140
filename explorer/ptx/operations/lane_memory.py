"""Reads and writes memory for many lanes at once: by an address per lane, by a step between lanes, or by one
address."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.global_memory import AddressRange, BadAddress
from tricomm.explorer.ptx.unit_view import UnitView

# The first generic addresses of the block's shared memory, and of the lane's local memory.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3}
_TOP = np.uint64(1 << 62)

Find = Callable[[UnitView, int, int], AddressRange]


def global_region(unit: UnitView, address: int, nbytes: int) -> AddressRange:
    return unit.memory.find(address, nbytes)


def shared_region(unit: UnitView, address: int, nbytes: int) -> AddressRange:
    region = unit.block.shared_region
    if address < 0 or address + nbytes > region.high:
        raise BadAddress(f"{nbytes} bytes at {address:#x} of shared memory, of which the block has {region.high}")
    return region


def local_region(unit: UnitView, address: int, nbytes: int) -> AddressRange:
    region = unit.local_region
    if address < 0 or address + nbytes > region.high:
        raise BadAddress(f"{nbytes} bytes at {address:#x} of local memory, all of it has {region.high}")
    return region


def const_region(unit: UnitView, address: int, nbytes: int) -> AddressRange:
    return unit.constants.find(address, nbytes)


FIND: dict[str, Find] = {"global": global_region, "shared": shared_region, "local": local_region, "const": const_region}


def aligned(address: int, nbytes: int) -> None:
    if address % nbytes:
        raise BadAddress(f"an access of {nbytes} bytes at {address:#x}, which is not a multiple of {nbytes}")


def read_steps(region: AddressRange, base: int, stride: int, count: int, size: tuple[int, int]) -> list[Array]:
    """Read for lanes at `base`, `base + stride`, ... Returns one array per element. `size` is (itemsize, elements)."""
    itemsize, elements = size
    view = region.views[itemsize]
    first = (base - region.starts[itemsize]) // itemsize
    step = stride // itemsize
    end = first + step * (count - 1) + 1
    return [view[first + n : end + n : step].copy() for n in range(elements)]


def write_steps(region: AddressRange, base: int, stride: int, itemsize: int, values: list[Array]) -> None:
    view = region.views[itemsize]
    first = (base - region.starts[itemsize]) // itemsize
    step = stride // itemsize
    end = first + step * (len(values[0]) - 1) + 1
    for n, value in enumerate(values):
        view[first + n : end + n : step] = value


def places(region: AddressRange, addresses: Array, itemsize: int) -> Array:
    """Indices into `region.views[itemsize]`. Addresses before its start get indices beyond its end."""
    offsets = addresses - np.uint64(region.starts[itemsize])
    shift = _SHIFT[itemsize]
    if shift:
        offsets >>= np.uint64(shift)
    else:
        offsets = np.minimum(offsets, _TOP)
    return offsets.view("i8")


def read_lanes(unit: UnitView, find: Find, addresses: Array, size: tuple[int, int]) -> list[Array]:
    """Read at `addresses` (uint64). Returns one array per element."""
    if not len(addresses):
        return [np.empty(0, f"u{size[0]}") for _ in range(size[1])]
    itemsize, elements = size
    region = find(unit, addresses.item(0), itemsize * elements)
    _check(region, addresses, itemsize * elements)
    view = region.views[itemsize]
    try:
        index = places(region, addresses, itemsize)
        return [view.take(index + n if n else index) for n in range(elements)]
    except IndexError:
        return _each_region(unit, find, addresses, size)


def _check(region: AddressRange, addresses: Array, width: int) -> None:
    """Check that all addresses are aligned. The access itself detects addresses outside of the region."""
    if width > 1 and np.bitwise_or.reduce(addresses).item() & (width - 1):
        bad = addresses[addresses % np.uint64(width) != 0]
        aligned(bad.item(0), width)


def _each_region(unit: UnitView, find: Find, addresses: Array, size: tuple[int, int]) -> list[Array]:
    """Read for lanes whose addresses are in several regions."""
    itemsize, elements = size
    result = [np.empty(len(addresses), f"u{itemsize}") for _ in range(elements)]
    for lane, address in enumerate(addresses.tolist()):
        region = find(unit, address, itemsize * elements)
        first = (address - region.starts[itemsize]) // itemsize
        for n in range(elements):
            result[n][lane] = region.views[itemsize][first + n]
    return result


def write_lanes(unit: UnitView, find: Find, addresses: Array, itemsize: int, values: list[Array]) -> None:
    """Write to `addresses`. If several lanes have the same address, the value of the last one stays."""
    if not len(addresses):
        return
    width = itemsize * len(values)
    region = find(unit, addresses.item(0), width)
    _check(region, addresses, width)
    index = places(region, addresses, itemsize)
    view = region.views[itemsize]
    if index.max() + len(values) > len(view):
        for lane, address in enumerate(addresses.tolist()):
            region = find(unit, address, width)
            first = (address - region.starts[itemsize]) // itemsize
            for n, value in enumerate(values):
                region.views[itemsize][first + n] = value[lane]
        return
    for n, value in enumerate(values):
        view[index + n if n else index] = value


def run_of(mask: Array) -> tuple[int, int] | None:
    """The first active lane and the one after the last, if all lanes between them are active; else None."""
    octets = mask.tobytes()
    first, last = octets.find(1), octets.rfind(1) + 1
    return (first, last) if octets.count(1) == last - first else None


def octets_of(values: list[Array]) -> Array:
    """The values of all elements (one array per element) as bytes, uint8 [n, width]."""
    if len(values) == 1:
        return values[0].view("u1").reshape(len(values[0]), -1)
    stacked = np.stack(values, axis=1)
    return np.ascontiguousarray(stacked).view("u1")


def values_of(octets: Array, size: tuple[int, int]) -> list[Array]:
    """Bytes, uint8 [n, width], as one array per element."""
    itemsize, elements = size
    if elements == 1:
        return [np.ascontiguousarray(octets).reshape(-1).view(f"u{itemsize}")]
    table = np.ascontiguousarray(octets).view(f"u{itemsize}")
    return [np.ascontiguousarray(table[:, n]) for n in range(elements)]
