"""all_reduce_rms_norm for `tricomm bench`: tricomm's call, and others' all-reduce with torch's norm after it.

A row's operation is `norm@8192`, the step after the sum and the elements of a row, or `fp8@8192` if it quantises. The
norm of other libraries is `torch.nn.functional.rms_norm`, their quantisation that of tricomm's unfused call. The
residual is checked exactly, the norm to two units in the last place, and a code to the next one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tricomm import Communicator
from tricomm.core.fused import unfused
from tricomm.core.fused.fused_call import FusedCall
from tricomm.perf import row_calls
from tricomm.perf.bench import check_data
from tricomm.perf.bench.collective_calls import Unavailable
from tricomm.perf.bench.request import Case
from tricomm.perf.row_calls import EPS, RowForm

UNFUSED = "unfused"
_OTHER = 100_003  # added to the call's number for the data of the residual
_PATTERNS = {"": 1, "fp8": 2, "nvfp4": 3, "fp8_per_token": 10}  # FlashInfer's numbers
_EXPERTS = {"": 7, "fp8": 12}


@dataclass(frozen=True)
class FusedTensors:
    """One rank's tensors of a call, as in `FusedCall`; `total` receives the sum of a call that is not fused."""

    case: Case
    call: FusedCall
    total: torch.Tensor

    def load(self, comm: Communicator, number: int) -> None:
        """Load the inputs of call `number`, and poison the outputs."""
        for name, data in _data(comm.world_size, comm.rank, number, self.call).items():
            getattr(self.call, name).copy_(data)
        _spread(self.call)
        _poison(self.call)

    def exact(self, comm: Communicator, number: int, device: torch.device) -> FusedCall:
        """Call `number` with its results: the exact sum of all ranks, and the steps of the unfused call on `device`."""
        call, size = self.call, comm.world_size
        parts = [_data(size, rank, number, call) for rank in range(size)]
        total = torch.stack([part["x"] for part in parts]).sum(0).to(device, call.x.dtype)
        exact = _call(self.case, total.numel(), device)
        assert exact.residual is not None
        exact.residual.copy_(parts[0]["residual"])
        exact.weight.copy_(parts[0]["weight"])
        _poison(exact)
        unfused.finish(exact, total)
        return exact

    def wrong(self, comm: Communicator, number: int) -> int:
        """Wrong elements of the results of call `number`."""
        call, exact = self.call, self.exact(comm, number, torch.device("cpu"))
        count = int((call.residual_out.cpu() != exact.residual_out).sum())
        if call.norm_out is not None and exact.norm_out is not None:
            step = 2 * torch.finfo(call.x.dtype).eps * exact.norm_out.double().abs()
            count += int((~((call.norm_out.cpu().double() - exact.norm_out.double()).abs() <= step)).sum())
        if call.quant_out is not None and exact.quant_out is not None:
            count += _apart(call.quant_out.cpu(), exact.quant_out)
        return count


def tensors(comm: Communicator, case: Case, count: int) -> FusedTensors:
    """The tensors of one rank for `count` elements, which are whole rows."""
    made, dtype = _call(case, count, comm.device), getattr(torch, case.dtype)
    return FusedTensors(case, made, torch.zeros(made.x.shape, dtype=dtype, device=comm.device))


def _call(case: Case, count: int, device: torch.device) -> FusedCall:
    def new(nbytes: int) -> torch.Tensor:
        return torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=device)

    return row_calls.call(form(case), count // case.hidden, getattr(torch, case.dtype), new)


def _spread(call: FusedCall) -> None:
    """Experts' rows that add up to x: x and -x in turn, so that no partial sum is rounded and no row can be left
    out."""
    if call.experts is None:
        return
    rows, _, _, shared, top_k = call.experts
    signs = torch.ones(top_k, 1, 1, dtype=rows.dtype, device=rows.device)
    signs[1::2] = -1
    rows.view(top_k, *call.x.shape).copy_(call.x * signs)
    if shared is not None:
        shared.copy_(call.x if top_k % 2 == 0 else torch.zeros_like(call.x))


def _rows(call: FusedCall) -> torch.Tensor:
    """The rows that are reduced."""
    return call.x if call.experts is None else call.experts.summed(call.x)


def _poison(call: FusedCall) -> None:
    for out in (call.residual_out, call.norm_out, call.quant_out):
        if out is not None:
            check_data.poison(out)


def form(case: Case) -> RowForm:
    """The form of the rows of `case`."""
    return RowForm(case.hidden, case.quantize, case.top_k)


def _data(world_size: int, rank: int, number: int, call: FusedCall) -> dict[str, torch.Tensor]:
    """Small whole numbers, whose sums are exact, and a weight in eighths."""

    def values(rank: int, number: int, count: int) -> torch.Tensor:
        return check_data.values("all_reduce", "sum", world_size, rank, number, count, call.x.dtype)

    shape, hidden = call.x.shape, call.epilogue.hidden
    return {
        "x": values(rank, number, call.x.numel()).view(shape),
        "residual": values(0, number + _OTHER, call.x.numel()).view(shape),
        "weight": values(1, number + _OTHER, hidden) / 8 + 2,
    }


def _apart(got: torch.Tensor, exact: torch.Tensor) -> int:
    """Codes that are more than one step from the exact ones."""
    a, b = (codes.view(torch.uint8).to(torch.int32) for codes in (got, exact))
    if got.dtype == torch.uint8:  # two a byte
        a, b = (torch.stack([codes & 15, codes >> 4]) for codes in (a, b))
    top = 8 if got.dtype == torch.uint8 else 128
    a, b = (torch.where(codes >= top, top - codes, codes) for codes in (a, b))
    return int(((a - b).abs() > 1).sum())


def ours(comm: Communicator, case: Case, made: FusedTensors) -> Callable[[], Any]:
    """tricomm's call."""
    call = made.call
    forced = (case.algorithm, case.protocol)
    return lambda: comm._internal.run_fused(call, *forced)


Join = Callable[[], Any]  # makes the library's group of torch.distributed


def offered(library: str) -> dict[str, Callable[[Communicator, Case, FusedTensors, Join], Callable[[], Any]]]:
    """The ways in which `library` makes the call. They raise `Unavailable`."""
    if library == UNFUSED:
        return {UNFUSED: _unfused}
    if library == "flashinfer":
        return {library: _flashinfer}
    return {library: _of_torch} if library in ("nccl", "gloo") else {}


def _unfused(comm: Communicator, case: Case, made: FusedTensors, join: Join) -> Callable[[], Any]:
    return unfused_call(comm, made)


def unfused_call(comm: Communicator, made: FusedTensors) -> Callable[[], Any]:
    """tricomm's all-reduce, by the kernel that it chooses, and torch's norm."""

    def run() -> None:
        comm.all_reduce(_rows(made.call), out=made.total)
        _norm(made)

    return run


def _of_torch(comm: Communicator, case: Case, made: FusedTensors, join: Join) -> Callable[[], Any]:
    group = join()

    def run() -> None:
        made.total.copy_(_rows(made.call))  # as a user's matrix product would have written it
        dist.all_reduce(made.total, group=group)
        _norm(made)

    return run


def _norm(made: FusedTensors) -> None:
    """Residual, torch's norm, and quantisation."""
    call = made.call
    assert call.residual is not None
    torch.add(made.total, call.residual, out=call.residual_out)
    norm = torch.nn.functional.rms_norm(call.residual_out, (call.epilogue.hidden,), call.weight, EPS)
    if call.norm_out is not None:
        call.norm_out.copy_(norm)
    unfused.quantize(call, norm)


def _flashinfer(comm: Communicator, case: Case, made: FusedTensors, join: Join) -> Callable[[], Any]:
    try:
        flashinfer = importlib.import_module("flashinfer.comm")
    except ImportError as error:
        raise Unavailable(f"flashinfer: it is not installed here: {error}") from None
    call = made.call
    patterns = _PATTERNS if call.experts is None else _EXPERTS
    if case.quantize not in patterns:
        raise Unavailable(f"flashinfer: it has no pattern for {form(case).name}")
    rows, hidden = call.x.shape
    workspace = flashinfer.create_allreduce_fusion_workspace(
        "auto", comm.world_size, comm.rank, rows, hidden, call.x.dtype, group=join()
    )
    arguments = {
        "input": call.x,
        "workspace": workspace,
        "pattern": patterns[case.quantize],
        "launch_with_pdl": True,
        "residual_in": call.residual,
        "residual_out": call.residual_out,
        "norm_out": call.norm_out,
        "quant_out": call.quant_out,
        "scale_out": call.scale_out,
        "scale_factor": call.scale,
        "rms_gamma": call.weight,
        "rms_eps": EPS,
    }
    if call.experts is not None:
        summands, places, weight, shared, _ = call.experts
        arguments |= {"input": summands, "expanded_idx_to_permuted_idx": places, "expert_scale_factor": weight}
        arguments["shared_expert_output"] = shared
    return lambda: flashinfer.allreduce_fusion(**arguments)
