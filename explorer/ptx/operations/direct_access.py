"""Fast paths to memory for the most frequent case: all lanes, no surroundings that watch, one region.

Each function here falls back to the site's own method, which handles all cases. Constants are bound once, when the
code is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.operations.load_store import MemorySite
from tricomm.explorer.ptx.unit_view import UnitView

Load = Callable[[UnitView, "Array | None", "int | Array"], "list[Array]"]
Store = Callable[[UnitView, "Array | None", "int | Array", "Sequence[Array]"], None]
_MOST_KEPT = 64


def direct_load(site: MemorySite) -> Load:
    """Like `site.load`."""
    if site.sliced and site.form.space in ("global", "shared"):
        return _sliced_load(site)
    if site.stride is None and site.form.space == "shared":
        return _kept_load(site)
    return site.load


def direct_store(site: MemorySite) -> Store:
    """Like `site.store`."""
    if (
        site.sliced
        and site.form.space in ("global", "shared")
        and site.stride is not None
        and site.stride >= site.width
    ):
        return _sliced_store(site)
    if site.stride is None and site.form.space == "shared":
        return _kept_store(site)
    return site.store


def _extent(site: MemorySite) -> tuple[int, int, int, range]:
    """For an access of all lanes: its extent in bytes; the step between lanes in elements; the extent in elements of
    one element over all lanes; the numbers of the elements."""
    assert site.stride is not None
    itemsize, elements = site.size
    step = site.stride // itemsize
    return site.stride * (site.lanes - 1) + site.width, step, step * (site.lanes - 1) + 1, range(elements)


def _sliced_load(site: MemorySite) -> Load:
    extent, step, count, numbers = _extent(site)
    itemsize, space, width, single = site.size[0], site.form.space, site.width - 1, site.size[1] == 1
    in_memory, whole = space == "global", not (site.stride or 0) % site.width

    def load(unit: UnitView, mask: Array | None, base: int | Array) -> list[Array]:
        if mask is not None or unit.watched[space] or not whole or base & width:
            return site.load(unit, mask, base)
        region = unit.memory.last if in_memory else unit.block.shared_region
        if base < region.low or base + extent > region.high:
            region = site.find(unit, base, extent)  # type: ignore[arg-type]
        first = (base - region.starts[itemsize]) // itemsize
        view = region.views[itemsize]
        if single:
            return [view[first : first + count : step].copy()]
        return [view[first + n : first + n + count : step].copy() for n in numbers]

    return load


def _sliced_store(site: MemorySite) -> Store:
    extent, step, count, _ = _extent(site)
    itemsize, space, width = site.size[0], site.form.space, site.width - 1
    in_memory, whole = space == "global", not (site.stride or 0) % site.width

    def store(unit: UnitView, mask: Array | None, base: int | Array, values: Sequence[Array]) -> None:
        if mask is not None or unit.watched[space] or not whole or base & width:
            site.store(unit, mask, base, values)
            return
        region = unit.memory.last if in_memory else unit.block.shared_region
        if base < region.low or base + extent > region.high:
            region = site.find(unit, base, extent)  # type: ignore[arg-type]
        first = (base - region.starts[itemsize]) // itemsize
        view = region.views[itemsize]
        for value in values:
            view[first : first + count : step] = value
            first += 1

    return store


def direct_number(site: MemorySite) -> Callable[[UnitView, Array | None, int], int | list[int]]:
    """Like `site.load_number`."""
    itemsize, elements = site.size
    space, width = site.form.space, site.width
    if space not in ("global", "shared") or elements > 1:
        return lambda unit, mask, base: site.load_number(unit, base)
    in_memory, low_bits = space == "global", width - 1

    def load(unit: UnitView, mask: Array | None, base: int) -> int | list[int]:
        if unit.watched[space] or base & low_bits:
            return site.load_number(unit, base)
        region = unit.memory.last if in_memory else unit.block.shared_region
        if base < region.low or base + width > region.high:
            region = site.find(unit, base, width)
        return region.views[itemsize].item((base - region.starts[itemsize]) // itemsize)  # type: ignore[no-any-return]

    return load


def _kept_places(site: MemorySite) -> Callable[[UnitView, Array], list[Array] | None]:
    """Cached places of addresses in shared memory, which repeat: one array per element; None if some are not in the
    block's memory, or not aligned."""
    kept: dict[tuple[bytes, int], list[Array] | None] = {}
    itemsize, elements = site.size

    def places(unit: UnitView, addresses: Array) -> list[Array] | None:
        size = unit.block.shared_region.high
        key = (addresses.tobytes(), size)
        if key in kept:
            return kept[key]
        if len(kept) > _MOST_KEPT:
            kept.clear()
        wide = addresses.astype("u8").view("i8")
        inside = bool((wide >= 0).all() and (wide + site.width <= size).all() and not (wide % site.width).any())
        kept[key] = [wide // itemsize + n for n in range(elements)] if inside else None
        return kept[key]

    return places


def _kept_load(site: MemorySite) -> Load:
    places, itemsize = _kept_places(site), site.size[0]

    def load(unit: UnitView, mask: Array | None, base: int | Array) -> list[Array]:
        if mask is None and not unit.watched["shared"]:
            indices = places(unit, base)  # type: ignore[arg-type]
            if indices is not None:
                view = unit.block.shared_region.views[itemsize]
                return [view.take(index) for index in indices]
        return site.load(unit, mask, base)

    return load


def _kept_store(site: MemorySite) -> Store:
    places, itemsize = _kept_places(site), site.size[0]

    def store(unit: UnitView, mask: Array | None, base: int | Array, values: Sequence[Array]) -> None:
        if mask is None and not unit.watched["shared"]:
            indices = places(unit, base)  # type: ignore[arg-type]
            if indices is not None:
                view = unit.block.shared_region.views[itemsize]
                for index, value in zip(indices, values, strict=True):
                    view[index] = value
                return
        site.store(unit, mask, base, values)

    return store
