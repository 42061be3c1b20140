"""FSDP2: parameters sharded over the ranks, gathered by all_gather, gradients by reduce_scatter."""

import torch
import torch.distributed as dist
from common import device, main, say, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def body() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for number in range(20):
        loss = step(net, optimiser)
        if number % 5 == 0:
            say(f"step {number}: loss {loss:.4f}")
    weight = next(net.parameters())
    say(f"this rank holds {weight.to_local().numel()} of {weight.numel()} elements of the first weight")


if __name__ == "__main__":
    main(body)
