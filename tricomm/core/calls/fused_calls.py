"""The fused calls of a communicator: an all-reduce and the steps after it, in one kernel or separately.

    tensors -> known call -> launch of a kernel that is bound already
            -> checked -> plan, the same on all ranks -> fused kernel
                                                      -> all-reduce by a kernel or NCCL -> `unfused.finish`

All ranks take the same route, because it depends only on values that are the same on all: shapes, types, the epilogue's
facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from tricomm import arguments
from tricomm.core import launch_plan
from tricomm.core.calls.known_fused_call import (
    EXPERTS,
    NORM_OUT,
    QUANT_OUT,
    RESIDUAL_OUT,
    SCALE_OUT,
    KnownCall,
    Tensors,
)
from tricomm.core.calls.prepared_calls import NEW, first_like, known_like
from tricomm.core.entry_guard import Guard, entry, guarded
from tricomm.core.faults import Faults
from tricomm.core.fused import fused_call, row_functions, unfused
from tricomm.core.fused.expert_rows import ExpertRows
from tricomm.core.fused.fused_call import FUSED, QUANTIZATIONS, ROWS, FusedArguments, FusedCall, UserEpilogue
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan, Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.core.symmetric import Symmetric
from tricomm.core.work import or_work
from tricomm.errors import InvalidArgument
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.launch import jit_dispatch
from tricomm.kernels.launch.compiler import WIDE

_STATUS = layout.STATUS


class Quantized(NamedTuple):
    """The result of a quantising call: codes, their scales (None if the scale was given), the new residual, and the
    norm (None without `norm_out`)."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    residual: torch.Tensor
    norm: torch.Tensor | None


class FusedCalls:
    """One group's fused calls. `residual`, `weight`, numbers and scales have to be the same on all ranks."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher
        self._gpu, self._monitor = group.gpu, faults.monitor

    # Residual, RMSNorm, quantisation

    def run(
        self,
        asked: FusedArguments,
        algorithm: str | None,
        protocol: str | None,
        async_op: bool,
        experts: ExpertRows | None = None,
    ) -> Any:
        """Make the call `asked`, an `all_reduce_rms_norm` or its quantising form. With `experts`, x is not read; only
        its shape and type are used."""
        if (gpu := self._gpu) is not None and gpu.current_device() != gpu.index:
            return gpu.under(self.run)(asked, algorithm, protocol, async_op, experts)
        x, residual, weight, eps, bias, residual_out, norm_out, quantize, scale, scale_layout, codes, scales = asked
        if isinstance(x, Symmetric):
            x = x.local
            asked = asked._replace(x=x)
        static = scale if isinstance(scale, torch.Tensor) else None
        given: tuple[Any, ...] = (x, residual_out, weight, residual, norm_out, static, codes, scales)
        in_place = norm_out is x, residual_out is x, residual_out is residual, residual is x
        own = None if in_place[0] else norm_out, None if in_place[1] or in_place[2] else residual_out
        other = None if in_place[3] else residual
        looked_at = [t for t in (x, weight, other, static, codes, scales, *own) if t is not None]
        # All of the call except types and shapes. Includes the types of numbers, so that True does not match 1.
        key: tuple[Any, ...] = (
            (eps, type(eps), bias, type(bias), None if static is not None else scale, type(scale)),
            (residual is None, residual_out is None, norm_out is None, codes is None, scales is None, in_place),
            (algorithm, protocol, quantize, scale_layout),
        )
        if experts is not None:
            summands = experts[:4]
            given += tuple(experts.rows if t is None else t for t in summands)  # as `ExpertRows.operands`
            looked_at += [t for t in summands if t is not None]
            key += ((experts.top_k, *(t is None for t in summands)),)
        tensors = self.repeat(key, given, looked_at)
        if tensors is None:
            tensors = self._first(key, given, looked_at, (asked, experts), (algorithm, protocol))
        result: Any = tensors[NORM_OUT], tensors[RESIDUAL_OUT]
        if quantize is not None:
            result = Quantized(tensors[QUANT_OUT], tensors[SCALE_OUT], tensors[RESIDUAL_OUT], norm_out)
        return self._launcher.finish(result, async_op)

    def repeat(self, key: Any, given: Tensors, looked_at: Sequence[Any]) -> list[Any] | None:
        """Make the call `key` again; returns its tensors, including new ones. Returns None, with nothing done, if the
        call is not known or a tensor needs the checks of a first call. `looked_at`: the given tensors, each once.

        Optimised for speed, like `PreparedCalls.run`: `fused_call` accepts every call that this accepts, takes several
        times as long, and names the mistake if there is one. Only compiled kernels are repeated.
        """
        tensors, addresses, low = list(given), [], 0
        try:
            shapes = [t.shape for t in looked_at]  # raises for a nested tensor, for which `look` would crash
            variants = self._planner.prepared[shapes[0], key]
            known: KnownCall = first_like(variants, *looked_at)
            for place, make, itemsize, nbytes, bits in known.slots:
                t: Any = given[place]
                if make is not None:
                    t = tensors[place] = make()
                elif len(t.untyped_storage()) < t.storage_offset() * itemsize + nbytes:
                    return None
                addresses.append(address := t.data_ptr())
                low |= address & bits
        except NEW:
            return None
        if addresses != known.apart_at:
            for at, other, nbytes, more, may_be in known.apart:
                start, first = addresses[at], addresses[other]
                if start < first + more and first < start + nbytes and not (may_be and start == first):
                    return None
            known.apart_at = addresses
        captured = (gpu := self._gpu) is not None and gpu.capturing()
        planned = known.plans[2 * captured + (not low)]
        if planned is None:
            return None
        group = self._group
        if group.flags[_STATUS] or group.refusing or self._monitor.fault is not None:
            self._faults.check_usable()
        if captured:
            self._launcher.captured = True
        plan, again = planned
        x = looked_at[0]
        self._launcher.launch(plan, x, x, (), again, addresses)
        return tensors

    def _first(
        self, key: Any, given: Tensors, looked_at: Sequence[Any], call_of: Sequence[Any], forced: tuple[Any, Any]
    ) -> list[Any]:
        """Check the call of (arguments, experts) and make it. Returns its tensors by their places, new ones in the
        shape of x."""
        self._faults.check_usable()
        asked, experts = call_of
        call = fused_call.checked(asked, self._group.device, experts)
        x = asked.x
        blocks = call.epilogue.quantize == "nvfp4"
        made = (
            None,
            _like(call.residual_out, x),
            None,
            None,
            _like(call.norm_out, x),
            call.scale,
            _like(call.quant_out, x),
            call.scale_out if blocks else _like(call.scale_out, x),
            *given[EXPERTS:],
        )
        results = [one if one is not None else other for one, other in zip(given, made, strict=True)]
        for plan in self.run_checked(call, *forced):
            with_operands = getattr(plan.run, "with_operands", None)  # interpreted, timed and watched kernels have none
            if with_operands is None:
                break
            again = with_operands(plan.numel, plan.fingerprint, launch_plan.operands(call))
            known = known_like(
                self._planner, (x.shape, key), looked_at, lambda: KnownCall(looked_at, given, call, results)
            )
            known.plans[2 * (plan.mode == "graph") + launch_plan.fused_aligned(call)] = plan, again
        return results

    def run_checked(
        self, call: FusedCall, algorithm: str | None = None, protocol: str | None = None
    ) -> Sequence[LaunchPlan]:
        """Run a call that `fused_call.checked` has checked for this group's device; called by all ranks. Returns the
        plans of its fused kernel, one per mode; none if the call is not fused."""
        aligned = launch_plan.fused_aligned(call)
        request = Request("all_reduce", "sum", algorithm, protocol, epilogue=call.epilogue)
        plan = self._planner.plan(request, call.x.dtype, call.x.numel(), aligned)
        if not call.x.numel():
            return ()
        if plan.choice.fused:
            self._launcher.launch(plan, call.x, call.residual_out, (launch_plan.operands(call),))
            return self._planner.planned(request, call.x.dtype, call.x.numel(), aligned)
        with torch.no_grad():
            x = call.x if call.experts is None else call.experts.summed(call.x)
            total = unfused.total_of(call)
            self._launcher.launch(plan, x, total)
            unfused.finish(call, total)
        return ()

    # Users' epilogues

    def run_rows(
        self,
        x: torch.Tensor,
        epilogue: Any,
        operands: Sequence[Any],
        prepare: Any,
        prologue: Any,
        forced: tuple[Any, Any],
    ) -> None:
        """Make a call of `Communicator.all_reduce_rows`; `forced` are its algorithm and its protocol."""
        x = self._faults.checked(x, ROWS)
        row_functions.check_signatures(epilogue, prepare, prologue)
        if not x.dim() or x.dtype not in fused_call.DTYPES:
            raise InvalidArgument(f"{ROWS}: rows of fp16, bf16 or fp32 are needed, found {x.dtype} {tuple(x.shape)}")
        kinds = tuple(self._kind(n, value) for n, value in enumerate(operands))
        source = arguments.allocated(ROWS, x.detach().contiguous)
        tensors = [source, *(value for value in operands if isinstance(value, torch.Tensor))]
        own = UserEpilogue(x.shape[-1], epilogue, prepare, kinds, prologue)
        row_functions.check_unpacked(own)
        if source.numel():
            request = Request("all_reduce", "sum", *forced, epilogue=own)
            aligned, dtype = not any(t.data_ptr() % 16 for t in tensors), source.dtype
            plan = self._planner.plan(request, dtype, source.numel(), aligned)
            if self._gpu is None:
                sized = request.sized(dtype, source.numel())
                values = launch_plan.row_constexprs(self._planner.site, plan.choice, sized, aligned)
                row_functions.attempt(own, values, source, operands, self._group.timeout)
            self._launcher.launch(plan, source, source, (tuple(operands),))

    def _kind(self, number: int, value: Any) -> str:
        """Triton's type of an operand."""
        if isinstance(value, torch.Tensor):
            arguments.check_tensor(value, self._group.device, f"{ROWS} operand {number}")
            if not value.is_contiguous():
                raise InvalidArgument(f"{ROWS}: operand {number} is not contiguous; pass .contiguous()")
            return f"{jit_dispatch.type_name(value)}{WIDE}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{ROWS}: operand {number} is {type(value).__name__}; tensors and numbers fit")
        return "i64" if isinstance(value, int) else "fp32"


def _like(y: Any, x: torch.Tensor) -> Any:
    """`y`, a tensor of rows, in the shape of `x` except for the last dimension; None if `y` is None."""
    return None if y is None else y.view(*x.shape[:-1], y.shape[-1])


class FusedMethods:
    """All-reduces fused with the steps after them."""

    _gpu: Gpu | None
    _guard: Guard
    _fused: FusedCalls
    _launcher: Launcher

    @or_work
    @entry
    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-06,
        *,
        weight_bias: float = 0.0,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce `x` over all ranks, add `residual`, and normalise each row: (norm, new residual), of x's shape.

        `x` is [..., hidden] of fp32, fp16 or bf16, `residual` the same or None (then the new residual is the sum),
        `weight` is [hidden] of x's type or fp32. The sum has the bits of `all_reduce`; the residual is added in fp32
        and rounded to x's type; the norm is residual * rsqrt(mean(residual ** 2) + eps) * (weight + weight_bias) of the
        rounded residual, in fp32, rounded once. `weight_bias` is 1.0 for Gemma.

        `norm_out` and `residual_out` receive the results, which are new tensors if these are None. `norm_out` may be
        `x`, `residual_out` may be `residual` or `x`. `residual`, `weight` and the numbers have to be the same on all
        ranks; the numbers are compared. If no fused kernel supports a call (`explain` says why), an all-reduce and
        torch run it. With `async_op=True` a `Work` is returned. Raises `InvalidArgument` before anything is sent, or
        the group's fault.
        """
        try:
            asked = FusedArguments(x, residual, weight, eps, weight_bias, residual_out, norm_out)
            return self._fused.run(asked, algorithm, protocol, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @entry
    def all_reduce_rms_norm_quantized(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float = 1e-06,
        *,
        quantize: str,
        scale: torch.Tensor | float | None = None,
        scale_layout: str | None = None,
        weight_bias: float = 0.0,
        norm_out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        quant_out: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> Quantized:
        """As `all_reduce_rms_norm`, and quantise the norm: `Quantized(codes, scales, residual, norm)`.

        `quantize` is

        "fp8"            codes float8_e4m3fn of x's shape: norm / `scale`, at most 448; `scale` is a number or a tensor
                         of one fp32 element, the same on all ranks
        "fp8_per_token"  the same, with a scale for each row: largest magnitude / 448, in `scales`, [..., 1] fp32
        "nvfp4"          codes uint8 [..., hidden / 2], two e2m1 a byte, in blocks of 16 elements; `scales` are bytes
                         of e4m3: a block's largest magnitude / 6 * `scale`; `scale_layout` is swizzled_128x4 (the
                         default; rows are padded to 128, blocks to 4) or linear

        The norm is written only if `norm_out` is given. Raises as `all_reduce_rms_norm` does.
        """
        try:
            if quantize is None:
                raise InvalidArgument(f"{FUSED}: quantize=None; there is {', '.join(QUANTIZATIONS)}")
            rows = x, residual, weight, eps, weight_bias, residual_out, norm_out
            asked = FusedArguments(*rows, quantize, scale, scale_layout, quant_out, scale_out)
            return self._fused.run(asked, algorithm, protocol, async_op)
        except BaseException as error:
            self._guard.unwound(error)
            raise

    @or_work
    @guarded
    def all_reduce_rows(
        self,
        x: torch.Tensor,
        epilogue: Any,
        *operands: Any,
        prepare: Any = None,
        prologue: Any = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: Literal[False] = False,
    ) -> None:
        """Sum `x`, [..., hidden] of fp16, bf16 or fp32, over all ranks, and call `epilogue` for each row on every rank.

        `epilogue(row, operands, SPEC)` is a `@triton.jit` function (docs/fused.md); it writes its results to tensors
        among `operands`, which are contiguous tensors on this device, and numbers. `x` is not changed. `hidden` is a
        multiple of 8 up to 16384. `prologue(number, columns, inside, operands, SPEC)`, also a `@triton.jit` function,
        returns this rank's row `number` at `columns`; then only shape and type of `x` are used. All ranks pass the same
        functions, and operands of the same types. Returns None. Raises `InvalidArgument` for arguments that do not fit.
        """
        self._fused.run_rows(
            x, epilogue, operands, nothing if prepare is None else prepare, prologue, (algorithm, protocol)
        )
        return self._launcher.finish(None, async_op)

    @guarded
    def _all_reduce_rms_norm_of_experts(self, asked: FusedArguments, algorithm: str | None, experts: ExpertRows) -> Any:
        """`all_reduce_rms_norm`, or its quantising form, of rows that are sums of experts' rows."""
        return self._fused.run(asked, algorithm, None, False, experts)
