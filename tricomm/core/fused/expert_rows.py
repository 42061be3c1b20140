"""all_reduce_rms_norm of rows that are sums of experts' rows: the operands, their checks, and the sum in torch.

    row[t] = sum over k of rows[place(t, k)] * weight[t, k], in the order of k, + shared[t]; in fp32, rounded once

The place is `places[t, k]`. Without `places` the rows are in the order expert, token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tricomm import arguments
from tricomm.errors import InvalidArgument
from tricomm.kernels.launch.compiler import WIDE
from tricomm.kernels.launch.jit_dispatch import type_name


class ExpertRows(NamedTuple):
    """One rank's tensors, on the communicator's device and contiguous.

    rows     [any, hidden] of x's type
    places   [tokens, top_k] of int32, or None; a place outside `rows` adds nothing
    weight   [tokens, top_k], without places [top_k, tokens], of fp32, fp16 or bf16; None: 1
    shared   [tokens, hidden] of x's type, or None
    top_k    rows that are summed for a token
    """

    rows: torch.Tensor
    places: torch.Tensor | None
    weight: torch.Tensor | None
    shared: torch.Tensor | None
    top_k: int

    def operands(self, tokens: int) -> tuple[torch.Tensor | int, ...]:
        """The last operands of the device's `expert_rows`, in its order. It gets another tensor for a missing one, and
        does not read it."""
        rows, places, weight, shared, top_k = self
        given = (places is not None) + 2 * (weight is not None) + 4 * (shared is not None)
        tensors = (rows, *(rows if t is None else t for t in (places, weight, shared)))
        strides = (1, tokens) if places is None else (top_k, 1)
        return (*(t.detach() for t in tensors), len(rows), given, *strides, top_k)

    @property
    def types(self) -> tuple[str, ...]:
        """Triton's types of `operands`. The ranks compare them."""
        values = self.operands(1)
        wide = (0, 3)
        return tuple(
            "i64" if isinstance(value, int) else type_name(value) + (WIDE if n in wide else "")
            for n, value in enumerate(values)
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The given tensors, by name."""
        named = {
            "expert rows": self.rows,
            "expert places": self.places,
            "expert weight": self.weight,  # a call has another weight, the norm's
            "shared": self.shared,
        }
        return {name: t for name, t in named.items() if t is not None}

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raises `InvalidArgument` unless the tensors fit a call of `name` over rows like those of `like`."""
        tokens, hidden = like.shape
        by_token = (tokens, self.top_k) if self.places is not None else (self.top_k, tokens)
        floats = (torch.float32, torch.float16, torch.bfloat16)
        wanted = {
            "expert rows": ((len(self.rows) if self.rows.dim() else 0, hidden), (like.dtype,)),
            "expert places": (by_token, (torch.int32,)),
            "expert weight": (by_token, floats),
            "shared": ((tokens, hidden), (like.dtype,)),
        }
        for what, tensor in self.tensors.items():
            shape, dtypes = wanted[what]
            arguments.check_tensor(tensor, like.device, f"{name} {what}")
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
                kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise InvalidArgument(
                    f"{name} {what}: {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
                    f"contiguous {kinds} of shape {shape} is needed"
                )

    def summed(self, like: torch.Tensor) -> torch.Tensor:
        """The rows, in the bits of the device's `expert_rows`, for calls without a fused kernel."""
        total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        tokens = torch.arange(len(like), device=like.device)
        for k in range(self.top_k):
            place = self.places[:, k].long() if self.places is not None else tokens + k * len(like)
            there = ((place >= 0) & (place < len(self.rows)))[:, None]
            part = self.rows[torch.where(there[:, 0], place, 0)].float() if len(self.rows) else total * 0
            if self.weight is not None:
                weight = self.weight[:, k] if self.places is not None else self.weight[k]
                part = part * weight[:, None].float()
            total = total + torch.where(there, part, 0.0)
        if self.shared is not None:
            total = total + self.shared.float()
        return total.to(like.dtype)


def finalize_types(dtype: torch.dtype, weight: torch.dtype = torch.float32) -> tuple[str, ...]:
    """`ExpertRows.types` of rows of `dtype` with places and weights."""
    row = torch.empty((1, 1), dtype=dtype)
    return ExpertRows(row, row.to(torch.int32), row.to(weight), row, 1).types
