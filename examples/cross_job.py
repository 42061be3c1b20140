"""Two separately started jobs, and a group of all their ranks, as a trainer and its generators need.

Each job has its own default group. The ranks of both meet over a third store, each group under its own prefix. A rank's
number there is the offset of its job plus its rank in the job.

    python examples/cross_job.py                     starts both jobs here
    python examples/cross_job.py JOB RANK PORTS...   one rank: ports of job 0, job 1 and the shared store
"""

import subprocess
import sys
import time

import torch
import torch.distributed as dist
from common import LIMIT, no_torchrun

import tricomm.c10d

RANKS = 2  # of each job


def rank_of(job: int, rank: int, ports: list[int]) -> None:
    url = f"tcp://127.0.0.1:{ports[job]}"
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=RANKS, timeout=LIMIT)
    me = job * RANKS + rank
    shared = dist.TCPStore("127.0.0.1", ports[2], None, me == 0, timeout=LIMIT, wait_for_workers=False)
    everybody = tricomm.c10d.group_over(dist.PrefixStore("weights", shared), me, 2 * RANKS, LIMIT)
    weights = torch.arange(4.0) if me == 0 else torch.zeros(4)
    everybody.broadcast([weights]).wait()
    inside = torch.ones(1)
    dist.all_reduce(inside)
    print(
        f"job {job} rank {rank}: weights {weights.tolist()}, ranks in my job {int(inside.item())}\n", end="", flush=True
    )
    everybody.barrier().wait()
    everybody.shutdown()
    dist.destroy_process_group()


def both_jobs() -> int:
    import socket

    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    who = [(job, rank) for job in range(2) for rank in range(RANKS)]
    started = [subprocess.Popen([sys.executable, __file__, str(j), str(r), *ports]) for j, r in who]
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        time.sleep(0.05)
    for process in started:  # without the one that failed the others would wait until their timeout
        process.terminate()
    return int(any([process.wait() for process in started]))  # negative if a signal has ended it


if __name__ == "__main__":
    no_torchrun()
    if len(sys.argv) == 1:
        sys.exit(both_jobs())
    rank_of(int(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:]])
