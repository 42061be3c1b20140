"""Rank functions of the c10d tests on one real GPU."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import tricomm

LARGE = 3 << 20  # float32: over the NCCL threshold


@contextmanager
def on_gpu(rank, world_size, url):
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["TRICOMM_SHARE_DEVICE"] = "1"
    torch.cuda.set_device(0)
    limit = timedelta(seconds=60)
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=limit)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def of(rank, count):
    """Small integers, exact in any order of summation."""
    return (torch.arange(count, device="cuda") % 7 + rank).float()


def calls(rank, world_size, tell, url):
    """Every collective, small calls on the kernels and large ones on NCCL; return errors, and the calls of each."""
    wrong = []

    def check(name, got, want):
        wrong.extend([] if torch.equal(got, want) else [name])

    with on_gpu(rank, world_size, url):
        for count in (1024, LARGE):
            parts = [of(r, count * world_size) for r in range(world_size)]
            total, mine, root = sum(parts), slice(count * rank, count * (rank + 1)), world_size - 1
            x = parts[rank].clone()
            dist.all_reduce(x)
            check(f"all_reduce {count}", x, total)
            x = parts[rank].clone()
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            check(f"async {count}", x, total)
            x = parts[rank].clone()
            dist.broadcast(x, root)
            check(f"broadcast {count}", x, parts[root])
            x = parts[rank].clone()
            dist.reduce(x, root)
            check(f"reduce {count}", x, total if rank == root else x)
            out = torch.full((count,), 77.0, device="cuda")
            dist.reduce_scatter_tensor(out, parts[rank])
            check(f"reduce_scatter {count}", out, total[mine])
            out = torch.full((world_size * len(total),), 77.0, device="cuda")
            dist.all_gather_into_tensor(out, parts[rank])
            check(f"all_gather {count}", out, torch.cat(parts))
            out = torch.full_like(total, 77)
            dist.all_to_all_single(out, parts[rank])
            check(f"all_to_all {count}", out, torch.cat([p[mine] for p in parts]))
            dist.barrier()
        x = torch.ones(8, device="cuda")
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
        check("premul_sum", x, torch.full_like(x, 2.0 * world_size))
        if world_size == 2:
            y = torch.full((5,), 77.0, device="cuda")
            if rank == 0:  # one at a time, because NCCL runs these in order
                dist.send(of(0, 5), 1)
            dist.recv(y, 1 - rank)
            if rank == 1:
                dist.send(of(1, 5), 0)
            check("messages", y, of(1 - rank, 5))
        torch.cuda.synchronize()
        return wrong, tricomm.stats()


def stand_alone(rank, world_size, tell, url):
    """A communicator whose fallback is nccl4py."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ["TRICOMM_SHARE_DEVICE"] = "1"
    with tricomm.init(url, rank, world_size, "cuda:0", timeout=60.0) as comm:
        results = []
        for dtype, count in ((torch.float32, LARGE), (torch.int32, 4), (torch.float32, 4)):
            x = torch.full((count,), rank + 1, dtype=dtype, device="cuda")
            comm.all_reduce(x.view(torch.uint32) if dtype == torch.int32 else x)
            comm.synchronize()
            results.append((x[0].item(), x[-1].item()))
        sent = [peer + 1 for peer in range(world_size)]
        rows = torch.full((sum(sent), 3), rank, dtype=torch.int16, device="cuda").view(torch.uint16)
        out = comm.all_to_all_v(rows, sent, [rank + 1] * world_size).view(torch.int16)
        comm.synchronize()
        return results, out[:, 0].tolist(), tricomm.stats()


def another_way(rank, world_size, tell, url):
    """One rank in a kernel, one in NCCL."""
    with on_gpu(rank, world_size, url):
        for count in (8, LARGE):
            dist.all_reduce(torch.ones(count, device="cuda"))
        torch.cuda.synchronize()
        end = time.monotonic() + 30
        x = torch.ones(LARGE if rank else 8, device="cuda")
        try:
            dist.all_reduce(x)
            while time.monotonic() < end:
                time.sleep(0.2)
                dist.barrier()
        except tricomm.TricommError as error:
            return type(error).__name__, str(error)
        return "none", ""
