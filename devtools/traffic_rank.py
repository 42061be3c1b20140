"""One rank of `traffic`, a process of its own (see `ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tricomm
from devtools.traffic import Counter
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreter
from tricomm.perf.bench import check_data
from tricomm.perf.workers import speak

# Small mailboxes: the first epoch clears one, and an interpreted kernel takes seconds for a large one.
_OPTIONS = tricomm.Options(arena_bytes=1 << 20)


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say a record per kernel; rank 0 is the root where there is one."""
    torch.set_num_threads(1)
    count = data["nbytes"] // 4
    with tricomm.init(url, rank=rank, world_size=world_size, device="cpu", timeout=60.0, options=_OPTIONS) as comm:
        ranges = [(first, 0 if r == rank else nbytes) for r, (first, nbytes) in enumerate(comm.peer_ranges)]
        x = torch.arange(count, dtype=torch.float32)
        for kernel in registry.KERNELS:
            if kernel.collective == "barrier" or kernel.needs_cube != (world_size == registry.CUBE_RANKS):
                continue
            names = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
            row = count // kernel.kind.rows_in(world_size)
            how = {**names, **check_data.options(kernel.collective, "sum", world_size, 0, row)}
            _count(comm, ranges, say, kernel, partial(getattr(comm, kernel.collective), x, **how))
        for kernel in registry.of("send", world_size) if world_size < registry.CUBE_RANKS else []:
            if rank == 0:
                _count(comm, ranges, say, kernel, partial(comm.send, x, 1, protocol=kernel.protocol))
            elif rank == 1:
                comm.recv(torch.empty_like(x), 0, protocol=kernel.protocol)
        comm.barrier()


def _count(
    comm: tricomm.Communicator, ranges: list[tuple[int, int]], say: Callable[..., None], kernel: registry.Kernel,
    call: Callable[[], object],
) -> None:  # fmt: skip
    where = comm.arena_layout
    counter = Counter(ranges, (layout.HEADERS, where.ll), (where.channel_states, where.slots))
    with interpreter.observe(counter):
        call()
    say(
        "moved", collective=kernel.collective, algorithm=kernel.algorithm, protocol=kernel.protocol,
        written=counter.written, read=counter.read, headers=counter.headers, links=counter.links,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(speak(main))
