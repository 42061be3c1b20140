"""Rendezvous by a file or a TCP address, and a communicator without torch.distributed. For torchrun see hello.py.

python examples/meeting_points.py
"""

import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import LIMIT, no_torchrun

import tricomm


def rank_of(rank: int, urls: list[str]) -> None:
    for url in urls[:2]:
        dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=2, timeout=LIMIT)
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            print(f"{url.partition(':')[0]}: {x.tolist()}", flush=True)
    options = tricomm.Options(arena_bytes=1 << 20, share_device=True)  # both on the first GPU, if there is one
    with tricomm.init(urls[2], rank, 2, options=options) as comm:
        x = torch.ones(2, device=comm.device)
        comm.all_reduce(x)
        if rank == 0:
            print(f"communicator: {x.tolist()}", flush=True)


if __name__ == "__main__":
    no_torchrun()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.spawn(rank_of, ([f"file://{folder}/a", f"tcp://127.0.0.1:{port}", f"file://{folder}/b"],), nprocs=2)
