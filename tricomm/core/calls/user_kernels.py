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
        """Memory of `shape` and `dtype` on every rank that every peer can reach. Collective; the same on all ranks.

        `multicast`: with a multicast address, if that is possible and this communicator's own memory has one;
        `Symmetric.no_multicast` says why not.

        Raises `InvalidArgument` on all ranks if an argument is bad or differs between ranks (the group stays usable),
        `ResourceError` if memory is refused anywhere.
        """
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
        """A handle on every rank's own `tensor`, which collectives then read and write in place.

        Collective: a contiguous tensor of the same shape and dtype on all ranks, at an address that is a multiple of 16
        bytes. On GPUs CUDA has to be able to share its memory: that of torch's expandable segments or symmetric memory
        by descriptors, that of torch's usual segments by legacy CUDA IPC. With `group`, a process group of the same
        ranks, it has to be torch's symmetric memory; torch's own mappings are used, including its multicast address if
        all ranks have one (`Symmetric.no_multicast` says why not). On a CPU it has to lie in torch's shared memory
        (`share_memory_()`). The tensor is kept until `handle.close()` (by all ranks) or the communicator's end, and
        peers can reach all of the memory that was allocated together with it.

        Raises on all ranks, with the group usable: `InvalidArgument` if one gives a tensor that cannot be registered,
        if they differ, or if they lie at different offsets of torch's memory; `ResourceError` for memory that cannot be
        shared. Such a tensor can still be passed itself, and is then staged; `explain` says why.
        """
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
        """Run a user's `@triton.jit` kernel on the device of this communicator's tensors.

        Positional arguments are runtime values (tensors, tuples of tensors, numbers), keywords constexprs and launch
        options. `grid` is a number, a tuple of up to three, or a function of the constexprs. On a CPU the kernel is
        interpreted and has run on return; when a peer is gone or the time is up, it is ended wherever it is, and this
        call raises the fault. On a GPU the next call or `synchronize()` raises it, and only waits that use `primitives`
        end: a kernel that polls by its own loads runs until its process ends.

        Raises `InvalidArgument` before anything runs for a kernel, grid or arguments that do not fit.
        """
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
