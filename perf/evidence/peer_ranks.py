"""One rank of a comparison, a process of its own (see `tricomm.perf.workers`): stages `peers` and `many_gpus`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import tricomm
from tricomm import Options
from tricomm.perf import units
from tricomm.perf.bench.baselines import BenchContext, ComparedCall
from tricomm.perf.bench_row import OURS
from tricomm.perf.evidence import machine
from tricomm.perf.evidence.comparison import Race, offered
from tricomm.perf.evidence.stage import Settings
from tricomm.perf.workers import speak

_MEETING = timedelta(seconds=20)  # sooner than the parent's patience, so that the rank can say what it waited for
# torch leaves multicast out where devices may overlap, so ranks with a GPU each must not have the first of these.
_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say which contender has its turn, and for every size what each took."""
    torch.set_num_threads(1)
    say("trying", name=OURS)  # a sign of life before the device is looked at, which may take its time
    dtype = getattr(torch, data["dtype"])
    with ground(rank, world_size, url, data) as here:
        known = offered(data["collective"], world_size, data["dry_run"])
        for nbytes in data["sizes"]:
            count = units.row_elements(data["collective"], nbytes, dtype.itemsize, world_size) if nbytes else 0
            call = ComparedCall(here, data["collective"], dtype, count)
            race = Race(call, data["calls"], data["graphs"], say)
            race.admit((name, known[name]) for name in data["names"])
            choice = here.comm.explain(data["collective"], call.rows_in * count * dtype.itemsize)
            times = race.times(data["rounds"], data["seconds"])
            say("times", size=nbytes, count=count, choice=f"{choice.algorithm}/{choice.protocol}", times=times,
                missing=race.missing)  # fmt: skip


@contextmanager
def ground(rank: int, world_size: int, url: str, data: Any) -> Iterator[BenchContext]:
    """tricomm's group and Gloo's of the same ranks, on a GPU that they share, or each on its own."""
    device = machine.rank_device(Settings(Path(), dry_run=data["dry_run"]), rank, data["one_gpu"])
    for name, value in _ONE_GPU.items():
        os.environ.pop(name, None)
        if data["one_gpu"]:
            os.environ[name] = value
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this box
    stream = None
    if device != "cpu":
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
    store = FileStore(url.removeprefix("file://") + "-peers", world_size)
    store.set_timeout(_MEETING)
    nbytes = (1 << 20) if data["dry_run"] else (64 << 20)
    options = Options(timeout=60.0, arena_bytes=nbytes, nccl=False, share_device=data["one_gpu"])
    with torch.cuda.stream(stream), tricomm.init(url, rank, world_size, device, options=options) as comm:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_MEETING)
        host = dist.new_group(backend="gloo", timeout=_MEETING)
        yield BenchContext(comm, host, data["one_gpu"], Path(data["peers"]) if data["peers"] else None)
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(speak(main))
