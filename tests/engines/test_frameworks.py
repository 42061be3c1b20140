"""Training frameworks over the backend, with the real packages, each set up as docs/engines.md says: make engines."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tricomm
from tests import ranks

pytestmark = pytest.mark.engines


def _as_torchrun(rank, world_size, port):
    more = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "tricomm"}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update({name: str(what) for name, what in more.items()})
    torch.set_num_threads(1)


def _batch(rank, step):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _same(net):
    """Whether all ranks hold the same parameters."""
    mine = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    rows = torch.empty(dist.get_world_size(), mine.numel())
    dist.all_gather_into_tensor(rows, mine)
    return bool((rows == mine).all())


def _said(net):
    """The backend, whether the ranks agree, and whether tricomm has reduced gradients."""
    calls = tricomm.stats()["gloo"]
    reduced = calls.get("all_reduce", 0) + calls.get("reduce_scatter", 0) > 0
    said = dist.get_backend(), _same(net), reduced
    dist.barrier()
    dist.destroy_process_group()
    return said


def _trained(net, optimiser, backward, rank):
    for step in range(3):
        backward(net(_batch(rank, step)).square().mean())
        optimiser.step()
        optimiser.zero_grad()
    return _said(net)


def accelerate(rank, world_size, tell, port):
    _as_torchrun(rank, world_size, port)
    from accelerate import Accelerator

    dist.init_process_group("tricomm")
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 2)
    net, optimiser = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return _trained(net, optimiser, accelerator.backward, rank)


def lightning(rank, world_size, tell, port):
    _as_torchrun(rank, world_size, port)
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=DDPStrategy(process_group_backend="tricomm"))
    fabric.launch()
    net = nn.Linear(4, 2)
    net, optimiser = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return _trained(net, optimiser, fabric.backward, rank)


def torchtitan(rank, world_size, tell, port):
    _as_torchrun(rank, world_size, port)
    from torch.distributed.fsdp import fully_shard
    from torchtitan.config import CommConfig
    from torchtitan.distributed import utils

    dist.Backend.default_device_backend_map[utils.device_type] = "tricomm"
    utils.init_distributed(CommConfig())
    net = nn.Linear(4, 2)
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    net(_batch(rank, 0)).square().mean().backward()
    whole = nn.Linear(4, 2)
    for mine, sharded in zip(whole.parameters(), net.parameters(), strict=True):
        mine.data = sharded.grad.full_tensor()
    return _said(whole)


def deepspeed(rank, world_size, tell, port):
    _as_torchrun(rank, world_size, port)
    import deepspeed

    deepspeed.init_distributed("tricomm")
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 2), config=config, dist_init_required=False)
    for step in range(3):
        engine.backward(engine(_batch(rank, step)).square().mean())
        engine.step()
    return _said(engine.module)


def accelerate_by_name(rank, world_size, tell, port):
    _as_torchrun(rank, 2, port)  # Accelerate makes no group for one process
    from accelerate import Accelerator, InitProcessGroupKwargs

    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="tricomm")])


@pytest.mark.parametrize("train", [accelerate, lightning, torchtitan, deepspeed], ids=lambda train: train.__name__)
def test_trains_over_tricomm_by_one_line(train):
    if find_spec(train.__name__) is None:
        pytest.skip(f"{train.__name__} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks.run(2, train, port, timeout=500) == [("tricomm", True, True)] * 2


def test_accelerate_takes_no_name_but_gloo_on_a_cpu():
    """So on a CPU the user makes the group first; on GPUs the name is enough."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    with pytest.raises(AssertionError, match="tricomm is not available, please use gloo"):
        ranks.run(1, accelerate_by_name, 0)
