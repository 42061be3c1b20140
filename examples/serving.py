"""An inference server that loses a rank and serves on with a spare process. 2 ranks and the spare."""

import os
import signal
from multiprocessing.connection import wait

import torch
import torch.multiprocessing as mp
from common import no_torchrun
from torch.distributed import TCPStore

import tricomm

RANKS, REQUESTS, WIDTH = 2, 8, 48
OPTIONS = tricomm.Options(arena_bytes=1 << 20)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Small integers, whose sums are exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def layer(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's columns of the first matrix and its rows of the second one."""
    return numbers(1, WIDTH, WIDTH).chunk(ranks, 1)[rank], numbers(2, WIDTH, WIDTH).chunk(ranks, 0)[rank]


def serve(rank: int | None, port: int) -> None:
    """Answer requests; `rank` is None in the spare, which waits for a place."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    first = rank is not None
    if rank is None:
        rank = int(store.get("lost rank"))
        comm = tricomm.join(store, rank, RANKS, options=OPTIONS)
    else:
        comm = tricomm.Communicator(store, rank, RANKS, options=OPTIONS)
    weights = [part.to(comm.device) for part in layer(rank, RANKS)]
    answered, replaced = 0 if first else REQUESTS, not first
    while True:
        try:
            if replaced:  # go on with the first request that some rank has not answered; the new rank has no opinion
                answered = int(comm.all_reduce(torch.tensor([answered], device=comm.device), "min"))
                replaced = False
            if answered == REQUESTS:
                break
            x = numbers(10 + answered, 2, WIDTH).to(comm.device)
            if (first, rank, answered) == (True, 1, 3):
                os.kill(os.getpid(), signal.SIGKILL)  # as a crash would
            y = comm.all_reduce((x @ weights[0]).relu() @ weights[1])
            answered += 1
        except tricomm.PeerDied:
            comm.replace()  # the same communicator, with the spare in the place of the lost rank
            replaced = True
            continue
        whole = (x.cpu() @ numbers(1, WIDTH, WIDTH)).relu() @ numbers(2, WIDTH, WIDTH)
        if rank == 0:
            print(f"request {answered}: as the whole model: {torch.equal(y.cpu(), whole)}", flush=True)
    comm.close()


def main() -> None:
    no_torchrun()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    processes = [context.Process(target=serve, args=(rank, store.port)) for rank in (*range(RANKS), None)]
    for process in processes:
        process.start()
    ranks = processes[:RANKS]
    ended = wait([process.sentinel for process in ranks])
    lost = next(rank for rank, process in enumerate(ranks) if process.sentinel in ended)
    print(f"rank {lost} is lost", flush=True)
    store.set("lost rank", str(lost))  # whoever starts the ranks tells the spare which place to take
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    print(f"the others and the spare served to the end: {not any(codes[:lost] + codes[lost + 1 :])}")


if __name__ == "__main__":
    main()
