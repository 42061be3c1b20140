"""Training under torchrun in which a rank dies: it alone is started again, and takes its place; the others go on.

torchrun starts a watcher for each rank, and that starts the rank's process. 2 ranks.
"""

import os
import signal
import subprocess
import sys

STEPS, RATE = 12, 0.125


def watch() -> None:
    """Run this rank's process, and start it again as long as a signal ends it."""
    life = 0
    while (code := subprocess.call([sys.executable, __file__], env={**os.environ, "LIFE": str(life)})) < 0:
        life += 1
    sys.exit(code)


def train(life: int) -> None:
    import torch
    from torch.distributed import TCPStore

    import tricomm

    def gradient(weights: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return weights - 8 * rank - step

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # torchrun's
    make = tricomm.join if life else tricomm.Communicator
    comm = make(store, rank, ranks, options=tricomm.Options(arena_bytes=1 << 20))
    weights, step = torch.zeros(64, device=comm.device), -1 if life else 0
    new = life > 0
    while True:
        try:
            if new:  # take over from the rank that has come furthest
                steps = comm.all_gather(torch.tensor([step], device=comm.device))
                comm.broadcast(weights, int(steps.argmax()))
                step, new = int(steps.max()), False
            if step == STEPS:
                break
            if (life, rank, step) == (0, 1, 5):
                os.kill(os.getpid(), signal.SIGKILL)  # as a crash would
            mean = comm.all_reduce(gradient(weights, rank, step), "avg")
            weights -= RATE * mean
            step += 1
        except tricomm.PeerDied:
            comm.replace()
            new = True
    alone = torch.zeros_like(weights)
    for step in range(STEPS):
        alone -= RATE * sum(gradient(alone, r, step) for r in range(ranks)) / ranks
    print(f"rank {rank}, life {life}: the bits of a run without faults: {torch.equal(weights, alone)}", flush=True)
    comm.close()


if __name__ == "__main__":
    if "LIFE" in os.environ:
        train(int(os.environ["LIFE"]))
    elif "RANK" in os.environ:
        watch()
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        sys.exit(subprocess.call([sys.executable, *torchrun]))
