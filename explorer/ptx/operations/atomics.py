"""`atom` and `red`. They are performed lane by lane, so that each lane reads the results of the lanes before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.arithmetic.floating import canonical_f4, from_bf16, to_bf16, to_f16
from tricomm.explorer.ptx.arithmetic.form import numpy_type
from tricomm.explorer.ptx.operations.lane_memory import FIND, aligned
from tricomm.explorer.ptx.operations.load_store import MemorySite, resolved
from tricomm.explorer.ptx.operations.memory_forms import MemoryForm, unknown_form
from tricomm.explorer.ptx.unit_view import UnitView

_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: old + new,
    "exch": lambda old, new: new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": lambda old, top: 0 if old >= top else old + 1,
    "dec": lambda old, top: top if old == 0 or old > top else old - 1,
}
Change = Callable[[int, tuple[int, ...]], int]


def change_of(form: MemoryForm) -> Change:
    """A function that computes the new bits from the old bits and the operands' bits."""
    bits = 8 * form.itemsize
    most, half = (1 << bits) - 1, 1 << (bits - 1)
    if form.op == "cas":
        return lambda old, given: given[1] if old == given[0] else old
    if form.op == "exch":
        return lambda old, given: given[0]
    if form.type in ("f16", "f32", "f64", "f16x2", "bf16", "bf16x2"):
        return _of_floats(form)
    combine = _INTEGERS.get(form.op)
    if combine is None or form.type == "b128":
        raise unknown_form(form.instruction, f".{form.op}.{form.type} is not known")
    if form.type[0] == "s":
        return lambda old, given: combine((old ^ half) - half, (given[0] ^ half) - half) & most
    return lambda old, given: combine(old, given[0]) & most


def _of_floats(form: MemoryForm) -> Change:
    if form.op not in ("add", "min", "max"):
        raise unknown_form(form.instruction, f".{form.op}.{form.type} is not known")
    if form.op != "add" and form.type in ("f32", "f64"):
        raise unknown_form(form.instruction, f".{form.op}.{form.type} is not known")

    def change(old: int, given: tuple[int, ...]) -> int:
        one, two = (decoded(np.array([bits], f"u{form.itemsize}"), form.type) for bits in (old, given[0]))
        result = one + two if form.op == "add" else (np.fmin if form.op == "min" else np.fmax)(one, two)
        return int.from_bytes(encoded(result, form.type, form.itemsize).tobytes(), "little")

    return change


def decoded(words: Array, kind: str) -> Array:
    """The numbers in words of memory: a bf16 as a float, and two numbers for a word of packed halves."""
    if kind.startswith("bf16"):
        return from_bf16(words.view("u2"))  # type: ignore[no-any-return]
    return words.view(numpy_type(kind.removesuffix("x2")))


def encoded(values: Array, kind: str, itemsize: int) -> Array:
    """The words of memory for numbers, rounded to nearest. A NaN becomes the canonical NaN."""
    if kind in ("f16", "f16x2", "f32") or kind.startswith("bf16"):
        values = {"f32": canonical_f4, "f16": to_f16}.get(kind.removesuffix("x2"), to_bf16)(values)
    return np.ascontiguousarray(values).view(f"u{itemsize}")


class AtomicSite:
    """One `atom` or `red` of a kernel."""

    def __init__(self, form: MemoryForm, site: MemorySite) -> None:
        self.form, self.site = form, site
        self.change = change_of(form)

    def reduce(self, unit: UnitView, mask: Array | None, base: int | Array, *operands: Array) -> None:
        self.call(unit, mask, base, *operands)

    def call(self, unit: UnitView, mask: Array | None, base: int | Array, *operands: Array) -> Any:
        """The old values, one array per element."""
        lanes, form = unit.shape.lanes, self.form
        addresses = self.site.addresses(base)
        active = np.ones(lanes, bool) if mask is None else mask
        word = operands[0].dtype
        results = [np.zeros(lanes, word) for _ in range(form.elements)]
        for space, chosen, at in resolved(unit, form.space, addresses, active):
            old = self._in_space(unit, space, chosen, at[chosen], [o[chosen] for o in operands])
            for result, value in zip(results, old, strict=True):
                result[chosen] = value
        return results[0] if len(results) == 1 else results

    def _in_space(
        self, unit: UnitView, space: str, active: Array, addresses: Array, operands: list[Array]
    ) -> list[Array]:
        count, size, elements = len(addresses), self.form.itemsize, self.form.elements
        before = np.zeros((count, elements * size), "u1")
        given = [[int.from_bytes(v.tobytes(), "little") for v in operand] for operand in operands]

        def perform(chosen: Array | None) -> Array:
            lanes = range(count) if chosen is None else np.flatnonzero(chosen).tolist()
            for lane in lanes:
                before[lane] = self._one(unit, space, addresses.item(lane), [g[lane] for g in given])
            return before if chosen is None else before[chosen]

        if unit.watched[space]:
            unit.tell(self.form.access(space, unit.threads[active], addresses, perform))
        else:
            perform(None)
        table = before.view(operands[0].dtype)
        return [np.ascontiguousarray(table[:, n]) for n in range(elements)]

    def _one(self, unit: UnitView, space: str, address: int, given: list[int]) -> Array:
        """Perform the operation for one lane; returns the old bytes."""
        size, elements = self.form.itemsize, self.form.elements
        aligned(address, size * elements)
        region = FIND[space](unit, address, size * elements)
        first = address - region.low
        octets = region.views[1][first : first + size * elements]
        old = octets.copy()
        for n in range(elements):
            before = int.from_bytes(old[n * size : (n + 1) * size].tobytes(), "little")
            operands = tuple(given) if self.form.op == "cas" else (given[n],)
            after = self.change(before, operands).to_bytes(size, "little")
            octets[n * size : (n + 1) * size] = np.frombuffer(after, "u1")
        return old
