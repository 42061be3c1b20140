"""Checks the state in which launches leave a group's memory: some words must be 0 again, and all ranks must have the
same epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tricomm.explorer.memory_model import allowed
from tricomm.explorer.memory_model.regions import Array, Region
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import Finding, Record
from tricomm.kernels import layout


def free_shadows(regions: Iterable[Region]) -> None:
    """Free the large tables now, because the objects of an execution form cycles, which may be collected late."""
    for region in regions:
        region.shadow = None


def left_over(
    regions: Iterable[Region], unread: Callable[[Any], Array], record: Callable[[int], Record]
) -> Iterator[Finding]:
    """For each shared region, the first flag that no rank has read. `unread(shadow)` returns candidates by piece."""
    for region in filter(lambda r: r.shared and not r.closed, regions):
        for piece in np.flatnonzero(unread(region.shadow)).tolist():
            start, store = piece * region.shadow.granule, record(region.shadow.record[piece])
            if allowed.may_stay_unread(store.site) or region.acknowledges(start) or store.rank == region.rank:
                continue
            # A word that is 0, the initial value, is at rest, such as a released lock or a cleared signal.
            if region.bytes[start : start + region.shadow.granule].any():
                yield diagnosis.leftover(store, region.label(start))
                break


def not_at_rest(arenas: list[Region]) -> Iterator[Finding]:
    """Findings about words and epochs that are not at rest at the end."""
    epochs = []
    for region in arenas:
        words = region.bytes[: layout.HEADERS].view(np.int64)
        epochs.append(int(words[layout.EPOCHS]))
        for block, word in enumerate(words[layout.EPOCHS :].tolist()):
            if word != epochs[-1] or word >> 32:
                yield diagnosis.epoch_not_at_rest(region.rank, block, word)
                break
        if arrivals := int(words[layout.MESSAGE_ARRIVALS]):
            yield diagnosis.arrivals_left(region.rank, arrivals)
    if len(set(epochs)) > 1:
        yield diagnosis.epochs_differ(epochs)
