"""Memory, descriptors and CPU time that ranks and groups cost a process: python -m devtools.scale

Prints a line for each set-up of interpreted ranks, with what it adds to the process of rank 0. Mapped: the segments
that ranks share, including the peers'. Resident: the proportional share of touched pages (Pss). Store keys: the keys of
all ranks. CPU: the time of all threads of an idle process. `devtools/notes/scale.md` has the last results, and their
consequences for other machines.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import click
import torch
from torch.distributed.distributed_c10d import PrefixStore

from tricomm import Communicator, Options
from tricomm.perf import provenance, text_table
from tricomm.perf.workers import run_workers
from tricomm.store.rendezvous import open_store

_ARENA = 1 << 20
_IDLE = 3.0  # seconds
CASES = ((1, 1), (2, 1), (4, 1), (8, 1), (2, 8), (2, 64))  # ranks, groups
_COLUMNS = (
    *("ranks", "groups", "set-up ms", "mapped KiB", "resident KiB", "descriptors", "sockets", "threads"),
    *("store keys", "CPU ms/s"),
)


def measure(cases: tuple[tuple[int, int], ...] = CASES) -> list[dict[str, Any]]:
    """One record per case."""
    rows = []
    for ranks, groups in cases:
        said = run_workers("devtools.scale:rank_main", ranks, {"groups": groups}, 300.0)
        rows += [message for rank, message in said if rank == 0]
    return rows


def rank_main(emit: Callable[..., None], rank: int, world_size: int, url: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    options = Options(arena_bytes=_ARENA, timeout=120.0)
    store, *_ = open_store(url, rank, world_size, 60.0)
    with Communicator(PrefixStore("first", store), rank, world_size, "cpu", options=options) as comm:
        comm.all_reduce(torch.ones(64))  # warm-up, because the first call of a process loads what belongs to no group
    keys, before, began = store.num_keys(), _resources(), time.monotonic()
    comms = [
        Communicator(PrefixStore(f"group {number}", store), rank, world_size, "cpu", options=options)
        for number in range(settings["groups"])
    ]
    setup = (time.monotonic() - began) * 1e3
    for comm in comms:
        comm.all_reduce(torch.ones(64))
    keys, after = store.num_keys() - keys, _resources()
    used = time.process_time()
    time.sleep(_IDLE)
    used = (time.process_time() - used) / _IDLE * 1e3
    more = {name: after[name] - before[name] for name in before}
    facts = {"ranks": world_size, "groups": settings["groups"]}
    emit("costs", **facts, **more, **{"set-up ms": round(setup), "store keys": keys, "CPU ms/s": round(used, 1)})
    for comm in comms:
        comm.close()


def _resources() -> dict[str, int]:
    open_files = [_mode(name) for name in os.listdir("/proc/self/fd")]
    with open("/proc/self/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    with open("/proc/self/maps") as file:
        ends = [line.split()[0].split("-") for line in file if "tricomm" in line and "memfd" in line]
    return {
        "mapped KiB": sum(int(end, 16) - int(begin, 16) for begin, end in ends) >> 10,
        "resident KiB": pss,
        "descriptors": len(open_files),
        "sockets": sum(stat.S_ISSOCK(mode) for mode in open_files),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _mode(name: str) -> int:
    try:
        return os.stat(f"/proc/self/fd/{name}").st_mode
    except OSError:  # the descriptor of this listing
        return 0


@click.command()
def main() -> None:
    """Print the table of devtools/notes/scale.md, measured on this machine."""
    load = os.getloadavg()[0]
    rows = [tuple(row[name] for name in _COLUMNS) for row in measure()]
    click.echo("\n".join(text_table.lines(_COLUMNS, rows)))
    click.echo(f"{provenance.processor()}, {date.today()}, arenas of {_ARENA >> 20} MiB; simulated; load {load:.0f}")


if __name__ == "__main__":
    main()
