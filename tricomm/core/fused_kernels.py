"""The fused kernels of an all-reduce with an epilogue: which one takes a call, its plan, its launch."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import arguments
from tricomm.core.fused.fused_call import FUSED, Epilogue, FusedCall, UserEpilogue
from tricomm.core.launch_plan import Bind, LaunchPlan, Request, announced, constexprs
from tricomm.core.launcher import Launcher
from tricomm.errors import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.kernels.device import epilogue as device
from tricomm.kernels.launch.compiler import WIDE
from tricomm.kernels.launch.kernel_launch import as_integers
from tricomm.policy import row_shapes
from tricomm.policy.selection import Choice
from tricomm.policy.selection_facts import SelectionFacts

ROWS = "all_reduce_rows"


def choose(site: SelectionFacts, request: Request, mode: str) -> Choice | str:
    """The fused kernel for `request`, with `epilogue`, `dtype` and `elements` (rows * hidden), or why there is none.

    Pure, and the same on all ranks. Raises `InvalidArgument` if no kernel takes a user's epilogue: no other route does.
    """
    epilogue, dtype = request.epilogue, arguments.DTYPES.get(request.dtype) if request.dtype is not None else None
    if epilogue is None or dtype is None:
        return "there is no epilogue"
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


def make(site: SelectionFacts, choice: Choice, request: Request, aligned: bool, mode: str, bind: Bind) -> LaunchPlan:
    """The plan of `choice`; see `launch_plan.make`. `aligned`: the tensors of `wide` begin at multiples of 16 bytes."""
    epilogue, dtype = request.epilogue, arguments.DTYPES[request.dtype]
    assert epilogue is not None
    kernel = registry.find(choice.collective, choice.algorithm, choice.protocol)
    values = constexprs(site, choice, kernel) | row_shapes.constexprs(site, choice, epilogue.hidden, aligned)
    values |= {"ELEMENT": dtype.element, "OP": "sum"} | _constants(epilogue, dtype.bits)
    fingerprint, record = announced(choice, "sum", dtype.name, request, mode)
    run = bind(kernel.function, choice.blocks, values, dtype.bits, aligned, ())
    return LaunchPlan(choice, fingerprint, request.elements, record, run, mode)


def _constants(epilogue: Epilogue | UserEpilogue, bits: int) -> dict[str, Any]:
    if isinstance(epilogue, UserEpilogue):
        functions = {"EPILOGUE": epilogue.function, "PREPARE": epilogue.prepare}
        return functions | {"OPERANDS": epilogue.operands}
    return {
        "EPILOGUE": device.rms_norm,
        "PREPARE": device.prepare_rms_norm,
        "WEIGHT": arguments.DTYPES[epilogue.weight].element,
        "BIASED": epilogue.weight_bias != 0,
        "RESIDUAL": epilogue.residual,
        "NORM": epilogue.norm,
        "QUANTIZE": epilogue.quantize or "",
        "SWIZZLED": epilogue.scale_layout == "swizzled_128x4",
        "OPERANDS": operand_types(epilogue, bits),
    }


def wide(call: FusedCall) -> list[torch.Tensor]:
    """The tensors that are read and written in words of 16 bytes if all of them begin at multiples of 16. Scales in
    fp32 are not among them, because a row has only one."""
    tensors = [call.x, call.residual, call.weight, call.residual_out, call.norm_out, call.quant_out]
    if call.epilogue.quantize == "nvfp4":
        tensors.append(call.scale_out)
    return [t for t in tensors if t is not None]


def aligned(call: FusedCall) -> bool:
    """Whether the tensors of `wide` begin at multiples of 16 bytes."""
    return not any(t.data_ptr() % 16 for t in wide(call))


def operand_types(epilogue: Epilogue, bits: int) -> tuple[str, ...]:
    """Triton's types of `operands`; the types of tensors of `wide` end in `WIDE`."""
    row, code = f"*i{bits}{WIDE}", f"*i8{WIDE}"
    types = ["fp32", "fp32", f"*i{8 * epilogue.weight.itemsize}{WIDE}"]
    types += [row] * (epilogue.residual + epilogue.norm)
    by_form = {"": [], "fp8": ["*fp32", code], "fp8_per_token": [code, "*fp32"], "nvfp4": ["*fp32", code, code]}
    return (*types, *by_form[epilogue.quantize or ""])


def operands(call: FusedCall) -> tuple[Any, ...]:
    """The arguments of the device's `rms_norm` besides rows and sums, in its order."""
    epilogue, bits = call.epilogue, 8 * call.x.itemsize
    rows = [_bits(t, bits) for t in (call.residual, call.norm_out) if t is not None]
    values: list[Any] = [epilogue.eps, epilogue.weight_bias, _bits(call.weight, 8 * call.weight.itemsize), *rows]
    if call.scale is not None:
        values.append(call.scale)
    if call.quant_out is not None:
        values.append(_bits(call.quant_out, 8))
    if call.scale_out is not None:
        values.append(call.scale_out if epilogue.quantize == "fp8_per_token" else _bits(call.scale_out, 8))
    return tuple(values)


def _bits(x: torch.Tensor, bits: int) -> torch.Tensor:
    return as_integers(x.detach(), bits)


def launch(launcher: Launcher, plan: LaunchPlan, call: FusedCall) -> None:
    """Launch a plan of `make`."""
    launcher.launch(plan, call.x, call.residual_out, (operands(call),))
