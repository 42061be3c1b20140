"""FlashInfer's fused all-reduce, by its names, arguments and pattern numbers, over tricomm.

    import tricomm.flashinfer as comm              # in place of: import flashinfer.comm as comm

    workspace = comm.create_allreduce_fusion_workspace("auto", world_size, rank, max_token_num, hidden, dtype)
    comm.allreduce_fusion(x, workspace, comm.AllReduceFusionPattern.kARResidualRMSNorm, residual_in=residual, ...)
    workspace.destroy()

It also runs on CPUs. Differences: `workspace.backend` is "tricomm"; arguments that tune FlashInfer's kernels
(`launch_with_pdl`, `trigger_completion_at_end`, `fp32_acc`: sums are always in fp32) have no effect; a buffer for
scales may be larger than needed; the sum of experts' rows is rounded once. The layout SWIZZLED_8x4 is not supported.
Names and meanings are those of FlashInfer 0.7.2.
"""

from tricomm.flashinfer.fusion import AllReduceFusionPattern, QuantizationSFLayout, allreduce_fusion
from tricomm.flashinfer.workspace import AllReduceFusionWorkspace, create_allreduce_fusion_workspace

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]
