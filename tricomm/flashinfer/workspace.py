"""The workspace of FlashInfer's fused all-reduce: a communicator."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from tricomm.communicator import Communicator
from tricomm.core.bootstrap import pick_device
from tricomm.core.fused.fused_call import DTYPES
from tricomm.errors import InvalidArgument

_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_SUPPORTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class AllReduceFusionWorkspace:
    """A communicator, and the size of the largest call. Made by `create_allreduce_fusion_workspace`.

    `rank` and `world_size` are the group's; `comm` is the communicator, whose `explain` and `stats` show which kernels
    ran.
    """

    backend = "tricomm"

    def __init__(
        self, comm: Communicator, max_token_num: int, hidden_dim: int, dtype: torch.dtype, owned: bool
    ) -> None:
        self.comm, self.world_size, self.rank = comm, comm.world_size, comm.rank
        self.max_token_num, self.hidden_dim, self.dtype = max_token_num, hidden_dim, dtype
        self._owned, self._destroyed = owned, False

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: Any = None
    ) -> bool:
        """Whether a call of this shape and type fits: it has at most the bytes that the workspace was made for."""
        return self._why_not(tp_size, num_tokens, hidden_dim, dtype) is None

    def _why_not(self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> str | None:
        if self._destroyed:
            return "it was destroyed"
        if tp_size != self.world_size:
            return f"it is of {self.world_size} ranks, not {tp_size}"
        if dtype not in DTYPES:
            return f"there is {_SUPPORTED}, not {dtype}"
        most = self.max_token_num * self.hidden_dim * self.dtype.itemsize
        nbytes = num_tokens * hidden_dim * dtype.itemsize
        if nbytes > most:
            return f"{num_tokens} tokens of {hidden_dim} {dtype} are {nbytes} bytes, it was made for {most}"
        return None

    def destroy(self) -> None:
        """Close the communicator, unless it was the caller's. Idempotent."""
        if not self._destroyed and self._owned:
            self.comm.close()
        self._destroyed = True


def create_allreduce_fusion_workspace(
    backend: Literal["trtllm", "mnnvl", "mnnvl-cutedsl", "auto"] = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any = None,
) -> AllReduceFusionWorkspace:
    """A workspace over the ranks of `group`; all of them call it.

    `group` is a process group of torch.distributed (default: all ranks), or a `tricomm.Communicator`, which the caller
    still owns. A call may have up to `max_token_num * hidden_dim` elements of `dtype`. `world_size` and `rank`, if
    given, must be the group's. The backends "auto", "trtllm" and "mnnvl" are the same here; "mnnvl-cutedsl" is refused,
    as are the keyword-only arguments, which only it has. Other arguments have no effect.

    Raises `InvalidArgument` (a `ValueError`) for arguments that do not fit, and otherwise as `Communicator` does.
    """
    special = {
        "top_k": top_k,
        "rms_eps": rms_eps,
        "weight_bias": weight_bias,
        "routed_scaling_factor": routed_scaling_factor,
        "include_shared_expert": include_shared_expert,
        "add_residual": add_residual,
        "write_residual_output": write_residual_output,
        "apply_rms_norm": apply_rms_norm,
        "output_dtype": output_dtype,
        "dynamic_fp8": dynamic_fp8,
        "write_norm_output": write_norm_output,
        "config": config,
    }
    given = [name for name, value in special.items() if value is not None]
    if backend not in ("auto", "trtllm", "mnnvl") or given:
        more = f" with {', '.join(given)}" if given else ""
        raise InvalidArgument(
            f"create_allreduce_fusion_workspace: backend={backend!r}{more}: tricomm stands for auto, trtllm and mnnvl, "
            "which take no settings of mnnvl-cutedsl"
        )
    for name, size in (("max_token_num", max_token_num), ("hidden_dim", hidden_dim)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"create_allreduce_fusion_workspace: {name}={size!r}: 1 or more is needed")
    if dtype not in DTYPES:
        raise InvalidArgument(f"create_allreduce_fusion_workspace: dtype={dtype!r}; there is {_SUPPORTED}")
    assert max_token_num is not None and hidden_dim is not None and dtype is not None, "they were looked at"
    if isinstance(group, Communicator):
        _check_place(group.rank, group.world_size, rank, world_size)
        return AllReduceFusionWorkspace(group, max_token_num, hidden_dim, dtype, owned=False)
    return AllReduceFusionWorkspace(_over(group, rank, world_size), max_token_num, hidden_dim, dtype, owned=True)


def _over(group: Any, rank: int | None, world_size: int | None) -> Communicator:
    """A communicator of the ranks of a process group, on this rank's GPU, or on the CPU."""
    group = dist.group.WORLD if group is None else group
    known = None if group is None else distributed_c10d._world.pg_map.get(group)
    if group is None or known is None or known[1] is None:
        raise InvalidArgument(
            "create_allreduce_fusion_workspace: torch.distributed has not made this group here; call "
            "init_process_group first, and on members only, or pass a tricomm.Communicator"
        )
    _check_place(group.rank(), group.size(), rank, world_size)
    count = _counts[group] = _counts.get(group, 0) + 1
    store = PrefixStore(f"tricomm/flashinfer/{count}", known[1])
    return Communicator(store, group.rank(), group.size(), pick_device(None))


def _check_place(own: int, size: int, rank: int | None, world_size: int | None) -> None:
    if rank not in (None, own) or world_size not in (None, size):
        raise InvalidArgument(
            f"create_allreduce_fusion_workspace: rank={rank}, world_size={world_size}; this is rank {own} of {size} in "
            "the group that was given"
        )
