"""One collective call, whatever c10d's calling convention was: flat tensors, an operation, a root, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from tricomm import arguments
from tricomm.store.control import Descriptor, PackedDescriptor


def _nothing() -> None:
    pass


@dataclass
class Call:
    """`x` and `out` are contiguous, 1-dimensional and detached; in a collective that works in place they are one.

    `splits` are (elements sent to each rank, elements received from each); `finish` puts what came into the
    caller's own tensors. `result` is what the future holds: the caller's list.
    """

    collective: str
    x: torch.Tensor | None = None
    out: torch.Tensor | None = None
    op: str = "none"
    root: int = -1
    sizes: tuple[int, ...] = ()
    splits: tuple[list[int], list[int]] | None = None
    result: list[Any] = field(default_factory=list)
    finish: Callable[[], None] = _nothing
    timeout: timedelta | None = None
    async_op: bool = True
    count: int = 0
    device: torch.device = torch.device("cpu")
    keep: list[torch.Tensor] = field(default_factory=list)  # the caller's tensors, for as long as a stream uses them

    @property
    def dtype(self) -> torch.dtype | None:
        tensor = self.x if self.x is not None else self.out
        return None if tensor is None else tensor.dtype

    @property
    def nbytes(self) -> int | None:
        """Input of one rank; None where ranks may differ in it."""
        if self.splits is not None or self.sizes:
            return None
        return 0 if self.dtype is None else self.count * self.dtype.itemsize

    def text(self) -> str:
        """What all ranks must agree on, in words."""
        words = [self.collective]
        if self.op != "none":
            words.append(f"op={self.op}")
        if self.dtype is not None:
            words.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
            words.append(
                f"sizes={list(self.sizes)}" if self.sizes else f"count={self.count}" if not self.splits else ""
            )
        if self.root >= 0:
            words.append(f"root={self.root}")
        return " ".join(word for word in words if word)

    def fingerprint(self) -> int:
        return arguments.fingerprint(self.collective, self.op, str(self.dtype), self.count, self.root, self.sizes)

    def record(self, path: str) -> PackedDescriptor:
        """What a control page shows of it where it goes to `path`, which is not the kernels."""
        return _record(
            path, self.fingerprint(), self.collective, self.op, str(self.dtype).removeprefix("torch."), self.count,
            self.root,
        )  # fmt: skip


@lru_cache(1024)
def _record(
    path: str, fingerprint: int, collective: str, op: str, dtype: str, count: int, root: int
) -> PackedDescriptor:
    return Descriptor(0, fingerprint, collective, op, dtype, path, path, count, root, 0, "eager").packed()
