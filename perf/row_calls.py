"""The names of fused calls in the measuring tools, and their launches without tensors, by the code that makes launch
plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tricomm.core import launch_plan
from tricomm.core.fused import fused_call
from tricomm.core.fused.expert_rows import ExpertRows, finalize_types
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, Epilogue, FusedArguments, FusedCall
from tricomm.core.launch_plan import Request
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.left_out import by_reason
from tricomm.perf import parsing
from tricomm.policy.row_shapes import MOST_HIDDEN
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import epilogue_name

EPS = 1e-6
_SCALES = {"fp8": 0.05, "nvfp4": 100.0}
_NAME = re.compile(rf"(norm|{'|'.join(QUANTIZATIONS)})@(\d{{1,6}})(?:\+top(\d{{1,3}}))?")


@dataclass(frozen=True, order=True)
class RowForm:
    """Rows of `hidden` elements that end in a residual and RMSNorm, and in `quantize` unless that is empty; `top_k`:
    each is the weighted sum of the rows of this number of experts and of a shared one; 0: it is not."""

    hidden: int = 8192
    quantize: str = ""
    top_k: int = 0

    @property
    def name(self) -> str:
        """`norm@8192`, `fp8@8192`, `norm@8192+top8`."""
        return epilogue_name(self.hidden, self.quantize) + (f"+top{self.top_k}" if self.top_k else "")

    def epilogue(self, weight: torch.dtype) -> Epilogue:
        """The epilogue with a weight of that type. Raises `InvalidArgument` for rows that a call refuses."""
        fused_call.check_row(self.hidden, self.quantize)
        layout = "swizzled_128x4" if self.quantize == "nvfp4" else ""
        plain = Epilogue(
            self.hidden, weight, EPS, norm=not self.quantize, quantize=self.quantize or None, scale_layout=layout
        )
        return plain if not self.top_k else plain._replace(experts=finalize_types(weight), top_k=self.top_k)

    def rows(self, nbytes: int, itemsize: int) -> int:
        """The rows of a call of `nbytes`: whole ones, at least one."""
        return max(1, nbytes // (self.hidden * itemsize))


def parse(name: str) -> RowForm:
    """The form of a `name`. Raises `InvalidArgument`."""
    match = _NAME.fullmatch(name)
    if match is None:
        known = ", ".join(("norm", *QUANTIZATIONS))
        raise InvalidArgument(f"{name!r}: rows are named like norm@8192: {known}, and elements of a row")
    hidden, quantize, top_k = int(match[2]), "" if match[1] == "norm" else match[1], int(match[3] or 0)
    fused_call.check_row(hidden, quantize)
    if hidden % 8 or not 8 <= hidden <= MOST_HIDDEN:
        raise InvalidArgument(f"{name}: fused kernels take rows of a multiple of 8 elements, up to {MOST_HIDDEN}")
    return RowForm(hidden, quantize, top_k)


def parse_forms(hidden: str, quantize: str | None) -> tuple[RowForm, ...]:
    """The forms of two comma lists; `none` does not quantise. Raises `InvalidArgument`."""
    names = parsing.parse_names(quantize or "none", ("none", *QUANTIZATIONS), "quantization")
    words = ["norm" if name == "none" else name for name in names]
    return tuple(parse(f"{name}@{length.strip()}") for length in hidden.split(",") for name in words)


@dataclass(frozen=True)
class RowLaunch:
    """A fused kernel as it is launched: the arguments of `Bind` that do not depend on tensors."""

    choice: Choice
    function: Any
    constexprs: dict[str, Any]
    bits: int


def launched(
    site: SelectionFacts,
    kernel: Kernel,
    form: RowForm,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int, int] | None = None,
    aligned: bool = True,
    mode: str = "graph",
) -> RowLaunch:
    """`kernel` for `rows` rows in `mode`; `shape` (blocks, warps, tile) in place of the policy's.

    Raises `InvalidArgument` if the kernel does not take such rows, or no call has them.
    """
    choice = fitting(site, kernel, form, dtype, rows, mode)
    if isinstance(choice, str):
        raise InvalidArgument(f"{kernel.name} of {choice}")
    if shape is not None:
        choice = replace(choice, blocks=shape[0], warps=shape[1], block=shape[2])
    made: list[RowLaunch] = []

    def bind(function: Any, blocks: int, constexprs: dict[str, Any], bits: Any, aligned: bool, more: Any) -> Any:
        made.append(RowLaunch(choice, function, constexprs, bits))

    request = _request(form, dtype, rows, (kernel.algorithm, kernel.protocol))
    launch_plan.make_fused(site, choice, request, aligned, mode, bind)
    return made[0]


def fitting(
    site: SelectionFacts, kernel: Kernel, form: RowForm, dtype: torch.dtype, rows: int, mode: str = "graph"
) -> Choice | str:
    """The launch of `kernel` for such rows, or the reason why it does not support them. Raises `InvalidArgument` for
    rows that no call has."""
    request = _request(form, dtype, rows, (kernel.algorithm, kernel.protocol))
    try:
        choice = launch_plan.choose_fused(site, request, mode)
    except InvalidArgument as error:  # what this Triton does not compile
        return str(error)
    return f"{form.name}: {choice}" if isinstance(choice, str) else choice


def _request(
    form: RowForm, dtype: torch.dtype, rows: int, forced: tuple[str | None, str | None] = (None, None)
) -> Request:
    return Request("all_reduce", "sum", *forced, epilogue=form.epilogue(dtype)).sized(dtype, rows * form.hidden)


def decided(site: SelectionFacts, form: RowForm, dtype: torch.dtype, rows: int, mode: str = "graph") -> Choice | str:
    """A communicator's fused kernel for such rows, or why it has none. Raises `InvalidArgument` for rows that no call
    has."""
    return launch_plan.choose_fused(site, _request(form, dtype, rows), mode)


def chosen(site: SelectionFacts, form: RowForm, dtype: torch.dtype, rows: int) -> Kernel:
    """The kernel that a communicator chooses in a graph. Raises `InvalidArgument` if it does not fuse the call."""
    choice = decided(site, form, dtype, rows)
    if isinstance(choice, str):
        raise InvalidArgument(f"{rows} rows of {form.name}: {choice}")
    return registry.find(FUSED, choice.algorithm, choice.protocol)


def kernels(
    site: SelectionFacts, form: RowForm, dtype: torch.dtype, rows: int
) -> tuple[tuple[Kernel, ...], dict[str, str]]:
    """(the fused kernels that take such rows, by name of the others why not). Raises `InvalidArgument` with the reasons
    if none does."""
    each = {kernel: fitting(site, kernel, form, dtype, rows) for kernel in registry.of(FUSED, site.world_size)}
    reasons = {kernel.name: choice for kernel, choice in each.items() if isinstance(choice, str)}
    if len(reasons) == len(each):
        raise InvalidArgument("; ".join(by_reason(reasons.items())))
    return tuple(kernel for kernel in each if kernel.name not in reasons), reasons


def call(form: RowForm, rows: int, dtype: torch.dtype, new: Callable[[int], torch.Tensor]) -> FusedCall:
    """The tensors of one rank, each in memory of `new(bytes)`: int64 words."""

    def of(count: int, kind: torch.dtype) -> torch.Tensor:
        return new(count * kind.itemsize).view(kind)[:count]

    hidden, given = form.hidden, {}
    x, residual, total = (of(rows * hidden, dtype).view(rows, hidden) for _ in range(3))
    if form.quantize == "nvfp4":
        blocks = fused_call.scale_shape(rows, hidden, "swizzled_128x4")
        given["quant_out"] = of(rows * hidden // 2, torch.uint8).view(rows, hidden // 2)
        given["scale_out"] = of(blocks[0] * blocks[1], torch.uint8).view(blocks)
    elif form.quantize:
        given["quant_out"] = of(rows * hidden, torch.float8_e4m3fn).view(rows, hidden)
        if form.quantize == "fp8_per_token":
            given["scale_out"] = of(rows, torch.float32).view(rows, 1)
    else:
        given["norm_out"] = of(rows * hidden, dtype).view(rows, hidden)
    if form.quantize in _SCALES:
        given["scale"] = of(1, torch.float32).fill_(_SCALES[form.quantize])
    arguments = FusedArguments(
        x, residual, of(hidden, dtype), EPS, residual_out=total, quantize=form.quantize or None, **given
    )
    experts = None
    if form.top_k:
        count = rows * form.top_k
        summands, shared = (of(n * hidden, dtype).view(n, hidden) for n in (count, rows))
        places, weight = (of(count, kind).view(rows, form.top_k) for kind in (torch.int32, torch.float32))
        places.copy_(torch.arange(count).view(form.top_k, rows).t())  # a token's rows are far from each other
        experts = ExpertRows(summands, places, weight.fill_(1.0), shared, form.top_k)
    return fused_call.checked(arguments, x.device, experts)
