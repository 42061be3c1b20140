"""The first all-reduce: `torchrun --nproc-per-node 2 examples/hello.py`, or `python examples/hello.py`."""

import torch
import torch.distributed as dist
from common import device, main, say


def body() -> None:
    x = torch.full((4,), float(dist.get_rank() + 1), device=device())
    dist.all_reduce(x)
    say(f"{dist.get_world_size()} ranks: sum {x.tolist()}")


if __name__ == "__main__":
    main(body)
