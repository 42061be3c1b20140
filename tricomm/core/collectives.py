"""The collectives of a communicator: what is checked, which rows go where, and what comes back.

    user tensor -> all_reduce -> check -> plan (selection, once a shape) -> one kernel -> peers' mailboxes -> tensor

Calls are checked before anything is sent, so a refused call consumes no sequence number and the group stays usable.
Every collective also takes a list of tensors of one dtype, and then gives a list: they share one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tricomm import arguments
from tricomm.core import rows
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import READ_IN_PLACE, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.prepared_calls import PreparedCalls
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs

Tensor = torch.Tensor | Symmetric
Tensors = Tensor | Sequence[torch.Tensor]
Outputs = torch.Tensor | Sequence[torch.Tensor] | None
_BARRIER = Request("barrier")
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})  # if no output is given


class Collectives:
    """One group's collectives. `async_op=True` returns a `Work` instead of the output; `algorithm` and `protocol` force
    a kernel.

    All raise `InvalidArgument` before anything is sent; a fault of the group raises its own error.
    """

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._rank, self._world_size, self._device = group.rank, group.world_size, group.device
        self._prepared = PreparedCalls(group, faults, planner, launcher)
        self._launch, self._repeat = launcher.launch, self._prepared.repeat

    def all_reduce(
        self, x: Tensors, op: Any = "sum", out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks, element by element, in rank order; every rank gets the same bits.

        In place, or into `out` (same shape and dtype). `op` is sum, avg, min, max, prod, band, bor or bxor, or a
        `ReduceOp`. Types narrower than 32 bits are accumulated in 32 and rounded once.
        """
        y = self._repeat(("all_reduce", op, algorithm, protocol, -1, out is None), x, out)
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        request = Request("all_reduce", arguments.operation(op), algorithm, protocol)
        return self._call(request, x, out, async_op)

    def repeat(self, op: str, x: torch.Tensor) -> bool:
        """Repeat an all_reduce in place. False, with nothing done, if it is new or needs the checks of a first call."""
        return self._repeat(("all_reduce", op, None, None, -1, True), x) is not None

    def remember(self, op: str, x: torch.Tensor) -> bool:
        """Let `repeat` make all_reduces of tensors like `x`, after a call with the same elements in another shape.
        False if such tensors need the checks of a first call."""
        if type(x) is not torch.Tensor or x.requires_grad or not x.is_contiguous():
            return False
        return self._prepared.learn(Request("all_reduce", op), x, None, x, x.numel())

    def all_gather(
        self, x: Tensors, out: Outputs | Symmetric = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Concatenate every rank's `x` along dimension 0, in rank order, into `out` or a new tensor.

        `x` has the same shape and dtype on all ranks; `out` has its shape with dimension 0 multiplied by the world
        size (a scalar counts as one element). In place if `x` is this rank's row of `out`; if `out` is then a
        symmetric handle, the peers read that row in place.
        """
        y = self._repeat(("all_gather", "none", algorithm, protocol, -1, out is None), x, out)
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        return self._call(Request("all_gather", "none", algorithm, protocol), x, out, async_op)

    def reduce_scatter(
        self, x: Tensors, op: Any = "sum", out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks as `all_reduce` does, and give rank r row r of the result.

        Dimension 0 of `x` is a multiple of the world size; `out` has its shape with dimension 0 divided by it. In
        place if `out` is this rank's row of `x`.
        """
        y = self._repeat(("reduce_scatter", op, algorithm, protocol, -1, out is None), x, out)
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        request = Request("reduce_scatter", arguments.operation(op), algorithm, protocol)
        return self._call(request, x, out, async_op)

    def all_to_all(
        self, x: Tensors, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send row r of `x` to rank r; `out`, of the same shape, gets a row from every rank, in rank order.

        Dimension 0 of `x` is a multiple of the world size. `out` does not overlap `x`.
        """
        y = self._repeat(("all_to_all", "none", algorithm, protocol, -1, out is None), x, out)
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        return self._call(Request("all_to_all", "none", algorithm, protocol), x, out, async_op)

    def all_to_all_v(
        self, x: Tensor, in_splits: Sequence[int], out_splits: Sequence[int], out: torch.Tensor | None = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send the first `in_splits[0]` rows of `x` along dimension 0 to rank 0, the next `in_splits[1]` to rank 1,
        and so on; `out` gets `out_splits[r]` rows from each rank r, in rank order.

        Rows have the same shape and dtype on all ranks, and `in_splits[r]` of this rank equals rank r's `out_splits`
        for this rank. Otherwise all ranks raise `CollectiveMismatch`, those whose own rows are right with their next
        call at the latest. `out` does not overlap `x`. Changing the splits costs nothing; a captured call keeps those
        of its capture. No rank knows the others' splits, so the size plays no part in the choice of a kernel: force
        protocol `ll` for small rows.
        """
        what = "all_to_all_v"
        source = self._input(x, what)
        splits = (
            rows.check_splits(in_splits, self._world_size, f"{what} in_splits"),
            rows.check_splits(out_splits, self._world_size, f"{what} out_splits"),
        )
        rows.check_uneven(source, *splits, self._rank)
        shape = (sum(splits[1]), *source.shape[1:])
        if out is None:
            out = arguments.allocated(what, torch.empty, shape, dtype=source.dtype, device=source.device)
        else:
            self._input(out, f"{what} out")
            arguments.check_output(out, shape, source, what)
            arguments.check_apart(source, out, what, None)
        source = arguments.allocated(what, source.contiguous)
        count = math.prod(source.shape[1:])
        aligned = (source.data_ptr() | out.data_ptr()) % 16 == 0
        plan = self._planner.plan(Request(what, None, algorithm, protocol), source.dtype, count, aligned)
        if count:
            self._launch(plan, source, out, splits)
        return self._launcher.finish(out, async_op)

    def broadcast(
        self, x: Tensors, src: int, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Give every rank the `x` of rank `src`, in place."""
        y = self._repeat(("broadcast", "none", algorithm, protocol, src if type(src) is int else None, True), x)
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        check_root(src, self._world_size, "broadcast src")
        return self._call(Request("broadcast", "none", algorithm, protocol, src), x, None, async_op)

    def reduce(
        self, x: Tensors, dst: int, op: Any = "sum", *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks as `all_reduce` does, in place on rank `dst`; others keep theirs and get None."""
        y = self._repeat(("reduce", op, algorithm, protocol, dst if type(dst) is int else None, True), x)
        if y is not None:
            y = y if self._rank == dst else None
            return self._launcher.finish(y, True) if async_op else y
        check_root(dst, self._world_size, "reduce dst")
        request = Request("reduce", arguments.operation(op), algorithm, protocol, dst)
        return self._call(request, x, None, async_op)

    def gather(
        self, x: Tensors, dst: int, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Concatenate every rank's `x` along dimension 0 on rank `dst`, into `out` or a new tensor; others get None."""
        y = self._repeat(
            ("gather", "none", algorithm, protocol, dst if type(dst) is int else None, out is None), x, out
        )
        if y is not None:
            y = y if self._rank == dst else None
            return self._launcher.finish(y, True) if async_op else y
        check_root(dst, self._world_size, "gather dst")
        if out is not None and self._rank != dst:
            raise InvalidArgument(f"gather: out is for rank {dst}, this is rank {self._rank}; pass None")
        return self._call(Request("gather", "none", algorithm, protocol, dst), x, out, async_op)

    def scatter(
        self, x: Tensors | None, src: int, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Give rank r row r of the `x` of rank `src`, into `out` or a new tensor.

        Dimension 0 of `x` is a multiple of the world size. Ranks other than `src` pass their `out`, or an `x` that
        only gives shape and dtype; its values are not read.
        """
        y = self._repeat(
            ("scatter", "none", algorithm, protocol, src if type(src) is int else None, out is None), x, out
        )
        if y is not None:
            return self._launcher.finish(y, True) if async_op else y
        check_root(src, self._world_size, "scatter src")
        if x is None:
            if self._rank == src:
                raise InvalidArgument(f"scatter: rank {src} is the source and gave no x")
            if out is None:
                raise InvalidArgument(f"scatter: rank {self._rank} gave neither out nor x, so no shape is known")
            many = isinstance(out, list | tuple)
            x = [_rows_of(y, self._world_size) for y in out] if many else _rows_of(out, self._world_size)
        return self._call(Request("scatter", "none", algorithm, protocol, src), x, out, async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Return None when every rank has entered the barrier; with `async_op=True` return a `Work` at once."""
        group = self._group
        self._faults.check_usable()
        self._launch(self._planner.plan(_BARRIER, None, 0, True), group.table, group.table)
        if not async_op:
            self._launcher.wait(group.timeout)
        return self._launcher.finish(None, async_op)

    # What all collectives share

    def _call(self, request: Request, x: Any, out: Any, async_op: bool) -> Any:
        """Check tensors, make what is missing, run, and put the result where the caller expects it."""
        collective, root = request.collective, request.root
        form = collective_specs.COLLECTIVES[collective]
        whole = out if isinstance(out, Symmetric) else None
        if whole is not None:
            out = whole.local
        in_place = out is None and collective in _IN_PLACE
        many = isinstance(x, list | tuple)
        given = list(x) if many else [x]
        sources = [self._input(t, collective) for t in given]
        if many:
            rows.check_list(sources, collective)
        gets = form.root != "dst" or root == self._rank
        if in_place:
            targets = sources if gets and not (collective == "broadcast" and root == self._rank) else []
            for target in targets:
                arguments.check_writable(target, collective)
        else:
            targets = self._outputs(form, sources, out, many) if gets else []
        result: Any = (given if in_place else targets) if many else None
        if not many and gets:
            result = x if in_place else whole or targets[0]
        if isinstance(x, Symmetric) and collective in READ_IN_PLACE:
            self._zero_copy(request, x, targets[0], whole)
        elif whole is not None and collective == "all_gather" and not many:
            self._gather_rows(request, whole, sources[0])
        else:
            self._through(request, form, sources, targets, out)
        return self._launcher.finish(result if gets else None, async_op)

    def _zero_copy(self, request: Request, x: Symmetric, y: torch.Tensor, whole: Symmetric | None) -> None:
        """Run over a symmetric handle: the peers read it in place, and may write the result of an all_reduce into the
        handle `whole` if that is the output."""
        self._check_own(request, x)
        local, into = x.local, None
        if request.collective == "all_reduce":
            into = x if y.data_ptr() == local.data_ptr() else whole
        if into is not None:
            self._check_own(request, into)
        rows = collective_specs.COLLECTIVES[request.collective].rows_in(self._world_size)
        self.run(request.over(x, into), local, y, local.numel() // rows)

    def _gather_rows(self, request: Request, y: Symmetric, x: torch.Tensor) -> None:
        """Gather into a symmetric handle, of which the peers read this rank's row."""
        self._check_own(request, y)
        row = y.local.view(self._world_size, -1)[self._rank]
        if x.data_ptr() != row.data_ptr() or not x.is_contiguous():
            raise InvalidArgument(
                f"all_gather: out is a symmetric handle, so x has to be its row {self._rank}, which the peers read; "
                "pass out=handle.local to gather other memory"
            )
        self.run(request.over(y.rows), x, y.local, x.numel())

    def _check_own(self, request: Request, x: Symmetric) -> None:
        if x.group != self._group.name:
            raise InvalidArgument(
                f"{request.collective}: this handle is of communicator {x.group}, here is {self._group.name} with "
                "ranks of its own; make one with this communicator's symmetric(), or pass handle.local"
            )

    def _through(
        self, request: Request, form: collective_specs.Collective, sources: list[torch.Tensor],
        targets: list[torch.Tensor], out: Any,
    ) -> None:  # fmt: skip
        """Run over contiguous memory: the tensors' own, or a copy's if they are several or have gaps."""
        rows_in, rows_out = form.rows_in(self._world_size), form.rows_out(self._world_size)
        if len(sources) == 1:
            source = arguments.allocated(form.name, sources[0].contiguous)
            into = targets[0] if targets and targets[0].is_contiguous() else None
        else:
            source, into = rows.pack(sources, rows_in, form.name), None
        count = source.numel() // rows_in
        if into is None:
            into = source
            if targets and (rows_in != rows_out or form.name == "all_to_all"):
                size = count * rows_out
                into = arguments.allocated(form.name, torch.empty, size, dtype=source.dtype, device=source.device)
        self.run(request, source, into, count)
        if targets and into is not targets[0]:
            rows.unpack(into, targets, rows_out)
        elif count and len(sources) == 1 and source is sources[0]:
            self._prepared.learn(request, source, out, into, count)

    def run(self, request: Request, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
        """Plan and launch a call of contiguous tensors that have been checked, with `count` elements a row."""
        aligned = (x.data_ptr() | y.data_ptr()) % 16 == 0
        if request.collective != "all_reduce":  # rows may begin anywhere
            aligned = aligned and count * x.itemsize % 16 == 0
        plan = self._planner.plan(request, x.dtype, count, aligned)
        if count:  # zero elements: nothing is launched and nothing is consumed, on any rank
            self._launch(plan, x, y)

    def _outputs(
        self, form: collective_specs.Collective, sources: list[torch.Tensor], out: Any, many: bool
    ) -> list[torch.Tensor]:
        """`out`, checked against the inputs, or new tensors."""
        what = form.name
        shapes = [self._shape_out(form, t) for t in sources]
        if out is None:
            return [
                arguments.allocated(what, torch.empty, shape, dtype=t.dtype, device=t.device)
                for shape, t in zip(shapes, sources, strict=True)
            ]
        outs = list(out) if many and isinstance(out, list | tuple) else [out]
        if len(outs) != len(sources):
            raise InvalidArgument(f"{what}: {len(sources)} tensors were given and {len(outs)} outputs")
        for source, target, shape in zip(sources, outs, shapes, strict=True):
            self._input(target, f"{what} out")
            arguments.check_output(target, shape, source, what)
            if what == "all_to_all":
                arguments.check_apart(source, target, what, None)
            elif form.takes == "all":
                arguments.check_apart(target, source, what, self._rank)
            else:
                arguments.check_apart(source, target, what, self._rank if form.gives == "all" else 0)
        return outs

    def _shape_out(self, form: collective_specs.Collective, x: torch.Tensor) -> tuple[int, ...]:
        length, rest = (x.shape[0], x.shape[1:]) if x.dim() else (1, x.shape)
        if form.takes == "all":
            if not x.dim() or length % self._world_size:
                raise InvalidArgument(
                    f"{form.name}: dimension 0 of the input, of shape {tuple(x.shape)}, is not a multiple of the world "
                    f"size {self._world_size}"
                )
            length //= self._world_size
        elif form.gives == "one":
            return tuple(x.shape)
        return (length * form.rows_out(self._world_size), *rest)

    def _input(self, x: Any, what: str) -> torch.Tensor:
        self._faults.check_usable()
        tensor = x.local if isinstance(x, Symmetric) else x
        arguments.check_tensor(tensor, self._device, what)
        return tensor


def _rows_of(out: Any, world_size: int) -> Any:
    """A stand-in for the source's input, of its shape and dtype, on a rank that has only its output."""
    if not isinstance(out, torch.Tensor):
        return out
    shape = (world_size * out.shape[0] if out.dim() else world_size, *out.shape[1:])
    return arguments.allocated("scatter", out.new_empty, shape)


def check_root(root: Any, world_size: int, what: str) -> None:
    """Raises `InvalidArgument` unless `root` is the number of a rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < world_size:
        raise InvalidArgument(f"{what}={root!r}: a rank from 0 to {world_size - 1} is needed")
