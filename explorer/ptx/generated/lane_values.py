"""Functions that generated code calls: values of all lanes from one number, comparisons, predicates, merging.

A predicate is True or False if all lanes are known to agree, else an array. An array's lanes may still agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tricomm.explorer.ptx.access import Array

Predicate = bool | Array


class LaneValues:
    """The functions for units of `lanes` lanes. `names` has them, and constants, by their names in generated code."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.ones, self.none = b"\1" * lanes, b"\0" * lanes
        numbers = np.arange(lanes)
        self.below = [numbers < n for n in range(lanes + 1)]
        self.from_on = [numbers >= n for n in range(lanes + 1)]
        self.single = [numbers == n for n in range(lanes)]
        self.others = [numbers != n for n in range(lanes)]
        self.true = self.below[lanes]
        self.numbers = numbers
        self.names: dict[str, Any] = {
            "_compare": self.compare,
            "_p_and": p_and,
            "_p_or": p_or,
            "_p_xor": p_xor,
            "_p_not": p_not,
            "_agreed": self.agreed,
            "_merge": merge,
            "_p_merge": p_merge,
            "_both": self.both,
            "_p_array": self.p_array,
            "_INVERSE_AGREED": self.inverse_agreed,
            "_both_not": self.both_not,
        }
        for width in (8, 16, 32, 64):
            kind = f"u{width // 8}"
            self.names[f"_fill_{kind}"] = self._filler(kind)
            self.names[f"_step_{kind}"] = self._stepper(kind)
            self.names[f"_flag_{kind}"] = self._flags(kind)

    def constant(self, value: int, kind: str) -> Array:
        """An array whose lanes all hold the bits `value`."""
        itemsize = np.dtype(kind).itemsize
        if kind == "?":
            return np.full(self.lanes, bool(value))
        if itemsize == 16:
            pair = np.array([value & (1 << 64) - 1, value >> 64], "u8").view(kind)
            return np.repeat(pair, self.lanes)
        return np.full(self.lanes, value & ((1 << 8 * itemsize) - 1), f"u{itemsize}").view(kind)

    def steps(self, stride: int, kind: str) -> Array:
        """An array that holds `stride` times the number of the lane."""
        width = 8 * np.dtype(kind).itemsize
        return np.array([stride * n & ((1 << width) - 1) for n in range(self.lanes)], kind)

    def _filler(self, kind: str) -> Callable[[int], Array]:
        lanes, dtype, empty = self.lanes, np.dtype(kind), np.empty

        def fill(value: int) -> Array:
            result = empty(lanes, dtype)
            result.fill(value)
            return result

        return fill

    def _stepper(self, kind: str) -> Callable[[int, Array], Array]:
        lanes, dtype, empty, add = self.lanes, np.dtype(kind), np.empty, np.add

        def step(value: int, steps: Array) -> Array:
            result = empty(lanes, dtype)
            result.fill(value)
            add(result, steps, result)
            return result

        return step

    def _flags(self, kind: str) -> Callable[[Predicate], Array]:
        one, zero, dtype = self.constant(1, kind), self.constant(0, kind), np.dtype(kind)

        def flags(predicate: Predicate) -> Array:
            if predicate is True:
                return one
            if predicate is False:
                return zero
            result: Array = predicate.astype(dtype)
            return result

        return flags

    def compare(self, sign: str, a: int, ca: int, b: int, cb: int, width: int, signed: bool) -> Predicate:
        """Compare a + n * ca with b + n * cb in every lane n. (Generated code needs all eight parameters.)"""
        last = self.lanes - 1
        if signed:
            half = 1 << (width - 1)
            a, b, low, high = (a ^ half) - half, (b ^ half) - half, -half, half
        else:
            low, high = 0, 1 << width
        if not (low <= a + ca * last < high and low <= b + cb * last < high):
            kind = f"{'i' if signed else 'u'}{width // 8}"
            one = self.constant(a, kind) + self.steps(ca, f"u{width // 8}").view(kind)
            two = self.constant(b, kind) + self.steps(cb, f"u{width // 8}").view(kind)
            result: Array = _ARRAYS[sign](one, two)
            return result
        distance, step = a - b, ca - cb
        if sign in ("==", "!="):
            return self._equal(distance, step, sign == "==")
        if sign in (">", ">="):
            distance, step = -distance, -step
        if sign in ("<=", ">="):
            distance -= 1
        if step == 0:
            return distance < 0
        if step > 0:
            count = -(distance // step)
            return False if count <= 0 else count > last or self.below[count]
        count = distance // -step + 1
        return False if count > last else count <= 0 or self.from_on[count]

    def _equal(self, distance: int, step: int, wanted: bool) -> Predicate:
        if step == 0:
            return (distance == 0) is wanted
        lane, rest = divmod(-distance, step)
        if rest or not 0 <= lane < self.lanes:
            return not wanted
        if self.lanes == 1:
            return wanted
        equal: Array = self.single[lane] if wanted else self.others[lane]
        return equal

    def agreed(self, predicate: Predicate) -> Predicate:
        """The predicate, as True or False if all lanes agree."""
        if predicate is True or predicate is False:
            return predicate
        octets = predicate.tobytes()
        return True if octets == self.ones else False if octets == self.none else predicate

    def inverse_agreed(self, predicate: Predicate) -> Predicate:
        return p_not(self.agreed(predicate))

    def both(self, mask: Array, predicate: Predicate) -> Predicate:
        """The lanes of `mask` in which the predicate is true; False if there is none."""
        if predicate is True:
            return mask
        if predicate is False:
            return False
        result: Array = mask & predicate
        return result if result.tobytes() != self.none else False

    def both_not(self, mask: Array, predicate: Predicate) -> Predicate:
        return self.both(mask, p_not(predicate))

    def p_array(self, predicate: Predicate) -> Array:
        if predicate is True:
            return self.below[self.lanes]
        if predicate is False:
            return self.below[0]
        return predicate


_ARRAYS: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


@cache
def lane_values(lanes: int) -> LaneValues:
    return LaneValues(lanes)


def p_and(one: Predicate, other: Predicate) -> Predicate:
    if one is True:
        return other
    if one is False or other is False:
        return False
    return one if other is True else one & other


def p_or(one: Predicate, other: Predicate) -> Predicate:
    if one is False:
        return other
    if one is True or other is True:
        return True
    return one if other is False else one | other


def p_xor(one: Predicate, other: Predicate) -> Predicate:
    if one is False:
        return other
    if one is True:
        return p_not(other)
    return one if other is False else ~one if other is True else one ^ other


def p_not(predicate: Predicate) -> Predicate:
    return (not predicate) if predicate is True or predicate is False else ~predicate


def merge(mask: Array, new: Array, old: Array) -> Array:
    """`new` in the lanes of `mask`, else `old`."""
    result = old.copy()
    np.copyto(result, new, where=mask)
    return result


def p_merge(mask: Array, new: Predicate, old: Predicate) -> Predicate:
    result: Array = np.where(mask, new, old)
    return result
