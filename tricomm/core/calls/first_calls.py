"""The first call of its kind: everything is checked, planned and allocated, before anything is sent.

A refused call consumes no sequence number, and the group stays usable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tricomm import arguments
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import READ_IN_PLACE, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.symmetric import Symmetric
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs

_MOST = (1 << 32) - 1  # elements: a header has 32 bits for their number
_LISTS, _INTEGERS = (list, tuple), {int}


def check_list(xs: Sequence[torch.Tensor], what: str) -> None:
    """Raises `InvalidArgument` for a list that cannot be packed: an empty one, or one of several types."""
    if not xs:
        raise InvalidArgument(f"{what}: an empty list was given")
    kinds = dict.fromkeys(str(x.dtype) for x in xs)
    if len(kinds) > 1:
        raise InvalidArgument(
            f"{what}: tensors of one dtype are needed, found {', '.join(kinds)}; make a call for each"
        )


def pack(xs: Sequence[torch.Tensor], rows: int, what: str) -> torch.Tensor:
    """All tensors in one: [rows, elements of a row of each tensor in turn], flattened. Raises as `allocated` does."""
    parts = [arguments.allocated(what, x.reshape, rows, -1) for x in xs]
    return arguments.allocated(what, torch.cat, parts, dim=1).reshape(-1)


def unpack(packed: torch.Tensor, into: Sequence[torch.Tensor], rows: int) -> None:
    """Copy every tensor's part of `packed` into it."""
    parts = packed.reshape(rows, -1).split([y.numel() // rows for y in into], dim=1)
    for y, part in zip(into, parts, strict=True):
        y.copy_(part.reshape(y.shape))


def check_splits(splits: Any, world_size: int, what: str) -> tuple[int, ...]:
    """`splits` as a tuple; raises `InvalidArgument` unless it is one whole number, 0 or more, for each rank."""
    numbers = tuple(splits) if isinstance(splits, Sequence) and not isinstance(splits, str) else ()
    if len(numbers) != world_size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise InvalidArgument(f"{what}={splits!r}: {world_size} numbers of rows are needed, one for each rank")
    return numbers


def total(sends: Any, takes: Any, rank: int, world_size: int, length: int, row: int) -> int:
    """The number of rows that this rank receives, if the splits fit an input of `length` rows of `row` numbers. A fast
    form of `check_splits` and `check_uneven`; raises `LookupError` without a text."""
    if not (
        type(sends) in _LISTS
        and type(takes) in _LISTS
        and len(sends) == len(takes) == world_size
        and {*map(type, sends), *map(type, takes)} == _INTEGERS
        and min(sends) >= 0 <= min(takes)
        and sum(sends) == length
        and sends[rank] == takes[rank]
        and row * max(sends) <= _MOST
    ):
        raise LookupError
    return sum(takes)


def check_uneven(x: torch.Tensor, in_splits: tuple[int, ...], out_splits: tuple[int, ...], rank: int) -> None:
    """Raises `InvalidArgument` for splits that do not fit `x`, or do not match on this rank."""
    if not x.dim() or x.shape[0] != sum(in_splits):
        raise InvalidArgument(
            f"all_to_all_v: in_splits {list(in_splits)} add up to {sum(in_splits)}, the input of shape "
            f"{tuple(x.shape)} has {x.shape[0] if x.dim() else 'no'} rows"
        )
    if in_splits[rank] != out_splits[rank]:
        raise InvalidArgument(
            f"all_to_all_v: rank {rank} sends itself {in_splits[rank]} rows (in_splits) and expects "
            f"{out_splits[rank]} (out_splits)"
        )
    row = math.prod(x.shape[1:]) * (2 if x.is_complex() else 1)
    if row * max(in_splits) > _MOST:
        raise InvalidArgument(
            f"all_to_all_v: {row * max(in_splits)} elements for one rank; at most {_MOST} are possible"
        )


# (collective, op, algorithm, protocol, root, whether no output is given). The last is INTO if this rank has only an
# output and passes it as the input.
Kind = tuple[str, Any, Any, Any, int, Any]
INTO = "into"
_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})  # if no output is given


class MadeCall(NamedTuple):
    """A call that has been made.

    result    what the caller gets
    request   the call as the ranks agree on it
    given     the caller's tensors, if the kernel used their memory directly; empty otherwise
    output    the kernel's output, with `elements` elements a row
    """

    result: Any
    request: Request
    given: tuple[torch.Tensor, ...] = ()
    output: torch.Tensor | None = None
    elements: int = 0


class FirstCalls:
    """Makes the calls of one group from unchecked arguments."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launch = group, faults, planner, launcher.launch
        self._rank, self._world_size, self._device = group.rank, group.world_size, group.device

    def make(self, kind: Kind, x: Any, out: Any, splits: tuple[Any, Any] | None = None) -> MadeCall:
        """Check the tensors, allocate missing ones, run the call, and copy the result to the caller's output."""
        collective, op, algorithm, protocol, root, _ = kind
        form = collective_specs.COLLECTIVES[collective]
        if form.reduces:
            op = arguments.operation(op)
        request = Request(collective, op, algorithm, protocol, root)
        if splits is not None:
            return self._uneven(request, x, out, *splits)
        gets = form.root != "dst" or root == self._rank
        if out is not None and not gets:
            raise InvalidArgument(f"{collective}: out is for rank {root}, this is rank {self._rank}; pass None")
        if kind[-1] is INTO:
            x, out = self._rows_of(x, root), x
        whole = out if isinstance(out, Symmetric) else None
        if whole is not None:
            out = whole.local
        in_place = out is None and collective in _IN_PLACE
        many = isinstance(x, list | tuple)
        given = list(x) if many else [x]
        sources = [self._faults.checked(t, collective) for t in given]
        if many:
            check_list(sources, collective)
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
            packed = self._through(request, form, sources, targets)
            if packed is not None and packed[0].numel():
                source, into, count = packed
                seen = (source,) if out is None else (into,) if kind[-1] is INTO else (source, into)
                return MadeCall(result if gets else None, request, seen, into, count)
        return MadeCall(result if gets else None, request)

    def _uneven(self, request: Request, x: Any, out: Any, *given: Any) -> MadeCall:
        what = request.collective
        source = self._faults.checked(x, what)
        sends, takes = (
            check_splits(splits, self._world_size, f"{what} {name}")
            for splits, name in zip(given, ("in_splits", "out_splits"), strict=True)
        )
        check_uneven(source, sends, takes, self._rank)
        shape = (sum(takes), *source.shape[1:])
        if out is None:
            target = arguments.allocated(what, torch.empty, shape, dtype=source.dtype, device=source.device)
        else:
            target = self._faults.checked(out, f"{what} out")
            arguments.check_output(target, shape, source, what)
            arguments.check_apart(source, target, what, None)
        packed = arguments.allocated(what, source.contiguous)
        count = math.prod(source.shape[1:])
        aligned = (packed.data_ptr() | target.data_ptr()) % 16 == 0
        plan = self._planner.plan(request, source.dtype, count, aligned)
        result = target if out is None else out
        if not count:
            return MadeCall(result, request)
        self._launch(plan, packed, target, (sends, takes))
        if packed is not x:
            return MadeCall(result, request)
        return MadeCall(result, request, (x,) if out is None else (x, target), target, count)

    def _zero_copy(self, request: Request, x: Symmetric, y: torch.Tensor, whole: Symmetric | None) -> None:
        """Run on a symmetric handle, which peers read in place. If the output of an all_reduce is the handle `whole`,
        peers may also write the result into it."""
        self._check_own(request, x)
        local, into = x.local, None
        if request.collective == "all_reduce":
            into = x if y.data_ptr() == local.data_ptr() else whole
        if into is not None:
            self._check_own(request, into)
        rows = collective_specs.COLLECTIVES[request.collective].rows_in(self._world_size)
        self.run(request.over(x, into), local, y, local.numel() // rows)

    def _gather_rows(self, request: Request, y: Symmetric, x: torch.Tensor) -> None:
        """Gather into a symmetric handle: peers read this rank's row in it."""
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
        self,
        request: Request,
        form: collective_specs.Collective,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Run on contiguous memory: the tensors' own, or a copy if they are several or not contiguous. Returns the
        tensors that the kernel used, if they are the caller's memory."""
        rows_in, rows_out = form.rows_in(self._world_size), form.rows_out(self._world_size)
        if len(sources) == 1:
            source = arguments.allocated(form.name, sources[0].contiguous)
            into = targets[0] if targets and targets[0].is_contiguous() else None
        else:
            source, into = pack(sources, rows_in, form.name), None
        count = source.numel() // rows_in
        if into is None:
            into = source
            if targets and (rows_in != rows_out or form.name == "all_to_all"):
                size = count * rows_out
                into = arguments.allocated(form.name, torch.empty, size, dtype=source.dtype, device=source.device)
        self.run(request, source, into, count)
        if targets and into is not targets[0]:
            unpack(into, targets, rows_out)
        elif source is sources[0]:
            return source, into, count
        return None

    def run(self, request: Request, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
        """Plan and launch a call of contiguous tensors that have been checked, with `count` elements a row."""
        aligned = (x.data_ptr() | y.data_ptr()) % 16 == 0
        if request.collective != "all_reduce":  # rows may be unaligned
            aligned = aligned and count * x.itemsize % 16 == 0
        plan = self._planner.plan(request, x.dtype, count, aligned)
        if count:  # with zero elements no rank launches anything or consumes a sequence number
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
            self._faults.checked(target, f"{what} out")
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

    def _rows_of(self, out: Any, root: int) -> Any:
        """A tensor in place of the source's input of a scatter, on a rank that has only an output."""
        if self._rank == root:
            raise InvalidArgument(f"scatter: rank {root} is the source and gave no x")
        if out is None:
            raise InvalidArgument(f"scatter: rank {self._rank} gave neither out nor x, so no shape is known")
        if isinstance(out, list | tuple):
            return [self._rows_of(y, root) for y in out]
        y = out.local if isinstance(out, Symmetric) else out
        if not isinstance(y, torch.Tensor):
            return y
        shape = (self._world_size * y.shape[0] if y.dim() else self._world_size, *y.shape[1:])
        return arguments.allocated("scatter", y.new_empty, shape)
