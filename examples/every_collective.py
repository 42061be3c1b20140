"""Every collective with its picture: what 2 ranks hold before and after. Rank 0 has a, b; rank 1 has A, B.

broadcast from 0     all_gather         reduce_scatter        all_to_all
ab      ab           a      aA          ab      a+A           ab      aA
AB  ->  ab           A  ->  aA          AB  ->  b+B           AB  ->  bB

scatter from 0       gather to 0        all_reduce            reduce to 0
ab      a            a      aA          a       a+A           a       a+A
.   ->  b            A  ->  .           A   ->  a+A           A   ->  A
"""

import torch
import torch.distributed as dist
from common import device, main, say


def body() -> None:
    rank, size, where = dist.get_rank(), dist.get_world_size(), device()

    def mine(n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float32, device=where) + 10 * rank

    def show(name: str, before: torch.Tensor, after: torch.Tensor | None) -> None:
        say(f"{name:<16}{before.tolist()} -> {'-' if after is None else after.tolist()}")

    x = mine(size)
    dist.broadcast(x, 0)
    show("broadcast", mine(size), x)
    out = torch.empty(size, device=where)
    dist.all_gather(list(out.split(1)), mine(1))
    show("all_gather", mine(1), out)
    out = torch.empty(1, device=where)
    dist.reduce_scatter(out, list(mine(size).split(1)))
    show("reduce_scatter", mine(size), out)
    out = torch.empty(size, device=where)
    dist.all_to_all_single(out, mine(size))
    show("all_to_all", mine(size), out)
    out = torch.empty(1, device=where)
    dist.scatter(out, list(mine(size).split(1)) if rank == 0 else None, src=0)
    show("scatter", mine(size), out)
    parts = [torch.empty(1, device=where) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(1), parts, dst=0)
    show("gather", mine(1), torch.cat(parts) if parts else None)
    x = mine(2)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    show("all_reduce max", mine(2), x)
    x = mine(2)
    dist.reduce(x, 0)
    show("reduce", mine(2), x)


if __name__ == "__main__":
    main(body)
