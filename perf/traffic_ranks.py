"""One rank of `traffic`, a process of its own (see `ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import tricomm
from tricomm.kernels import interpreter, registry
from tricomm.perf.ranks import speak
from tricomm.perf.traffic import Counter

# Small mailboxes: the first epoch clears one, and an interpreted kernel takes seconds for a large one.
_OPTIONS = tricomm.Options(arena_bytes=1 << 20)


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say a record per kernel."""
    torch.set_num_threads(1)
    count = data["nbytes"] // 4
    with tricomm.init(url, rank=rank, world_size=world_size, device="cpu", timeout=60.0, options=_OPTIONS) as comm:
        peers = [extent for r, extent in enumerate(comm.peer_ranges) if r != rank]
        for kernel in registry.KERNELS:
            if kernel.collective == "barrier":
                continue
            x = torch.arange(count, dtype=torch.float32)
            names = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
            y = torch.empty(count * (world_size if kernel.collective == "all_gather" else 1))
            counter = Counter(peers, comm.arena_layout.ll)
            with interpreter.observe(counter):
                getattr(comm, kernel.collective)(x, out=y, **names)
            say(
                "moved", collective=kernel.collective, **names, written=counter.written, read=counter.read,
                headers=counter.headers,
            )  # fmt: skip
        comm.barrier()


if __name__ == "__main__":
    sys.exit(speak(main))
