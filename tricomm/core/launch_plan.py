"""A call's request and its launch plan, which holds everything that depends only on the request and the shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tricomm import arguments
from tricomm.core import dependent_launch
from tricomm.core.fused.fused_call import FUSED, ROWS, Epilogue, FusedCall, UserEpilogue
from tricomm.core.symmetric import OwnRows, Symmetric
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.device import epilogue as device
from tricomm.kernels.device.expert_rows import expert_rows
from tricomm.kernels.dtypes import reduction
from tricomm.kernels.launch.compiler import COMPILE_OPTIONS, WIDE, extras
from tricomm.kernels.launch.kernel_launch import BoundKernel, as_integers
from tricomm.kernels.layout import MAX_WORLD_SIZE
from tricomm.kernels.specialization import group_of
from tricomm.metrics.counters import Tally
from tricomm.policy import row_shapes
from tricomm.policy.launch_shapes import MOST_REGISTERS
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.store.control import Descriptor, PackedDescriptor

READ_IN_PLACE = frozenset({"all_reduce", "all_gather", "reduce_scatter"})  # of a symmetric handle
# `Runtime.bind`, for a kernel, its blocks, its constexprs, the width of the integers that it moves, whether the tensors
# are aligned, and its further arguments.
Bind = Callable[[Any, int, dict[str, Any], int | None, bool, Sequence[int | torch.Tensor]], BoundKernel]


class Request(NamedTuple):
    """A call as all ranks agree on it. A tuple, because that hashes quickly.

    collective, op        names; `op` is None if there is none
    algorithm, protocol   the kernel that the caller forces; None leaves the choice to selection
    root                  the rank that sends or receives all rows; -1 if there is none
    handle, fitting       symmetric memory that peers read in place, and the algorithms that support such a call
    into                  symmetric memory for the result; None: ordinary memory
    epilogue              the steps after the all-reduce of an `all_reduce_rms_norm` or an `all_reduce_rows`
    dtype, elements       the tensors' type, and elements a row; None and 0 until the tensors have been checked

    The numbers of uneven rows are not part of it, because they differ between ranks and between calls.
    """

    collective: str
    op: str | None = None
    algorithm: str | None = None
    protocol: str | None = None
    root: int = -1
    handle: Symmetric | OwnRows | None = None
    fitting: tuple[str, ...] = ()
    into: Symmetric | None = None
    epilogue: Epilogue | UserEpilogue | None = None
    dtype: torch.dtype | None = None
    elements: int = 0

    def sized(self, dtype: torch.dtype | None, elements: int) -> Request:
        """The same request for tensors of `dtype` with `elements` a row."""
        return tuple.__new__(Request, (*self[:9], dtype, elements))

    def over(self, handle: Symmetric | OwnRows, into: Symmetric | None = None) -> Request:
        """The same request over the memory of `handle`; an all_reduce's result is written to the handle `into`."""
        fitting = ("two_shot" if handle is into else "one_shot", *(("multicast",) if into is not None else ()))
        return tuple.__new__(Request, (*self[:5], handle, fitting, into, None, None, 0))

    @property
    def forced(self) -> bool:
        """Whether the caller forces a kernel, so that no other backend can run the call."""
        own = self.epilogue is not None and self.epilogue.own
        return own or self.algorithm is not None or self.protocol is not None or self.handle is not None


@dataclass(frozen=True)
class LaunchPlan:
    """A kernel, bound to a shape. A launch only adds the addresses, the call number, and the numbers of uneven rows.

    `numel` is the kernel's count, in raw elements; each call adds `weight` to the total of `tally`.
    """

    choice: Choice
    fingerprint: int
    numel: int
    record: PackedDescriptor  # the record of each of its calls, which the peers read
    run: BoundKernel
    mode: str = "eager"
    tally: Tally = field(default_factory=Tally)
    weight: int = 0


def make(site: SelectionFacts, choice: Choice, request: Request, aligned: bool, mode: str, bind: Bind) -> LaunchPlan:
    """Bind `choice` to the request, by `Runtime.bind`. Raises `InvalidArgument` for an op that the type does not have.

    `aligned` depends on this rank's tensors alone: it selects a compiled form of the same kernel, and is not part of
    the fingerprint or of anything that a peer sees.
    """
    kernel = registry.find(request.collective, choice.algorithm, choice.protocol, choice.zero_copy)
    values = constexprs(site, choice, kernel)
    dtype = arguments.DTYPES.get(request.dtype) if request.dtype is not None else None
    if kernel.reduces and dtype is not None:
        try:
            values["ELEMENT"], values["OP"] = reduction(dtype, request.op or "")
        except InvalidArgument as error:
            raise InvalidArgument(f"{request.collective}: {error}") from None
    if dtype is not None:
        values["ALIGNED"] = aligned
    op = request.op if kernel.reduces and request.op is not None else "none"
    fingerprint, record = announced(choice, op, dtype.name if dtype is not None else "none", request, mode)
    handle, into = request.handle, request.into
    further: dict[str, Any] = {
        "root": request.root,
        "table": None if handle is None else handle.addresses,
        "into": None if into is None else into.addresses,
    }
    more = [further[name] for name in extras(kernel.function)]
    bits = dtype.bits if dtype is not None else None
    run = bind(kernel.function, choice.blocks, values, bits, aligned, more)
    numel = request.elements * (dtype.lanes if dtype is not None else 1)
    return LaunchPlan(choice, fingerprint, numel, record, run, mode)


def announced(choice: Choice, op: str, dtype: str, request: Request, mode: str) -> tuple[int, PackedDescriptor]:
    """The fingerprint of a call, and its record, which the peers read."""
    collective, epilogue = choice.collective, request.epilogue
    if epilogue is not None:  # also if the all-reduce runs unfused
        collective, op = choice.collective if choice.fused else FUSED, epilogue.text()
    kernel, count, root = (choice.algorithm, choice.protocol), request.elements, request.root
    launch = choice.blocks, choice.block, mode, _handles(choice, request)
    facts = None if epilogue is None else epilogue.facts
    fingerprint = arguments.fingerprint(collective, op, dtype, count, root, *kernel, *launch, facts)
    op += _named(choice, request)
    descriptor = Descriptor(0, fingerprint, collective, op, dtype, *kernel, count, root, choice.blocks, mode)
    return fingerprint, descriptor.packed()


def _handles(choice: Choice, request: Request) -> int | tuple[int, int]:
    """The numbers of the handles that must be the same on all ranks; the output's handle only if peers write to it."""
    number = request.handle.number if request.handle is not None else 0
    if request.into is None or request.into is request.handle or choice.algorithm != "multicast":
        return number
    return number, request.into.number


def _named(choice: Choice, request: Request) -> str:
    """The handles of a call, as the text of a fault names them."""
    if request.handle is None:
        return ""
    numbers = _handles(choice, request)
    if isinstance(numbers, tuple):
        return f", handle {numbers[0]} into {numbers[1]}"
    return f", handle {numbers}" if numbers > 0 else f", rows of handle {-numbers}"


def constexprs(site: SelectionFacts, choice: Choice, kernel: registry.Kernel) -> dict[str, Any]:
    """The constexprs of `kernel` that do not depend on its tensors."""
    gpu = site.device != "cpu"
    values: dict[str, Any] = {
        "WORLD_SIZE": site.world_size,
        "BLOCK": choice.block,
        "LANES": 32 * choice.warps if gpu else MAX_WORLD_SIZE,
        "PTX": gpu,
        **kernel.fixed,
    }
    values["DEPENDENT"] = gpu and not dependent_launch.refusal(site, choice.blocks)
    values["COMPACT"] = choice.registers < MOST_REGISTERS
    # LANES is the number of threads, so it depends on num_warps.
    more = COMPILE_OPTIONS | {"num_warps": choice.warps, "maxnreg": choice.registers}
    return values | more if gpu else values


_MOST_AT_ONCE = 8  # experts' rows whose loads a kernel's code unrolls for each tile


def choose_fused(site: SelectionFacts, request: Request, mode: str) -> Choice | str:
    """The fused kernel for `request`, with `epilogue`, `dtype` and `elements` (rows * hidden), or why there is none.

    Pure, and the same on all ranks. Raises `InvalidArgument` if no kernel takes a user's epilogue: no other route does.
    """
    epilogue, dtype = request.epilogue, arguments.DTYPES.get(request.dtype) if request.dtype is not None else None
    if epilogue is None or dtype is None:
        return "there is no epilogue"
    # a user's epilogue has no other route, and torch would sum experts row by row
    if isinstance(epilogue, UserEpilogue) or epilogue.experts:
        site = replace(site, most_fused=sys.maxsize)
    choice = row_shapes.choose(
        site,
        ROWS if epilogue.own else FUSED,
        dtype.bits,
        epilogue.hidden,
        request.elements // epilogue.hidden,
        (request.algorithm, request.protocol),
        epilogue.quantize or "",
        mode,
    )
    if epilogue.own and isinstance(choice, str):
        raise InvalidArgument(f"{ROWS}: {choice}")
    return choice


def make_fused(
    site: SelectionFacts, choice: Choice, request: Request, aligned: bool, mode: str, bind: Bind
) -> LaunchPlan:
    """As `make`, for a fused kernel. `aligned`: the tensors of `wide` begin at multiples of 16 bytes."""
    dtype = arguments.DTYPES[request.dtype]
    kernel = registry.find(choice.collective, choice.algorithm, choice.protocol)
    values = row_constexprs(site, choice, request, aligned)
    fingerprint, record = announced(choice, "sum", dtype.name, request, mode)
    run = bind(kernel.function, choice.blocks, values, dtype.bits, aligned, ())
    return LaunchPlan(choice, fingerprint, request.elements, record, run, mode)


def row_constexprs(site: SelectionFacts, choice: Choice, request: Request, aligned: bool) -> dict[str, Any]:
    """The constexprs of the fused kernel of `choice`."""
    epilogue, dtype = request.epilogue, arguments.DTYPES[request.dtype]
    assert epilogue is not None
    kernel = registry.find(choice.collective, choice.algorithm, choice.protocol)
    values = constexprs(site, choice, kernel) | row_shapes.constexprs(site, choice, epilogue.hidden, aligned)
    return values | {"ELEMENT": dtype.element, "OP": "sum"} | _constants(epilogue, dtype.bits)


def _constants(epilogue: Epilogue | UserEpilogue, bits: int) -> dict[str, Any]:
    if isinstance(epilogue, UserEpilogue):
        functions = {"EPILOGUE": epilogue.function, "PREPARE": epilogue.prepare}
        return functions | {"PROLOGUE": epilogue.prologue, "OPERANDS": epilogue.operands}
    return {
        "EPILOGUE": device.rms_norm,
        "PREPARE": device.prepare_rms_norm,
        "PROLOGUE": expert_rows if epilogue.experts else None,
        "TOP_K": epilogue.top_k if epilogue.top_k <= _MOST_AT_ONCE else 0,
        "WEIGHT": arguments.DTYPES[epilogue.weight].element,
        "BIASED": epilogue.weight_bias != 0,
        "RESIDUAL": epilogue.residual,
        "NORM": epilogue.norm,
        "QUANTIZE": epilogue.quantize or "",
        "SWIZZLED": epilogue.scale_layout == "swizzled_128x4",
        "OPERANDS": operand_types(epilogue, bits),
    }


def wide(call: FusedCall) -> list[torch.Tensor]:
    """The tensors that are accessed by 16 bytes if all of them begin at multiples of 16. fp32 scales are not among
    them, because a row has only one."""
    tensors = [call.x, call.residual, call.weight, call.residual_out, call.norm_out, call.quant_out]
    if call.epilogue.quantize == "nvfp4":
        tensors.append(call.scale_out)
    if call.experts is not None:
        tensors += [call.experts.rows, call.experts.shared]
    return [t for t in tensors if t is not None]


def fused_aligned(call: FusedCall) -> bool:
    """Whether the tensors of `wide` begin at multiples of 16 bytes."""
    return not any(t.data_ptr() % 16 for t in wide(call))


def operand_types(epilogue: Epilogue, bits: int) -> tuple[str, ...]:
    """Triton's types of `operands`; the types of tensors of `wide` end in `WIDE`."""
    row, code = f"*i{bits}{WIDE}", f"*i8{WIDE}"
    types = ["fp32", "fp32", f"*i{8 * epilogue.weight.itemsize}{WIDE}"]
    types += [row] * (epilogue.residual + epilogue.norm)
    by_form = {"": [], "fp8": ["*fp32", code], "fp8_per_token": [code, "*fp32"], "nvfp4": ["*fp32", code, code]}
    return (*types, *by_form.get(epilogue.quantize or "", [code, "*i8", "i64"]), *epilogue.experts)


def operands(call: FusedCall) -> tuple[Any, ...]:
    """The operands of the device function `rms_norm`, in its order, followed by those of `expert_rows`."""
    epilogue, bits = call.epilogue, 8 * call.x.itemsize
    rows = [_bits(t, bits) for t in (call.residual, call.norm_out) if t is not None]
    values: list[Any] = [epilogue.eps, epilogue.weight_bias, _bits(call.weight, 8 * call.weight.itemsize), *rows]
    if call.scale is not None:
        values.append(call.scale)
    if call.quant_out is not None:
        values.append(_bits(call.quant_out, 8))
    if call.scale_out is not None:
        values.append(call.scale_out if epilogue.quantize == "fp8_per_token" else _bits(call.scale_out, 8))
    if group_of(epilogue.quantize):
        values.append(len(call.x))
    if call.experts is not None:
        values += call.experts.operands(len(call.x))
    return tuple(values)


def _bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    return as_integers(x.detach(), bits)
