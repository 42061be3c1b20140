"""`ld` and `st`. They access memory directly, or by a `ThreadAccess` if the unit's surroundings watch accesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array, ThreadAccess
from tricomm.explorer.ptx.operations.lane_memory import (
    FIND,
    LOCAL_WINDOW,
    SHARED_WINDOW,
    aligned,
    octets_of,
    read_lanes,
    read_steps,
    run_of,
    values_of,
    write_lanes,
    write_steps,
)
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm
from tricomm.explorer.ptx.unit_view import UnitView

_MASK = (1 << 64) - 1


class MemorySite:
    """One memory instruction, for units of `lanes` lanes. Its address grows by `stride` from lane to lane.

    If `stride` is None, the address is an array. Methods take the unit, the active lanes (None: all), and the address
    including its offset (a number, lane 0's address, if there is a stride). They return one array per element, with
    values for all lanes; 0 for inactive ones.
    """

    def __init__(self, form: MemoryForm, lanes: int, stride: int | None) -> None:
        self.form, self.lanes, self.stride = form, lanes, stride
        wide = form.itemsize == 16
        self.size = (8, 2 * form.elements) if wide else (form.itemsize, form.elements)
        self.width = form.itemsize * form.elements
        self.steps = None if stride is None else np.array([stride * n & _MASK for n in range(lanes)], "u8")
        self.sliced = stride is not None and stride > 0 and stride % self.size[0] == 0
        self.find = FIND.get(form.space or "global", FIND["global"])

    def addresses(self, base: int | Array) -> Array:
        """The addresses of all lanes, uint64."""
        if isinstance(base, int):
            assert self.steps is not None
            return self.steps + np.uint64(base)
        return base if base.dtype == np.uint64 else base.astype("u8")

    def load(self, unit: UnitView, mask: Array | None, base: int | Array) -> list[Array]:
        space = self.form.space
        if space in ("", "local"):
            redirected: list[Array] = self._redirected(unit, mask, base)
            return redirected
        if unit.watched[space]:
            return self._watched_load(unit, space, mask, self.addresses(base))
        if isinstance(base, int) and self.sliced:
            return self._load_slice(unit, mask, base)
        return self._load_lanes(unit, space, mask, self.addresses(base))

    def _load_slice(self, unit: UnitView, mask: Array | None, base: int) -> list[Array]:
        run = (0, self.lanes) if mask is None else run_of(mask)
        if run is None:
            return self._load_lanes(unit, self.form.space, mask, self.addresses(base))
        values = read_steps(*self._steps(unit, base, *run), run[1] - run[0], self.size)
        return values if run == (0, self.lanes) else [self._spread(value, slice(*run)) for value in values]

    def _steps(self, unit: UnitView, base: int, first: int, last: int) -> tuple[Any, int, int]:
        """The region of the elements of these lanes, the address of the first element, and the stride."""
        assert self.stride is not None
        start = base + self.stride * first
        aligned(start | self.stride, self.width)
        return self.find(unit, start, self.stride * (last - first - 1) + self.width), start, self.stride

    def _spread(self, value: Array, where: Any) -> Array:
        result = np.zeros(self.lanes, value.dtype)
        result[where] = value
        return result

    def _load_lanes(self, unit: UnitView, space: str, mask: Array | None, addresses: Array) -> list[Array]:
        if mask is None:
            return read_lanes(unit, FIND[space], addresses, self.size)
        return [self._spread(value, mask) for value in read_lanes(unit, FIND[space], addresses[mask], self.size)]

    def load_number(self, unit: UnitView, base: int) -> int | list[int]:
        """Load for lanes that all read the same address: one number per element, or only the number if there is one
        element."""
        space = self.form.space
        if space in ("", "local") or unit.watched[space]:
            arrays = self.load(unit, None, base)
            numbers = [value.item(0) for value in arrays]
        else:
            region = self.find(unit, base, self.width)
            if base % self.width:
                aligned(base, self.width)
            itemsize, elements = self.size
            view, first = region.views[itemsize], (base - region.starts[itemsize]) // itemsize
            if elements == 1:
                return int(view.item(first))
            numbers = [view.item(first + n) for n in range(elements)]
        return numbers if len(numbers) > 1 else numbers[0]

    def _watched_load(self, unit: UnitView, space: str, mask: Array | None, addresses: Array) -> list[Array]:
        if mask is not None:
            addresses = addresses[mask]
        loaded: list[Array] = []

        def perform(chosen: Array | None) -> Array:
            at = addresses if chosen is None else addresses[chosen]
            octets = octets_of(read_lanes(unit, FIND[space], at, self.size))
            if chosen is None:
                loaded[:] = [octets]
            else:
                if not loaded:
                    loaded.append(np.zeros((len(addresses), self.width), "u1"))
                loaded[0][chosen] = octets
            return octets

        def supply(octets: Array) -> None:
            loaded[:] = [octets]

        unit.tell(self._access(unit, space, mask, addresses, perform, supply, None))
        values = values_of(loaded[0], self.size)
        return values if mask is None else [self._spread(value, mask) for value in values]

    def _access(self, unit: UnitView, space: str, mask: Array | None, *rest: Any) -> ThreadAccess:
        addresses, *how = rest
        threads = unit.threads if mask is None else unit.threads[mask]
        if addresses.dtype != np.uint64:
            addresses = addresses.astype("u8")
        return self.form.access(space, threads, addresses, *how)

    def store(self, unit: UnitView, mask: Array | None, base: int | Array, values: Sequence[Array]) -> None:
        space = self.form.space
        if space in ("", "local"):
            self._redirected(unit, mask, base, values)
        elif unit.watched[space]:
            self._watched_store(unit, space, mask, self.addresses(base), values)
        elif isinstance(base, int) and self.sliced and self.stride is not None and self.stride >= self.width:
            self._store_slice(unit, mask, base, values)
        elif self.stride == 0 and isinstance(base, int):
            lane = self.lanes - 1 if mask is None else mask.tobytes().rfind(1)
            aligned(base, self.width)
            region = self.find(unit, base, self.width)
            first = (base - region.starts[self.size[0]]) // self.size[0]
            for n, value in enumerate(values):
                region.views[self.size[0]][first + n] = value[lane]
        else:
            self._store_lanes(unit, space, mask, self.addresses(base), values)

    def _store_slice(self, unit: UnitView, mask: Array | None, base: int, values: Sequence[Array]) -> None:
        run = (0, self.lanes) if mask is None else run_of(mask)
        if run is None:
            self._store_lanes(unit, self.form.space, mask, self.addresses(base), values)
            return
        chosen = list(values) if run == (0, self.lanes) else [value[slice(*run)] for value in values]
        write_steps(*self._steps(unit, base, *run), self.size[0], chosen)

    def _store_lanes(
        self, unit: UnitView, space: str, mask: Array | None, addresses: Array, values: Sequence[Array]
    ) -> None:
        chosen = list(values)
        if mask is not None:
            addresses, chosen = addresses[mask], [value[mask] for value in values]
        write_lanes(unit, FIND[space], addresses, self.size[0], chosen)

    def _watched_store(
        self, unit: UnitView, space: str, mask: Array | None, addresses: Array, values: Sequence[Array]
    ) -> None:
        given = [value.copy() for value in values]
        if mask is not None:
            addresses, given = addresses[mask], [value[mask] for value in values]

        def perform(chosen: Array | None) -> None:
            if chosen is None:
                write_lanes(unit, FIND[space], addresses, self.size[0], given)
            else:
                write_lanes(unit, FIND[space], addresses[chosen], self.size[0], [g[chosen] for g in given])

        unit.tell(self._access(unit, space, mask, addresses, perform, None, lambda: octets_of(given)))

    def _redirected(self, unit: UnitView, mask: Array | None, base: int | Array, values: Sequence[Array] = ()) -> Any:
        """Perform an access to local memory, of which each lane has its own, or by a generic address, which contains
        the space."""
        addresses = self.addresses(base)
        active = np.ones(self.lanes, bool) if mask is None else mask
        results = [np.zeros(self.lanes, f"u{self.size[0]}") for _ in range(self.size[1])]
        for space, chosen, at in resolved(unit, self.form.space, addresses, active):
            if values:
                if unit.watched[space]:
                    self._watched_store(unit, space, chosen, at, values)
                else:
                    self._store_lanes(unit, space, chosen, at, values)
            else:
                load = self._watched_load if unit.watched[space] else self._load_lanes
                for result, value in zip(results, load(unit, space, chosen, at), strict=True):
                    np.copyto(result, value, where=chosen)
        return results


def resolved(unit: UnitView, space: str, addresses: Array, active: Array) -> list[tuple[str, Array, Array]]:
    """For each space that active lanes access: (space, these lanes, their addresses in the space)."""
    if space not in ("", "local"):
        return [(space, active, addresses)]
    lanes = unit.local_offsets
    if space == "local":
        _check_local(unit, addresses[active])
        return [("local", active, addresses + lanes)]
    in_shared = active & ((addresses & np.uint64(SHARED_WINDOW)) != 0)
    in_local = active & ((addresses & np.uint64(LOCAL_WINDOW)) != 0)
    rest = active & ~in_shared & ~in_local
    _check_local(unit, addresses[in_local] - np.uint64(LOCAL_WINDOW))
    parts = [
        ("global", rest, addresses),
        ("shared", in_shared, addresses - np.uint64(SHARED_WINDOW)),
        ("local", in_local, addresses - np.uint64(LOCAL_WINDOW) + lanes),
    ]
    return [part for part in parts if part[1].any()]


def _check_local(unit: UnitView, addresses: Array) -> None:
    if len(addresses) and addresses.max() >= unit.local_bytes:
        from tricomm.explorer.ptx.global_memory import BadAddress

        raise BadAddress(f"local memory has {unit.local_bytes} bytes; the access is at {addresses.max():#x}")
