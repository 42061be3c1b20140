"""Registers the backend and the operators with torch, and wraps its functions that need to know them. The first use
imports `tricomm.c10d`.

A process that only makes a `Communicator` never imports `tricomm.c10d`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import _OpNamespace
from torch.distributed import distributed_c10d


def register() -> None:
    """Register "tricomm" for `dist.init_process_group`; idempotent. torch >= 2.14 calls it by its entry point."""
    if hasattr(dist.Backend, "TRICOMM"):
        return
    dist.Backend.register_backend("tricomm", _create, extended_api=True, devices=["cpu", "cuda"])
    vars(torch.ops)["tricomm"] = _Operators("tricomm")
    both: Any = dist, distributed_c10d
    both[0].batch_isend_irecv = both[1].batch_isend_irecv = _together(dist.batch_isend_irecv)
    reducer = both[0].Reducer
    reducer._set_forward_pass_work_handle = _keeping(reducer._set_forward_pass_work_handle)
    if hasattr(dist, "shrink_group"):  # torch 2.10
        both[0].shrink_group = both[1].shrink_group = _shrinking(dist.shrink_group)
    if hasattr(distributed_c10d, "_validate_shrink_backend_requirements"):
        both[1]._validate_shrink_backend_requirements = _refusing(both[1]._validate_shrink_backend_requirements)


def _create(opts: Any, pg_options: Any) -> Any:
    return import_module("tricomm.c10d.group_creation").create(opts, pg_options)


class _Operators(_OpNamespace):
    """`torch.ops.tricomm` until its first use. Operators work over groups of every backend, so they cannot be defined
    only when a tricomm group is made."""

    def __getattr__(self, op_name: str) -> Any:
        if op_name.startswith("__"):
            return super().__getattr__(op_name)
        import_module("tricomm.c10d.custom_ops")
        if vars(torch.ops).get("tricomm") is self:
            del vars(torch.ops)["tricomm"]  # Inductor finds operators by the name of torch's own namespace
        return getattr(torch.ops.tricomm, op_name)


def _together(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Wraps `run`, torch's `batch_isend_irecv`, which groups the messages of a batch for NCCL only if the group is no
    subclass of `ProcessGroup`. Without grouping, ranks that all send before they receive deadlock."""

    @functools.wraps(run)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        ops = p2p_op_list if isinstance(p2p_op_list, list) else []
        groups = {(op.group or dist.group.WORLD) if isinstance(op, dist.P2POp) else None for op in ops}
        group: Any = groups.pop() if len(groups) == 1 else None  # torch refuses messages of several groups
        return group.batch(ops, run) if _is_ours(group) else run(p2p_op_list)

    return batch_isend_irecv


_works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by reducer


def _keeping(run: Callable[..., None]) -> Callable[..., None]:
    """`run`, by which DDP's `join` passes the handle of a call to its reducer in C++, which keeps only the C++ half of
    the object alive. Once the Python half is freed, the reducer waits for it for ever."""

    @functools.wraps(run)
    def set_handle(reducer: Any, work: Any, use_static_world_size: bool) -> None:
        _works[reducer] = work
        run(reducer, work, use_static_world_size)

    return set_handle


def _shrinking(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run`, torch's `shrink_group`, which shrinks a single backend of a group; for a tricomm group it would
    shrink NCCL."""

    @functools.wraps(run)
    def shrink_group(
        ranks_to_exclude: list[int], group: Any = None, shrink_flags: int = 0, pg_options: Any = None
    ) -> Any:
        group = group or dist.group.WORLD
        if not _is_ours(group):
            return run(ranks_to_exclude, group, shrink_flags, pg_options)
        return import_module("tricomm.c10d.group_creation").shrink_group(
            group, ranks_to_exclude, shrink_flags, pg_options
        )

    return shrink_group


def _refusing(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps `run`, a step of torch's `shrink_group`, to refuse tricomm's groups in code that has imported torch's
    function before tricomm."""

    @functools.wraps(run)
    def validate(group_info: Any) -> Any:
        if _is_ours(group_info["process_group"]):
            raise TypeError("this shrink_group was imported before tricomm: call tricomm.shrink(group, exclude)")
        return run(group_info)

    return validate


def _is_ours(group: Any) -> bool:
    loaded = sys.modules.get("tricomm.c10d.process_group")
    return loaded is not None and isinstance(group, loaded.TricommGroup)
