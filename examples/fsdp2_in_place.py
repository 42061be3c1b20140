"""FSDP2 over symmetric memory: peers read shards and gradients where FSDP has put them, and nothing is staged."""

import os

import torch
import torch.distributed as dist
from common import device, main, say, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tricomm

os.environ.setdefault("TRICOMM_CPU", "kernels")  # without a GPU: the interpreted kernels instead of Gloo


def train(in_place: bool) -> list[float]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 1)).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    buffers = tricomm.fsdp2.use(net) if in_place else ()
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    losses = [step(net, optimiser) for _ in range(5)]
    for each in buffers:
        say(f"{type(each).__name__}: {each.nbytes} bytes of symmetric memory")
    return losses


def body() -> None:
    staged, in_place = train(False), train(True)
    say("losses:", " ".join(f"{loss:.4f}" for loss in in_place))
    say("the same as with staged calls, to the bit:", staged == in_place)


if __name__ == "__main__":
    main(body)
