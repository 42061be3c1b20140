"""A tensor-parallel MLP of DTensors: one all_reduce per forward, and the same result as the whole model."""

import copy

import torch
import torch.distributed as dist
from common import device, main, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def body() -> None:
    torch.manual_seed(1)
    hidden = 16 * dist.get_world_size()  # DTensor needs equal parts
    whole = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 16)).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    parts = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).to(device())
    say(f"close to the whole model: {torch.allclose(parts(x), whole(x), atol=1e-5)}")


if __name__ == "__main__":
    main(body)
