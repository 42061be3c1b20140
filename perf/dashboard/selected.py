"""The choices of selection on the machines in the history, and the bandwidth of their links."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tricomm.errors import TricommError
from tricomm.kernels import layout
from tricomm.options import Options
from tricomm.perf import units
from tricomm.perf.cost_model.machines import MACHINES, MachineSpec
from tricomm.policy import selection, user_tables
from tricomm.policy.tables import Row


def machine(device: str) -> MachineSpec | None:
    """The GPU generation in a device's name; None if there is none that is known."""
    words = device.lower().replace("-", " ").split()
    return next((m for name, m in MACHINES.items() if name in words), None)


@cache
def _site(device: str, simulated: bool, world_size: int) -> selection.Site | None:
    """The facts that selection would have there. The history has no links, so all pairs count as linked."""
    known = machine(device)
    kind = "cpu" if simulated else known.architecture if known is not None else ""
    if not kind or kind == "any":
        return None
    name, rows = _own("" if simulated else device, world_size)
    memory = layout.plan(world_size, Options().arena_bytes)
    return selection.Site(kind, world_size, memory, layout.MAX_BLOCKS, tuned=rows, tuned_name=name)


def _own(gpu: str, world_size: int) -> tuple[str, tuple[Row, ...]]:
    """The user's latest table for such a machine."""
    files = sorted(user_tables.folder().glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        try:
            table = user_tables.read(file)
        except TricommError:  # `tricomm doctor` names it
            continue
        if (table.fingerprint.gpu, table.fingerprint.world_size) == (gpu, world_size):
            return table.name, table.rows
    return "", ()


def pick(scene: dict[str, Any], size: int) -> str | None:
    """`algorithm/protocol` for a row of the history of `size` bytes; None if that is not known."""
    world_size, collective = scene["world_size"], scene["collective"]
    dtype = getattr(torch, scene["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not 1 <= world_size <= layout.MAX_WORLD_SIZE:
        return None
    site = _site(scene["device"], scene["simulated"], world_size)
    if site is None or collective not in units.DATA_COLLECTIVES:
        return None
    elements = units.row_elements(collective, size, dtype.itemsize, world_size)
    nbytes = units.input_bytes(collective, elements, dtype.itemsize, world_size)
    mode = "eager" if scene["mode"] == "eager" else "graph"
    try:
        choice = selection.choose(site, collective, nbytes, mode=mode, bits=8 * dtype.itemsize)
    except TricommError:
        return None
    return f"{choice.algorithm}/{choice.protocol}"
