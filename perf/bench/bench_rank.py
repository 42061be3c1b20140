"""One rank of `tricomm bench`, a process of its own (see `ranks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import tricomm
from tricomm.perf import provenance
from tricomm.perf.bench.baselines import Baselines
from tricomm.perf.bench.measure import measure, pick_device
from tricomm.perf.bench.request import Settings
from tricomm.store.rendezvous import open_store


def main(emit: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say a header, a row per case, size and mode, and what cannot be compared."""
    settings = Settings.from_json(data)
    torch.set_num_threads(1)
    with open_group(settings, url, rank, world_size) as (comm, others):
        emit("header", **provenance.header(comm))
        for row in measure(comm, settings, others, lambda text: emit("note", text=text)):
            emit("row", **row)
        comm.barrier()


@contextmanager
def open_group(
    settings: Settings, url: str, rank: int, world_size: int
) -> Iterator[tuple[tricomm.Communicator, Baselines]]:  # fmt: skip
    """The communicator of a benchmark, on the device that the settings ask for, and the libraries beside it."""
    device = pick_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = open_store(url, rank, world_size, settings.timeout)
    shared = device.type == "cuda" and torch.cuda.device_count() < world_size  # as `pick_device` has it
    # What is timed here are the kernels.
    options = tricomm.Options(timeout=settings.timeout, nccl=False, share_device=shared)
    with tricomm.Communicator(store, rank, world_size, device, options=options) as comm:
        others = Baselines(comm, store)
        try:
            yield comm, others
        finally:
            others.close()
