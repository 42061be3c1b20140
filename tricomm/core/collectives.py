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
from tricomm.core import row_splits, tensor_lists
from tricomm.core.entry_guard import guarded
from tricomm.core.planner import Planning
from tricomm.core.symmetric import Symmetric
from tricomm.core.work import Work
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs

Tensor = torch.Tensor | Symmetric
Tensors = Tensor | Sequence[torch.Tensor]
Outputs = torch.Tensor | Sequence[torch.Tensor] | None


class Collectives(Planning):
    """`async_op=True` gives a `Work` in place of the output; `algorithm` and `protocol` force a kernel.

    All raise `InvalidArgument` before anything is sent; a fault of the group raises its own error.
    """

    @guarded
    def all_reduce(
        self, x: Tensors, op: Any = "sum", out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks, element by element, in rank order; every rank gets the same bits.

        In place, or into `out` (same shape and dtype). `op` is sum, avg, min, max, prod, band, bor or bxor, or a
        `ReduceOp`. Types narrower than 32 bits are accumulated in 32 and rounded once.
        """
        if out is None:
            try:
                known = self._known[op, x.dtype, x.numel(), algorithm, protocol]  # type: ignore[union-attr]
            except (KeyError, TypeError, AttributeError):  # never made, or no tensor: what is wrong is said below
                known = None
            if known is not None and self._repeat(known, x):  # type: ignore[arg-type]
                return self._finish(x, True) if async_op else x
        name = arguments.operation(op)
        return self._place("all_reduce", x, out, name, -1, algorithm, protocol, async_op, in_place=True)

    @guarded
    def all_gather(
        self, x: Tensors, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Concatenate every rank's `x` along dimension 0, in rank order, into `out` or a new tensor.

        `x` has the same shape and dtype on all ranks; `out` has its shape with dimension 0 multiplied by the world
        size (a scalar counts as one element). In place where `x` is this rank's row of `out`.
        """
        return self._place("all_gather", x, out, "none", -1, algorithm, protocol, async_op)

    @guarded
    def reduce_scatter(
        self, x: Tensors, op: Any = "sum", out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks as `all_reduce` does, and give rank r row r of the result.

        Dimension 0 of `x` is a multiple of the world size; `out` has its shape with dimension 0 divided by it. In
        place where `out` is this rank's row of `x`.
        """
        name = arguments.operation(op)
        return self._place("reduce_scatter", x, out, name, -1, algorithm, protocol, async_op)

    @guarded
    def all_to_all(
        self, x: Tensors, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send row r of `x` to rank r; `out`, of the same shape, gets a row from every rank, in rank order.

        Dimension 0 of `x` is a multiple of the world size. `out` does not overlap `x`.
        """
        return self._place("all_to_all", x, out, "none", -1, algorithm, protocol, async_op)

    @guarded
    def all_to_all_v(
        self, x: Tensor, in_splits: Sequence[int], out_splits: Sequence[int], out: torch.Tensor | None = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Send the first `in_splits[0]` rows of `x` along dimension 0 to rank 0, the next `in_splits[1]` to rank 1,
        and so on; `out` gets `out_splits[r]` rows from each rank r, in rank order.

        Rows have the same shape and dtype on all ranks, and `in_splits[r]` here is `out_splits` of this rank at rank
        r: where it is not, all ranks get `CollectiveMismatch`, those that have what they expect with their next call at
        the latest. `out` does not overlap `x`. Other splits in every call cost nothing; a captured call keeps those of
        its capture. No rank knows how much the others have, so size takes no part in the choice of a kernel: force
        protocol `ll` for small rows.
        """
        what = "all_to_all_v"
        source = self._input(x, what)
        splits = (
            row_splits.check(in_splits, self.world_size, f"{what} in_splits"),
            row_splits.check(out_splits, self.world_size, f"{what} out_splits"),
        )
        row_splits.check_input(source, splits, self.rank)
        shape = (sum(splits[1]), *source.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=source.dtype, device=source.device)
        else:
            self._check_input(out, f"{what} out")
            arguments.check_output(out, shape, source, what)
            arguments.check_apart(source, out, what, None)
        source = source.contiguous()
        count = math.prod(source.shape[1:])
        aligned = (source.data_ptr() | out.data_ptr()) % 16 == 0
        chosen = self._plan(what, None, source.dtype, count, aligned, algorithm, protocol)
        if count:
            self._launch(chosen, source, out, splits)
        return self._finish(out, async_op)

    @guarded
    def broadcast(
        self, x: Tensors, src: int, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Give every rank the `x` of rank `src`, in place."""
        self._check_root(src, "broadcast src")
        return self._place("broadcast", x, None, "none", src, algorithm, protocol, async_op, in_place=True)

    @guarded
    def reduce(
        self, x: Tensors, dst: int, op: Any = "sum", *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Reduce `x` over all ranks as `all_reduce` does, in place on rank `dst`; others keep theirs and get None."""
        self._check_root(dst, "reduce dst")
        name = arguments.operation(op)
        return self._place("reduce", x, None, name, dst, algorithm, protocol, async_op, in_place=True)

    @guarded
    def gather(
        self, x: Tensors, dst: int, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Concatenate every rank's `x` along dimension 0 on rank `dst`, into `out` or a new tensor; others get None."""
        self._check_root(dst, "gather dst")
        if out is not None and self.rank != dst:
            raise InvalidArgument(f"gather: out is for rank {dst}, this is rank {self.rank}; pass None")
        return self._place("gather", x, out, "none", dst, algorithm, protocol, async_op)

    @guarded
    def scatter(
        self, x: Tensors | None, src: int, out: Outputs = None, *,
        algorithm: str | None = None, protocol: str | None = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Give rank r row r of the `x` of rank `src`, into `out` or a new tensor.

        Dimension 0 of `x` is a multiple of the world size. Ranks other than `src` pass their `out`, or an `x` that
        only says shape and dtype; its numbers are not looked at.
        """
        self._check_root(src, "scatter src")
        if x is None:
            if self.rank == src:
                raise InvalidArgument(f"scatter: rank {src} is the source and gave no x")
            if out is None:
                raise InvalidArgument(f"scatter: rank {self.rank} gave neither out nor x, so no shape is known")
            many = isinstance(out, list | tuple)
            x = [_rows_of(y, self.world_size) for y in out] if many else _rows_of(out, self.world_size)
        return self._place("scatter", x, out, "none", src, algorithm, protocol, async_op)

    @guarded
    def barrier(self, *, async_op: bool = False) -> Any:
        """Return when every rank has entered its barrier; with `async_op=True` a `Work`. Returns None."""
        self._usable()
        self._launch(self._plan("barrier", None, None, 0, True, None, None), self._group, self._group)
        if not async_op:
            self._wait(self._timeout)
        return self._finish(None, async_op)

    # The common way

    def _place(
        self, collective: str, x: Any, out: Any, op: str, root: int, algorithm: str | None, protocol: str | None,
        async_op: bool, in_place: bool = False,
    ) -> Any:  # fmt: skip
        """Check tensors, make what is missing, run, and put the result where the caller expects it."""
        kind = collective_specs.COLLECTIVES[collective]
        given = list(x) if isinstance(x, list | tuple) else [x]
        many = isinstance(x, list | tuple)
        sources = [self._input(t, collective) for t in given]
        if many:
            tensor_lists.check(sources, collective)
        gets = kind.root != "dst" or root == self.rank
        if in_place and out is None:
            targets = sources if gets and not (collective == "broadcast" and root == self.rank) else []
            for target in targets:
                arguments.check_writable(target, collective)
        else:
            targets = self._outputs(kind, collective, sources, out, many) if gets else []
        result: Any = (given if in_place and out is None else targets) if many else None
        if not many and gets:
            result = x if in_place and out is None else targets[0]
        if isinstance(x, Symmetric) and collective in ("all_reduce", "all_gather"):
            self._zero_copy(collective, op, x, targets[0], algorithm, protocol)
        else:
            self._through(kind, sources, targets, op, root, algorithm, protocol)
        return self._finish(result if gets else None, async_op)

    def _zero_copy(
        self, collective: str, op: str, x: Symmetric, y: torch.Tensor, algorithm: str | None, protocol: str | None
    ) -> None:
        """Over a symmetric handle: the peers read it where it lies."""
        if x.group != self.group:
            raise InvalidArgument(
                f"{collective}: this handle is of communicator {x.group}, here is {self.group} with ranks of its own; "
                "make one with this communicator's symmetric(), or pass handle.local"
            )
        fitting = "two_shot" if y.data_ptr() == x.local.data_ptr() else "one_shot"
        handle = (fitting, x.table, x.number)
        self._run(collective, op, x.local, y, x.local.numel(), algorithm, protocol, -1, handle)

    def _through(
        self, kind: collective_specs.Collective, sources: list[torch.Tensor], targets: list[torch.Tensor], op: str,
        root: int, algorithm: str | None, protocol: str | None,
    ) -> None:  # fmt: skip
        """Run over contiguous memory: the tensors' own, or where they are several, or have gaps, a copy's."""
        rows_in, rows_out = kind.rows_in(self.world_size), kind.rows_out(self.world_size)
        if len(sources) == 1:
            source = sources[0].contiguous()
            into = targets[0] if targets and targets[0].is_contiguous() else None
        else:
            source, into = tensor_lists.pack(sources, rows_in), None
        count = source.numel() // rows_in
        if into is None:
            into = source
            if targets and (rows_in != rows_out or kind.name == "all_to_all"):
                into = torch.empty(count * rows_out, dtype=source.dtype, device=source.device)
        self._run(kind.name, op, source, into, count, algorithm, protocol, root)
        if targets and into is not targets[0]:
            tensor_lists.unpack(into, targets, rows_out)

    def _outputs(
        self, kind: collective_specs.Collective, what: str, sources: list[torch.Tensor], out: Any, many: bool
    ) -> list[torch.Tensor]:
        """`out`, checked against the inputs, or new tensors."""
        shapes = [self._shape_out(kind, t) for t in sources]
        if out is None:
            return [torch.empty(s, dtype=t.dtype, device=t.device) for s, t in zip(shapes, sources, strict=True)]
        outs = list(out) if many and isinstance(out, list | tuple) else [out]
        if len(outs) != len(sources):
            raise InvalidArgument(f"{what}: {len(sources)} tensors were given and {len(outs)} outputs")
        for source, target, shape in zip(sources, outs, shapes, strict=True):
            self._check_input(target, f"{what} out")
            arguments.check_output(target, shape, source, what)
            if kind.name == "all_to_all":
                arguments.check_apart(source, target, what, None)
            elif kind.takes == "all":
                arguments.check_apart(target, source, what, self.rank)
            else:
                arguments.check_apart(source, target, what, self.rank if kind.gives == "all" else 0)
        return outs

    def _shape_out(self, kind: collective_specs.Collective, x: torch.Tensor) -> tuple[int, ...]:
        length, rest = (x.shape[0], x.shape[1:]) if x.dim() else (1, x.shape)
        if kind.takes == "all":
            if not x.dim() or length % self.world_size:
                raise InvalidArgument(
                    f"{kind.name}: dimension 0 of the input, of shape {tuple(x.shape)}, is not a multiple of the world "
                    f"size {self.world_size}"
                )
            length //= self.world_size
        elif kind.gives == "one":
            return tuple(x.shape)
        return (length * kind.rows_out(self.world_size), *rest)

    def _input(self, x: Any, what: str) -> torch.Tensor:
        tensor = x.local if isinstance(x, Symmetric) else x
        self._check_input(tensor, what)
        return tensor

    def _check_input(self, x: Any, what: str) -> None:
        self._usable()
        arguments.check_tensor(x, self.device, what)

    def _check_root(self, root: Any, what: str) -> None:
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.world_size:
            raise InvalidArgument(f"{what}={root!r}: a rank from 0 to {self.world_size - 1} is needed")

    def _finish(self, result: Any, async_op: bool) -> Any:
        if not async_op:
            return result
        return Work(self, result, self._gpu.recorded() if self._gpu is not None else None)


def _rows_of(out: Any, world_size: int) -> Any:
    """What stands for the source's input on a rank that has only its output: shape and dtype."""
    if not isinstance(out, torch.Tensor):
        return out
    return out.new_empty((world_size * out.shape[0] if out.dim() else world_size, *out.shape[1:]))
