"""Ranks that use SGLang's GroupCoordinator, whose custom all-reduce the plugin has replaced by tricomm's, or not."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.library import Library

# The torchvision wheel is built for CUDA; with a CPU build of torch it loads only if its operators are defined.
if torch.version.cuda is None:
    _vision = Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _vision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers import flashinfer_comm_fusion, layernorm  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

import tricomm  # noqa: E402
from tests.engines.bodies import value  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 8), (5, 24), (33, 136), (2, 3, 40))
OFF = ("pynccl", "mscclpp", "torch_symm_mem_all_reduce", "hpu_communicator", "xpu_communicator")


@contextmanager
def coordinator(rank, world_size, url, **environment):
    """SGLang's tensor-parallel group of all ranks, as its workers make it, after it has loaded its plugins."""
    os.environ.update({"SGLANG_TRICOMM": "1", "TRICOMM_CPU": "kernels", **environment})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", url, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    load_plugins()
    group = parallel_state.GroupCoordinator(
        [list(range(world_size))],
        rank,
        "gloo",
        use_custom_allreduce=True,
        group_name="tp",
        **{f"use_{name}": False for name in OFF},
    )
    try:
        yield group
    finally:
        group.destroy()
        dist.destroy_process_group()


def ran():
    return sum(tricomm.stats()["kernels"].values())


def normed(parts, residual, weight, eps):
    """(norm, new residual), by float64 from the rounded residual."""
    added = (torch.stack(parts).double().sum(0) + residual.double()).to(residual.dtype)
    wide = added.double()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    return norm.to(residual.dtype), added


def exact(rank, world_size, tell, url):
    """All-reduces, and fused calls through each of SGLang's entry points; return errors and the calls of kernels."""
    wrong, seed, before = [], 0, ran()
    with coordinator(rank, world_size, url) as group:
        assert type(group.ca_comm).__name__ == "SglangAllReduce" and not group.ca_comm.disabled
        with group.ca_comm.capture():
            pass
        # SGLang's launcher sets these.
        parallel = SimpleNamespace(attn_tp_size=world_size, attn_tp_rank=rank, attn_tp_group=group)
        layernorm.get_parallel = flashinfer_comm_fusion.get_parallel = lambda: parallel
        for dtype in DTYPES:
            for shape in SHAPES:
                seed += 1
                parts = [value(r, shape, dtype, seed) for r in range(world_size)]
                kept = parts[rank].clone()
                # `all_reduce` of a plain CPU tensor does not reach the custom all-reduce.
                total = group._all_reduce_out_place(parts[rank], "auto")
                if not torch.equal(total, sum(parts)) or not torch.equal(parts[rank], kept):
                    wrong.append(("all_reduce", dtype, shape))
                residual, weight = value(7, shape, dtype, seed), value(3, shape[-1:], dtype, seed)
                layer = layernorm.RMSNorm(shape[-1], 1e-5, weight_dtype=dtype)
                layer.weight.data.copy_(weight)
                want = normed(parts, residual, weight, 1e-5)
                name, more = group.ca_comm.name, (residual, weight, 1e-5)
                for way, (norm, added) in {
                    "coordinator": group.fused_allreduce_rmsnorm(kept, *more),
                    "layer": layer.forward_with_allreduce_fusion(kept, residual),
                    "operator": torch.ops.tricomm.sglang_all_reduce_rms_norm(kept, *more, name),
                }.items():
                    ulps = torch.finfo(dtype).eps * want[0].abs().double()
                    close = ((norm.double() - want[0].double()).abs() <= ulps + 1e-30).all()
                    if not torch.equal(added, want[1]) or not close:
                        wrong.append((way, dtype, shape))
    return wrong, ran() - before


def left_alone(rank, world_size, tell, url, how):
    """Calls that the kernels do not run, for the reason `how`, so SGLang does."""
    environment = {
        "size": {"TRICOMM_ENGINE_MAX_BYTES": "1024"},
        "unset": {"SGLANG_TRICOMM": "0"},
        "gloo": {"TRICOMM_CPU": "gloo"} if rank else {},
        "version": {},
    }[how]
    if how == "version":
        import sglang

        sglang.__version__ = "0.6.1"
    with coordinator(rank, world_size, url, **environment) as group:
        x = torch.full((300,), float(rank + 1))
        if how == "size":
            assert group.ca_comm.should_custom_ar(x[:256]) and not group.ca_comm.should_custom_ar(x)
            assert group.ca_comm.custom_all_reduce(x) is None
            assert group.fused_allreduce_rmsnorm(x, x, x, 1e-5) is None
            assert group.ca_comm.fused_allreduce_rmsnorm(x[:8], x[:4], x[:8], 1e-5) is None
        else:
            assert type(group.ca_comm).__name__ != "SglangAllReduce"
        return group.all_reduce(x.clone())[0].item()
