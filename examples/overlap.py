"""An all-reduce that runs while this rank computes."""

import torch
import torch.distributed as dist
from common import device, main, say


def body() -> None:
    gradient = torch.full((1000,), float(dist.get_rank()), device=device())
    work = dist.all_reduce(gradient, async_op=True)
    other = torch.ones(64, 64, device=device())
    for _ in range(10):
        other = torch.tanh(other @ other / 64)  # does not need the result yet
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    work.wait()
    say(f"sum {gradient[0].item()}, twice that {doubled.wait()[0].item()}, meanwhile {tuple(other.shape)}")


if __name__ == "__main__":
    main(body)
