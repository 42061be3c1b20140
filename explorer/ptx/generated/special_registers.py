"""Special registers: their shapes, known before a kernel runs, and their values in a unit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tricomm.explorer.ptx.access import Array
from tricomm.explorer.ptx.generated.lane_shapes import LaneShape, anything, uniform
from tricomm.explorer.ptx.unit_view import WARP, UnitShape, UnitView


def special_shape(name: str, unit: UnitShape) -> LaneShape:
    """The shape of the special register `name`, which has 32 or 64 bits."""
    width = 64 if name in ("%clock64", "%globaltimer", "%gridid", "%current_graph_exec") else 32
    if name == "%tid.x" and unit.flat:
        return LaneShape(32, 1, 0, unit.threads[0] - 1, 5 if unit.warp else 128)
    if name in ("%tid.y", "%tid.z") and unit.flat:
        return uniform(32, 0, 0, 128)
    if name.startswith("%tid.") or name.startswith("%lanemask"):
        return anything(32)
    if name == "%laneid":
        return LaneShape(32, 1, 0, WARP - 1, 128) if unit.warp or unit.lanes <= WARP else anything(32)
    if name == "%warpid":
        return uniform(32, 0, WARP) if unit.warp or unit.lanes <= WARP else anything(32)
    if name.startswith("%ntid."):
        size = unit.threads["xyz".index(name[-1])]
        return uniform(32, size, size, (size & -size).bit_length() - 1)
    if name.startswith("%ctaid") or name.startswith("%nctaid"):
        return uniform(32, 0, (1 << 31) - 1)
    return uniform(width)


def special_value(name: str) -> Callable[[UnitView], int | Array] | None:
    """The function that reads the special register `name` of a unit. It returns a number, or an array of 32-bit
    integers if `special_shape` returns no known shape. None for an unknown special register."""
    base, _, part = name.partition(".")
    axis = "xyz".find(part) if part else 0
    if axis < 0:
        return lambda unit: 0 if base.endswith("tid") or base == "%ctaid" else 1
    if base in _AXES:
        return lambda unit: _AXES[base](unit, axis)
    return _PLAIN.get(name)


def _tid(unit: UnitView, axis: int) -> int | Array:
    if unit.shape.flat:
        return int(unit.threads[0]) if axis == 0 else 0
    return unit.thread_index(axis)


def _laneid(unit: UnitView) -> int | Array:
    return 0 if unit.shape.lanes <= WARP else (unit.threads % WARP).astype("u4")


def _warpid(unit: UnitView) -> int | Array:
    return int(unit.threads[0]) // WARP if unit.shape.lanes <= WARP else (unit.threads // WARP).astype("u4")


def _lanemask(of: Callable[[Array], Array]) -> Callable[[UnitView], Array]:
    return lambda unit: of((unit.threads % WARP).astype("u8")).astype("u4")


_ONE = np.uint64(1)
_AXES: dict[str, Callable[[UnitView, int], int | Array]] = {
    "%tid": _tid,
    "%ntid": lambda unit, axis: unit.shape.threads[axis],
    "%ctaid": lambda unit, axis: unit.block.index[axis],
    "%nctaid": lambda unit, axis: unit.block.grid[axis],
    # Clusters are not simulated: each block counts as a cluster.
    "%clusterid": lambda unit, axis: unit.block.index[axis],
    "%nclusterid": lambda unit, axis: unit.block.grid[axis],
    "%cluster_ctaid": lambda unit, axis: 0,
    "%cluster_nctaid": lambda unit, axis: 1,
}
_PLAIN: dict[str, Callable[[UnitView], int | Array]] = {
    "%laneid": _laneid,
    "%warpid": _warpid,
    "%nwarpid": lambda unit: -(-unit.block.threads // WARP),
    "%smid": lambda unit: unit.block.number,
    "%nsmid": lambda unit: unit.block.grid[0] * unit.block.grid[1] * unit.block.grid[2],
    "%gridid": lambda unit: 1,
    "%lanemask_eq": _lanemask(lambda lane: _ONE << lane),
    "%lanemask_lt": _lanemask(lambda lane: (_ONE << lane) - _ONE),
    "%lanemask_le": _lanemask(lambda lane: (_ONE << (lane + _ONE)) - _ONE),
    "%lanemask_gt": _lanemask(lambda lane: ~((_ONE << (lane + _ONE)) - _ONE)),
    "%lanemask_ge": _lanemask(lambda lane: ~((_ONE << lane) - _ONE)),
    "%clock": lambda unit: unit.clock() & 0xFFFFFFFF,
    "%clock_hi": lambda unit: unit.clock() >> 32,
    "%clock64": lambda unit: unit.clock(),
    "%globaltimer": lambda unit: unit.clock(),
    "%globaltimer_lo": lambda unit: unit.clock() & 0xFFFFFFFF,
    "%globaltimer_hi": lambda unit: unit.clock() >> 32,
    "%dynamic_smem_size": lambda unit: unit.block.dynamic_shared,
    "%total_smem_size": lambda unit: len(unit.block.shared),
    "%aggr_smem_size": lambda unit: len(unit.block.shared),
    "%cluster_ctarank": lambda unit: 0,
    "%cluster_nctarank": lambda unit: 1,
    "%is_explicit_cluster": lambda unit: 0,
    "%current_graph_exec": lambda unit: 0,
}
