"""A user's own kernels over a communicator: memory that every rank can reach, and their launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tricomm import arguments
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher
from tricomm.core.symmetric import HandleName, Symmetric, check_shape
from tricomm.core.watch.monitor import Monitor
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.launch import triton_adapter

_ALIGNMENT = 16


class UserKernels:
    """The symmetric memory and the users' kernels of one group."""

    def __init__(self, group: Group, faults: Faults, launcher: Launcher, monitor: Monitor) -> None:
        self._group, self._faults, self._launcher, self._monitor = group, faults, launcher, monitor
        self._handles = 0

    def symmetric(self, shape: Sequence[int], dtype: torch.dtype, *, multicast: bool = True) -> Symmetric:
        """As `Communicator.symmetric`."""
        group = self._group
        self._faults.check_usable()
        if group.runtime.no_symmetric is not None:
            raise InvalidArgument(f"symmetric: {group.runtime.no_symmetric}")
        if not group.reachable:
            raise InvalidArgument(f"symmetric: {_unreachable(group)}")
        sizes, error = check_shape(shape, dtype)
        with self._launcher.held(), self._faults.abort_on_error("symmetric"):
            group.control.agree(error or group.captured("symmetric"), "symmetric", group.timeout, abort_on_fault=True)
            said = repr((sizes, dtype)) + ", multicast=False" * (not multicast)
            group.control.require_equal(said, "symmetric", group.timeout, abort_on_fault=True)
            wanted = bool(multicast) and group.arena.multicast != 0
            arena = group.runtime.symmetric(group.control, sizes, dtype, group.device, group.timeout, wanted)
            self._handles += 1
            number = self._handles
            group.owned[number] = arena
            name, released = HandleName(group.name, number, group.rank), partial(group.owned.pop, number, None)
            made = Symmetric(arena, name, sizes, dtype, released=released)
            if not wanted:
                made.no_multicast = group.arena.no_multicast if multicast else "it was made with multicast=False"
            return made

    def register(self, tensor: torch.Tensor, group: Any = None) -> Symmetric:
        """As `Communicator.register`."""
        own = self._group
        self._faults.check_usable()
        if own.runtime.no_symmetric is not None or not own.reachable:
            raise InvalidArgument(f"register: {own.runtime.no_symmetric or _unreachable(own)}")
        error = _registrable(tensor, own.device)
        with self._launcher.held(), self._faults.abort_on_error("register"):
            own.control.agree(error or own.captured("register"), "register", own.timeout, abort_on_fault=True)
            said = f"{tensor.dtype} of shape {list(tensor.shape)}" + " in torch's symmetric memory" * (
                group is not None
            )
            own.control.require_equal(said, "register", own.timeout, abort_on_fault=True)
            try:
                arena = own.runtime.register(own.control, tensor, own.timeout, group, own.arena.no_multicast)
            except ResourceError as refusal:
                own.unregistered = str(refusal)
                raise
            self._handles += 1
            number = self._handles
            own.registered[number] = arena, tensor.detach()
            name = HandleName(own.name, number, own.rank)
            released = partial(own.registered.pop, number, None)
            return Symmetric(arena, name, tuple(tensor.shape), tensor.dtype, tensor, released)

    def launch(self, kernel: Any, grid: Any, *args: Any, **constexprs: Any) -> None:
        """As `Communicator.launch`."""
        group, launcher = self._group, self._launcher
        self._faults.check_usable()
        if not triton_adapter.is_kernel(kernel):
            raise InvalidArgument(f"launch: a plain @triton.jit kernel is needed, found {type(kernel).__name__}")
        device, limit = group.device, group.timeout
        run = group.runtime.prepare(kernel, grid, args, constexprs, device, limit, self._faults.check)
        launcher.captured |= group.gpu is not None and group.gpu.capturing()
        with launcher.held(), self._monitor.user_call(group.gpu):
            launcher.run(run)


def _unreachable(group: Group) -> str:
    """Why not every rank reaches every other one's memory."""
    return group.routes.no_memory or "not every rank reaches every other one's memory on these GPUs' links"


def _registrable(x: Any, device: torch.device) -> InvalidArgument | None:
    """Why a tensor cannot be registered, whatever its memory; None if it can."""
    try:
        arguments.check_tensor(x, device, "register")
    except InvalidArgument as error:
        return error
    if not x.is_contiguous() or not x.numel():
        return InvalidArgument(f"register: shape {tuple(x.shape)}: a contiguous tensor with elements is needed")
    if x.data_ptr() % _ALIGNMENT:
        return InvalidArgument(
            f"register: the tensor begins {x.data_ptr() % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}, at which "
            "kernels read: register the whole tensor of which it is a part"
        )
    return None
