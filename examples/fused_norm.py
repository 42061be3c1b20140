"""The end of a tensor-parallel layer: all-reduce, residual, RMSNorm and FP8 in one call, compiled with the layer.

python examples/fused_norm.py        # or: torchrun --nproc-per-node 2 examples/fused_norm.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import main

import tricomm
import tricomm.flashinfer as flashinfer

EPS = 1e-6


def body() -> None:
    group = tricomm.wrap(dist.group.WORLD)
    rank, name = dist.get_rank(), group.group_name
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    residual = torch.randn(3, 64, device=device).bfloat16()
    weight = torch.ones(64, device=device).bfloat16()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank)).to(device).bfloat16()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def end_of_layer(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, residual = torch.ops.tricomm.all_reduce_rms_norm(x, residual, weight, EPS, 0.0, name)
        return norm * 1, residual

    norm, after = end_of_layer(x, residual)

    # The same with FlashInfer's names, and then with FP8 codes and a scale for each token.
    workspace = flashinfer.create_allreduce_fusion_workspace("auto", dist.get_world_size(), rank, 3, 64, torch.bfloat16)
    pattern = flashinfer.AllReduceFusionPattern
    again = flashinfer.allreduce_fusion(
        x, workspace, pattern.kARResidualRMSNorm, residual_in=residual, rms_gamma=weight, rms_eps=EPS
    )
    scales = torch.empty(3, 1, device=device)
    codes = flashinfer.allreduce_fusion(
        x,
        workspace,
        pattern.kARResidualRMSNormDynamicFP8Quant,
        residual_in=residual,
        residual_out=torch.empty_like(x),
        rms_gamma=weight,
        rms_eps=EPS,
        scale_out=scales,
    )
    close = torch.allclose(codes.float() * scales, norm.float(), rtol=0.07, atol=1e-3)
    if rank == 0:
        print(f"the same bits by either name: {torch.equal(norm, again)}, FP8 within its precision: {close}")
        print(workspace.comm.explain("all_reduce_rms_norm", x.nbytes, x.dtype, hidden=64))
        assert after.shape == x.shape
    workspace.destroy()


if __name__ == "__main__":
    main(body)
