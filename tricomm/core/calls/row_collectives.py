"""all_reduce_rows of a communicator: an all-reduce that ends in a user's own Triton function of a row."""

from __future__ import annotations

from typing import Any

import torch

from tricomm import arguments
from tricomm.core.faults import Faults
from tricomm.core.fused.fused_call import UserEpilogue
from tricomm.core.group import Group
from tricomm.core.launch_plan import Request
from tricomm.core.launcher import Launcher
from tricomm.core.planner import Planner
from tricomm.errors import InvalidArgument
from tricomm.kernels.device.epilogue import nothing
from tricomm.kernels.launch import jit_dispatch, triton_adapter
from tricomm.kernels.launch.compiler import WIDE

_WHAT = "all_reduce_rows"


class RowCollectives:
    """One group's `all_reduce_rows`."""

    def __init__(self, group: Group, faults: Faults, planner: Planner, launcher: Launcher) -> None:
        self._group, self._faults, self._planner, self._launcher = group, faults, planner, launcher

    def all_reduce_rows(
        self,
        x: torch.Tensor,
        epilogue: Any,
        *operands: Any,
        prepare: Any = None,
        algorithm: str | None = None,
        protocol: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """As `Communicator.all_reduce_rows`."""
        self._faults.check_usable()
        arguments.check_tensor(x, self._group.device, _WHAT)
        for name, function in (("epilogue", epilogue), ("prepare", prepare or nothing)):
            if not triton_adapter.is_kernel(function):
                raise InvalidArgument(f"{_WHAT}: {name} is no plain @triton.jit function: {type(function).__name__}")
        if not x.dim() or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise InvalidArgument(f"{_WHAT}: rows of fp16, bf16 or fp32 are needed, found {x.dtype} {tuple(x.shape)}")
        kinds = tuple(self._kind(n, value) for n, value in enumerate(operands))
        source = arguments.allocated(_WHAT, x.detach().contiguous)
        tensors = [source, *(value for value in operands if isinstance(value, torch.Tensor))]
        aligned = not any(t.data_ptr() % 16 for t in tensors)
        own = UserEpilogue(x.shape[-1], epilogue, prepare or nothing, kinds)
        request = Request("all_reduce", "sum", algorithm, protocol, epilogue=own)
        if source.numel():
            plan = self._planner.plan(request, source.dtype, source.numel(), aligned)
            self._launcher.launch(plan, source, source, (operands,))
        return self._launcher.finish(None, async_op)

    def _kind(self, number: int, value: Any) -> str:
        """Triton's type of an operand."""
        if isinstance(value, torch.Tensor):
            arguments.check_tensor(value, self._group.device, f"{_WHAT} operand {number}")
            if not value.is_contiguous():
                raise InvalidArgument(f"{_WHAT}: operand {number} is not contiguous; pass .contiguous()")
            return f"{jit_dispatch.type_name(value)}{WIDE}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"{_WHAT}: operand {number} is {type(value).__name__}; tensors and numbers fit")
        return "i64" if isinstance(value, int) else "fp32"
