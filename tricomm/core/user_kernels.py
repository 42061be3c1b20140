"""A user's own kernels over a communicator: memory that every rank can reach, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.monitor import Monitor
from tricomm.core.symmetric import Symmetric, check_shape
from tricomm.errors import InvalidArgument
from tricomm.kernels.launch import triton_adapter


class UserKernels:
    """Those of one group."""

    def __init__(self, group: Group, faults: Faults, launcher: Launcher, monitor: Monitor) -> None:
        self._group, self._faults, self._launcher, self._monitor = group, faults, launcher, monitor
        self._handles = 0

    def symmetric(self, shape: Sequence[int], dtype: torch.dtype) -> Symmetric:
        """Memory of `shape` and `dtype` on every rank that every peer can reach. Collective; the same on all ranks.

        Raises `InvalidArgument` on all ranks if one asks for what cannot be or if they ask for different things (the
        group stays usable), `ResourceError` if memory is refused anywhere.
        """
        group = self._group
        self._faults.check_usable()
        if group.runtime.no_symmetric is not None:
            raise InvalidArgument(f"symmetric: {group.runtime.no_symmetric}")
        if not group.reachable:
            raise InvalidArgument("symmetric: not every rank reaches every other one's memory on these GPUs' links")
        sizes, error = check_shape(shape, dtype)
        with self._launcher.held(), self._faults.abort_on_error("symmetric"):
            group.control.agree(error, "symmetric", group.timeout, abort_on_fault=True)
            group.control.require_equal(repr((sizes, dtype)), "symmetric", group.timeout, abort_on_fault=True)
            arena = group.runtime.symmetric(group.control, sizes, dtype, group.device, group.timeout)
            group.owned.append(arena)
            self._handles += 1
            return Symmetric(arena, group.rank, sizes, dtype, group.device, group.name, self._handles)

    def launch(self, kernel: Any, grid: Any, *args: Any, **constexprs: Any) -> None:
        """Run a user's `@triton.jit` kernel on the device of this communicator's tensors.

        Positional arguments are runtime values (tensors, tuples of tensors, numbers), keywords constexprs and launch
        options. `grid` is a number, a tuple of up to three, or a function of the constexprs. On a CPU the kernel is
        interpreted and has run on return. Waits that use `primitives` end when a peer is gone or the time is up; this
        call then raises what happened (on a GPU the next one, `synchronize()` or `close()` does).

        Raises `InvalidArgument` before anything runs for a kernel, grid or arguments that do not fit.
        """
        group, launcher = self._group, self._launcher
        self._faults.check_usable()
        if not triton_adapter.is_kernel(kernel):
            raise InvalidArgument(f"launch: a plain @triton.jit kernel is needed, found {type(kernel).__name__}")
        run = group.runtime.prepare(kernel, grid, args, constexprs, group.device, group.timeout)
        launcher.captured |= group.gpu is not None and group.gpu.capturing()
        with launcher.held(), self._monitor.user_call(group.gpu):
            launcher.run(run)
