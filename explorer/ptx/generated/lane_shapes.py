"""The shape of a register: how its value differs between the lanes of a unit, as far as this is known before a run.

Most computed values are addresses. All lanes have the same number, or it grows by the same step from lane to lane. Such
values are held as one Python number, the value of lane 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The shape of a value of `width` bits.

    stride      lane n holds lane 0's value + n * stride modulo 2^width; None: nothing is known.
    low, high   the least and greatest value of any lane, unsigned.
    zeros       number of lowest bits of lane 0's value that are 0.
    flag        the value is 1 where a predicate is true and else 0. It is held as the predicate, and `stride` is None.
    """

    width: int
    stride: int | None
    low: int
    high: int
    zeros: int = 0
    flag: bool = False

    @property
    def uniform(self) -> bool:
        return self.stride == 0

    @property
    def constant(self) -> bool:
        return self.stride == 0 and self.low == self.high

    def span(self, lanes: int) -> int:
        """The largest difference between the value of a lane and of lane 0, for a stride that is not negative."""
        assert self.stride is not None
        return self.stride * (lanes - 1)

    def fits(self, lanes: int, bits: int) -> bool:
        """True if the value of each lane, by steps from lane 0, is from 0 to 2^bits - 1."""
        return self.stride is not None and self.stride >= 0 and self.high + self.span(lanes) < 1 << bits


def anything(width: int) -> LaneShape:
    return LaneShape(width, None, 0, (1 << width) - 1)


def uniform(width: int, low: int = 0, high: int | None = None, zeros: int = 0) -> LaneShape:
    return LaneShape(width, 0, low, (1 << width) - 1 if high is None else high, zeros)


def literal(value: int, width: int) -> LaneShape:
    value &= (1 << width) - 1
    return uniform(width, value, value, trailing_zeros(value))


def trailing_zeros(value: int) -> int:
    return (value & -value).bit_length() - 1 if value else 128


def ranged(width: int, stride: int, low: int, high: int, zeros: int) -> LaneShape:
    """A shape of known stride. Its range counts as unknown if it exceeds `width` bits."""
    most = (1 << width) - 1
    half = 1 << (width - 1)
    stride = ((stride + half) & most) - half
    if low < 0 or high > most:
        low, high = 0, most
    return LaneShape(width, stride, low, high, min(zeros, 128))


def join(one: LaneShape | None, other: LaneShape, visits: int) -> LaneShape:
    """The union of two shapes. After some visits the range counts as unknown, so that the iteration over loops ends."""
    if one is None or one == other:
        return other
    if one.flag and other.flag:
        return one
    stride = one.stride if one.stride == other.stride else None
    if one.flag or other.flag or one.width != other.width:
        stride = None
    low, high = min(one.low, other.low), max(one.high, other.high)
    if visits > 4:
        low, high = 0, (1 << one.width) - 1
    return LaneShape(one.width, stride, low, high, min(one.zeros, other.zeros))


def as_vector(shape: LaneShape) -> LaneShape:
    return replace(shape, stride=None, flag=False)
