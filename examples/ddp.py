"""DDP training of a small model: 2 ranks end with the same bits as one process that adds in the same order."""

import torch
import torch.distributed as dist
from common import device, main, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 32


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(BATCH, 8, generator=generator)
    return x.to(device()), (x.sin().sum(1, keepdim=True)).to(device())


def loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(net(x), y)


def alone(ranks: int) -> list[torch.Tensor]:
    """The reference: one process, the ranks' gradients added in rank order and divided."""
    net = model().to(device())
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        grads = []
        for rank in range(ranks):
            optimiser.zero_grad()
            loss(net, rank, step).backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        for i, p in enumerate(net.parameters()):
            p.grad = sum((g[i] for g in grads[1:]), grads[0][i]) / ranks
        optimiser.step()
    return list(net.parameters())


def body() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(model().to(device()))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimiser.zero_grad()
        value = loss(net, rank, step)
        value.backward()
        optimiser.step()
        if step % 5 == 0:
            say(f"step {step}: loss {value.item():.4f}")
    equal = all(torch.equal(p, q) for p, q in zip(net.parameters(), alone(ranks), strict=True))
    say(f"the reference's bits: {equal}")


if __name__ == "__main__":
    main(body)
