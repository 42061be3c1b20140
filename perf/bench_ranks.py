"""One rank of `tricomm bench`, a process of its own (see `ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import tricomm
from tricomm.perf import facts
from tricomm.perf.bench_measure import measure, pick_device
from tricomm.perf.bench_plan import Settings
from tricomm.perf.ranks import speak


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say a header, a row per case and size."""
    settings = Settings.from_json(data)
    torch.set_num_threads(1)
    with open_group(settings, url, rank, world_size) as comm:
        say("header", **facts.header(comm))
        for row in measure(comm, settings):
            say("row", **row)
        comm.barrier()


def open_group(settings: Settings, url: str, rank: int, world_size: int) -> tricomm.Communicator:
    """The communicator of a benchmark, on the device that the settings ask for."""
    device = pick_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = tricomm.Options(timeout=settings.timeout, nccl=False)  # what is timed here are the kernels
    return tricomm.init(url, rank=rank, world_size=world_size, device=device, options=options)


if __name__ == "__main__":
    sys.exit(speak(main))
