"""The compiled forms of the kernels that calls of one kind can launch, for all sizes and addresses of tensors.

Found by the code that makes launch plans, with a `bind` that records its arguments. The form changes with the size only
in steps: at the ends of table rows, and at powers of two of a rank's part of the call (`launch_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tricomm import arguments
from tricomm.core import launch_plan
from tricomm.core.fused.fused_call import FUSED
from tricomm.core.launch_plan import Request
from tricomm.core.planner import UNKNOWN
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs
from tricomm.policy import selection
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import epilogue_name

_MOST_BYTES = 1 << 40
_MODES = ("eager", "graph")
Choose = Callable[[Request, int, str], Choice]  # for a request, its bytes and its mode


class KernelForm(NamedTuple):
    """The arguments of `launch_plan.Bind`, with zeros in place of `more`."""

    kernel: Any
    blocks: int
    constexprs: dict[str, Any]
    bits: int | None
    aligned: bool
    more: tuple[int, ...]


def of_calls(site: SelectionFacts, request: Request, choose: Choose, most_bytes: int | None = None) -> list[KernelForm]:
    """The forms of calls like `request` with up to `most_bytes` of input, each once. `request` has a dtype unless it
    is of a barrier. Raises `InvalidArgument` if no kernel takes such calls."""
    found: dict[tuple[Any, ...], KernelForm] = {}

    def bind(
        kernel: Any, blocks: int, constexprs: dict[str, Any], bits: int | None, aligned: bool, more: Sequence[Any]
    ) -> Any:
        key = (kernel, tuple(sorted(constexprs.items())), bits, aligned)
        found.setdefault(key, KernelForm(kernel, blocks, constexprs, bits, aligned, (0,) * len(more)))

    dtype, epilogue = request.dtype, request.epilogue
    if dtype is not None and dtype not in arguments.DTYPES:
        raise InvalidArgument(f"{request.collective}: no kernel takes {dtype}")
    row = 1 if dtype is None else dtype.itemsize if epilogue is None else dtype.itemsize * epilogue.hidden
    for mode in _MODES:
        sizes = _sizes(site, request, mode, _MOST_BYTES if most_bytes is None else most_bytes)
        # Also rounded up, because the first size of a table's row may be no multiple.
        multiples = (max(row, n * row) for size in sizes for n in (size // row, -(-size // row)))
        for whole in [0] if dtype is None else dict.fromkeys(multiples):
            sized = request.sized(dtype, 0 if dtype is None else whole // dtype.itemsize)
            choice = choose(sized, whole, mode)
            make = launch_plan.make_fused if choice.fused else launch_plan.make
            for aligned in (True,) if dtype is None else (True, False):
                make(site, choice, sized, aligned, mode, bind)
    return list(found.values())


def _sizes(site: SelectionFacts, request: Request, mode: str, most: int) -> Iterator[int]:
    """Sizes in bytes, at least one for each form that a plan may have."""
    if request.dtype is None or collective_specs.COLLECTIVES[request.collective].uneven:
        yield 0 if request.dtype is None else UNKNOWN
        return
    sizes = {quarters << exponent >> 2 for exponent in range(2, _MOST_BYTES.bit_length()) for quarters in (4, 5, 6, 7)}
    names: list[tuple[str, str | None]] = [(request.collective, None)]
    bits = arguments.DTYPES[request.dtype].bits
    if request.epilogue is not None:
        names.append((FUSED, epilogue_name(request.epilogue.hidden, request.epilogue.quantize or "")))
    for collective, epilogue in names:
        for _, _, row in selection.table_rows(site, collective, None, mode, bits, epilogue):
            ends = [row.min_bytes - 1] if row.max_bytes is None else [row.min_bytes - 1, row.max_bytes]
            sizes.update(size for end in ends for size in (end, end + 1))
    yield from sorted(size for size in sizes if 0 < size <= most)
