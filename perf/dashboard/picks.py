"""The kernels that selection picks on the machines in the history, as `explain` would in a group with default
options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tricomm import arguments
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import TricommError
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.metrics.counters import KERNELS, NCCL
from tricomm.perf import box, row_calls, units
from tricomm.perf.box import Box
from tricomm.policy import backend_choice, selection, user_tables
from tricomm.policy.selection_facts import SelectionFacts

Pick = Callable[[int], str | None]


def of(scene: dict[str, Any], facts: str) -> Pick:
    """The picks for a scene of the page, by `facts`, the box of its latest run.

    A pick takes the bytes of a row and returns `algorithm/protocol` or nccl; None if it is not known, as for rows of an
    older tricomm, which have no facts.
    """
    known = box.loads(facts)
    dtype = getattr(torch, scene["dtype"], None)
    if known is None or not isinstance(dtype, torch.dtype):
        return lambda size: None
    if known.fingerprint.world_size != scene["world_size"] or known.simulated != scene["simulated"]:
        return lambda size: None  # another library's times on a CPU are not simulated, and selection picks none of them
    site = known.site(user_tables.load(known.fingerprint))
    mode = "eager" if scene["mode"] == "eager" else "graph"

    def pick(size: int) -> str | None:
        try:
            if scene["collective"] == FUSED:
                return _fused(known, site, scene["op"], size, dtype, mode)
            if scene["collective"] in units.DATA_COLLECTIVES:
                elements = units.row_elements(scene["collective"], size, dtype.itemsize, site.world_size)
                nbytes = units.input_bytes(scene["collective"], elements, dtype.itemsize, site.world_size)
                return _plain(known, site, scene["collective"], scene["op"], nbytes, dtype, mode)
        except TricommError:
            pass
        return None

    return pick


def _plain(
    known: Box, site: SelectionFacts, collective: str, op: str, nbytes: int, dtype: torch.dtype, mode: str
) -> str | None:
    reduces, uneven = COLLECTIVES[collective].reduces, COLLECTIVES[collective].uneven
    facts = (collective, dtype, op if reduces else "none", None if uneven else nbytes)
    backend = backend_choice.decide(known.routes, *facts).backend
    if backend != KERNELS:
        return NCCL if backend == NCCL else None
    if reduces and dtype in arguments.DTYPES:
        site = selection.for_reduction(site, collective, arguments.DTYPES[dtype], op)
    choice = selection.choose(site, collective, nbytes, mode=mode, bits=8 * dtype.itemsize)
    return f"{choice.algorithm}/{choice.protocol}"


def _fused(known: Box, site: SelectionFacts, name: str, size: int, dtype: torch.dtype, mode: str) -> str | None:
    """The pick for a fused call; `name` is its operation, such as `norm@8192`."""
    form = row_calls.parse(name)
    rows = form.rows(size, dtype.itemsize)
    nbytes = rows * form.hidden * dtype.itemsize
    if backend_choice.decide(known.routes, "all_reduce", dtype, "sum", nbytes).backend == KERNELS:
        choice = row_calls.decided(site, form, dtype, rows, mode)
        if isinstance(choice, selection.Choice):
            return f"{choice.algorithm}/{choice.protocol}"
    plain = _plain(known, site, "all_reduce", "sum", nbytes, dtype, mode)
    return f"unfused_{plain}" if plain is not None and plain != NCCL else plain
