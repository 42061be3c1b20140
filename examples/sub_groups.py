"""Groups inside a group: a 2 x 2 mesh, whose rows and columns reduce separately. 4 ranks."""

import torch
import torch.distributed as dist
from common import device, main, say
from torch.distributed.device_mesh import init_device_mesh


def body() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    column, row = (torch.full((1,), float(rank), device=device()) for _ in range(2))
    dist.all_reduce(column, group=mesh["dp"].get_group())
    dist.all_reduce(row, group=mesh["tp"].get_group())
    say(f"rank {rank} of {dist.get_world_size()}: over its column {column.item()}, over its row {row.item()}")


if __name__ == "__main__":
    main(body, 4)
