"""Starts an example: under torchrun, or with `python examples/<name>.py`, which starts 2 ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import tricomm  # noqa: F401  registers the backend

LIMIT = timedelta(minutes=5)


def main(body: Callable[[], None], needed: int | None = None) -> None:
    """Run `body` on every rank, with a default group over tricomm; rank 0 prints. `needed`: ranks, if not any number
    will do."""
    if "RANK" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if needed not in (None, started):  # before the group exists, so that no rank waits for another one
            sys.exit(f"{sys.argv[0]} needs {needed} ranks and has {started}; torchrun --nproc-per-node {needed} works")
        _rank(int(os.environ["RANK"]), body, None, started)
        return
    world_size = needed or 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    mp.spawn(_rank, (body, url, world_size), nprocs=world_size)


def no_torchrun() -> None:
    """Exit with a remedy if torchrun runs an example that starts its own ranks."""
    if "RANK" in os.environ:
        sys.exit(f"{sys.argv[0]} starts its own ranks, without torchrun: python {sys.argv[0]}")


def _rank(rank: int, body: Callable[[], None], url: str | None, world_size: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < world_size:
            os.environ["TRICOMM_SHARE_DEVICE"] = "1"  # examples may run on fewer GPUs; do not do this for speed
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=LIMIT)
    try:
        body()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def device() -> torch.device:
    """The GPU of this rank, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def step(net: nn.Module, optimiser: torch.optim.Optimizer) -> float:
    """One step of learning to add 16 numbers; returns the loss."""
    x = torch.randn(64, 16, device=device())
    loss = nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)
