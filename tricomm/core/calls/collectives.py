"""The collectives of a communicator: its public methods, and the guard around each.

    user tensor -> all_reduce -> prepared call, or check and plan -> one kernel -> peers' mailboxes -> tensor

Calls are checked before anything is sent, so a refused call consumes no sequence number and the group stays usable.
Every collective but `all_to_all_v` also takes a list of tensors of one dtype, in one launch, and then returns a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tricomm.core.calls.first_calls import INTO
from tricomm.core.calls.prepared_calls import PreparedCalls
from tricomm.core.entry_guard import Guard, entry, guarded
from tricomm.core.group import Group
from tricomm.core.symmetric import Symmetric
from tricomm.core.work import or_work
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu
from tricomm.kernels.collectives import registry
from tricomm.options import check_wire

Tensor = torch.Tensor | Symmetric


class Collectives:
    """The collectives. With `async_op=True` they return a `Work` instead of the output; `algorithm` and `protocol`
    force a kernel. All but `all_to_all_v` also take a list of tensors.

    All raise `InvalidArgument` before anything is sent, or the error of the group's fault.
    """

    _group: Group
    _gpu: Gpu | None
    _guard: Guard
    _calls: PreparedCalls
    _run: Callable[..., Any]  # of `_calls`

    @or_work
    @entry
    def all_reduce(
        self,
        x: torch.Tensor,
        op: Any = "sum",
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        wire: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Reduce `x` over all ranks, element by element, in rank order; every rank gets the same bits.

        In place, or into `out` (same shape and dtype). `op` is sum, avg, min, max, prod, band, bor or bxor, or a
        `ReduceOp`. Types narrower than 32 bits are accumulated in 32 and rounded once.

        `wire` quantises a sum or an average of fp16, bf16 or fp32 on the links, with one scale for each 128 elements:
        fp8 (e4m3), int8, or fp8_gather (fp8 in the second leg only, with a smaller error). docs/algorithms.md has
        bounds.
        """
        try:
            if wire is not None:
                algorithm = quantised(wire, algorithm)
            if out is x:
                out = None
            return self._run(("all_reduce", op, algorithm, protocol, -1, out is None), x, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def all_gather(
        self,
        x: Tensor,
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Concatenate every rank's `x` along dimension 0, in rank order, into `out` or a new tensor.

        `x` has the same shape and dtype on all ranks; `out` has its shape with dimension 0 multiplied by the world
        size (a scalar counts as one element). In place if `x` is this rank's row of `out`; if `out` is then a
        symmetric handle, the peers read that row in place.
        """
        try:
            return self._run(("all_gather", "none", algorithm, protocol, -1, out is None), x, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def reduce_scatter(
        self,
        x: Tensor,
        op: Any = "sum",
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Reduce `x` over all ranks as `all_reduce` does, and give rank r row r of the result.

        Dimension 0 of `x` is a multiple of the world size; `out` has its shape with dimension 0 divided by it. In
        place if `out` is this rank's row of `x`.
        """
        try:
            return self._run(("reduce_scatter", op, algorithm, protocol, -1, out is None), x, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def all_to_all(
        self,
        x: Tensor,
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Send row r of `x` to rank r; `out`, of the same shape, gets a row from every rank, in rank order.

        Dimension 0 of `x` is a multiple of the world size. `out` does not overlap `x`.
        """
        try:
            return self._run(("all_to_all", "none", algorithm, protocol, -1, out is None), x, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def all_to_all_v(
        self,
        x: Tensor,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Send the first `in_splits[0]` rows of `x` along dimension 0 to rank 0, the next `in_splits[1]` to rank 1,
        and so on; `out` gets `out_splits[r]` rows from each rank r, in rank order.

        Rows have the same shape and dtype on all ranks, and `in_splits[r]` of this rank equals rank r's `out_splits`
        for this rank. Otherwise all ranks raise `CollectiveMismatch`; a rank whose splits match may raise it only in
        its next call. `out` does not overlap `x`. Calls with other splits are as fast; a captured call keeps the splits
        of its capture. No rank knows the others' splits, so the choice of a kernel does not depend on the size: force
        protocol `ll` for small rows.
        """
        try:
            kind = ("all_to_all_v", "none", algorithm, protocol, -1, out is None)
            return self._calls.run_uneven(kind, x, in_splits, out_splits, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def broadcast(
        self,
        x: torch.Tensor,
        src: int,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Give every rank the `x` of rank `src`, in place."""
        try:
            check_root(src, self._group.world_size, "broadcast src")
            return self._run(("broadcast", "none", algorithm, protocol, src, True), x, None, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def reduce(
        self,
        x: torch.Tensor,
        dst: int,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor | None:
        """Reduce `x` over all ranks as `all_reduce` does, in place on rank `dst`; other ranks' tensors are unchanged,
        and they get None."""
        try:
            check_root(dst, self._group.world_size, "reduce dst")
            return self._run(("reduce", op, algorithm, protocol, dst, True), x, None, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def gather(
        self,
        x: Tensor,
        dst: int,
        out: torch.Tensor | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor | None:
        """Concatenate every rank's `x` along dimension 0 on rank `dst`, into `out` or a new tensor; others get None."""
        try:
            check_root(dst, self._group.world_size, "gather dst")
            return self._run(("gather", "none", algorithm, protocol, dst, out is None), x, out, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def scatter(
        self,
        x: Tensor | None,
        src: int,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        *,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor:
        """Give rank r row r of the `x` of rank `src`, into `out` or a new tensor.

        Dimension 0 of `x` is a multiple of the world size. Ranks other than `src` pass their `out`, or an `x` of which
        only shape and dtype are used.
        """
        try:
            check_root(src, self._group.world_size, "scatter src")
            if x is not None:
                return self._run(("scatter", "none", algorithm, protocol, src, out is None), x, out, async_op)
            return self._run(("scatter", "none", algorithm, protocol, src, INTO), out, None, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @guarded
    def barrier(self, *, async_op: Literal[False] = False) -> None:
        """Return None when every rank has entered the barrier; with `async_op=True` return a `Work` at once."""
        return self._calls.barrier(async_op=async_op)


def quantised(wire: Any, algorithm: Any) -> str:
    """The algorithm of an all-reduce with this `wire`; raises `InvalidArgument` if there is none."""
    check_wire(wire, "wire")
    if algorithm is not None:
        raise InvalidArgument(f"wire={wire!r} with algorithm={algorithm!r}: wire chooses the kernel; give one of them")
    return registry.algorithm_of(wire)


def check_root(root: Any, world_size: int, what: str) -> None:
    """Raises `InvalidArgument` unless `root` is the number of a rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < world_size:
        raise InvalidArgument(f"{what}={root!r}: a rank from 0 to {world_size - 1} is needed")
