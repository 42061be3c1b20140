"""The state of a rank's host code: random numbers, torch's modes, and the tracing of its accesses to shared memory.

Separate processes would each have a state of their own. Here a rank's state is installed while its host code runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.autograd import grad_mode
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tricomm.explorer.memory_model.regions import Array, Memory, Region


class Hosts:
    """Keeps each rank's state. `touched(rank, write, region, offsets, itemsize)`, if given, is called for each
    access."""

    def __init__(
        self,
        seed: int,
        world_size: int,
        memory: Memory,
        touched: Callable[[int, bool, Region, Array, int], None] | None = None,
    ) -> None:
        self._states = [_seeded(seed * 64 + rank) for rank in range(world_size)]
        self._modes: dict[int, list[Any]] = {}
        # by rank, while its host code does not run: sets the caller's inference mode, where the rank's differs
        self._inference: dict[int, Any] = {}
        self._memory, self._touched = memory, touched

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """A context manager that installs the state of a rank while its host code runs."""
        outside, modes, inference = _State(), _taken(), torch.is_inference_mode_enabled()
        if rank in self._inference:
            grad_mode._exit_inference_mode(self._inference.pop(rank))
        self._states[rank].put()
        _put_back(self._modes.get(rank, modes))
        try:
            if self._touched is None:
                yield
            else:
                with _Watch(rank, self._memory, self._touched):
                    yield
        finally:
            self._states[rank], self._modes[rank] = _State(), _taken()
            if torch.is_inference_mode_enabled() != inference:
                self._inference[rank] = grad_mode._enter_inference_mode(inference)
            outside.put()
            _put_back(modes)


def _taken() -> list[Any]:
    """Take torch's function modes off their stack and return them. Torch itself has taken off a mode whose handler
    runs."""
    modes = list(_get_current_function_mode_stack())
    for _ in modes:
        _pop_mode()
    return modes


def _put_back(modes: list[Any]) -> None:
    for mode in modes:
        _push_mode(mode)


class _State:
    """A copy of the present random number generators, grad mode, autocast and default dtype."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.grad, self.dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self.autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}

    def put(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype)
        for device, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _seeded(seed: int) -> _State:
    outside = _State()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return _State()
    finally:
        outside.put()


_NO_DATA = ("empty", "new_", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "is_same_size", "set_")


class _Watch(TorchDispatchMode):
    """A mode that reports every torch operation that reads or writes shared memory."""

    def __init__(self, rank: int, memory: Memory, touched: Callable[[int, bool, Region, Array, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self._memory, self._touched = rank, memory, touched

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, because torch would otherwise import its compiler at the first operation, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if not func.is_view and not name.startswith(_NO_DATA):
            for n, argument in enumerate(func._schema.arguments):
                value = args[n] if n < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                only_written = written and name.rstrip("_") in ("copy", "fill", "zero", "uniform", "normal", "random")
                for tensor in tree_leaves(value):
                    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                        continue  # not a tensor in shared memory
                    if tensor.device.type == "cpu" and tensor.numel():
                        self._tell(tensor, written, only_written)
        return func(*args, **kwargs)

    def _tell(self, tensor: torch.Tensor, written: bool, only_written: bool) -> None:
        address = tensor.data_ptr()
        region = self._memory.region(address, address + tensor.itemsize, [])
        if region is None or not region.shared:
            return
        offsets = np.zeros(1, np.int64)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = (offsets[:, None] + np.arange(length) * stride).reshape(-1)
        offsets = np.unique(offsets) * tensor.itemsize + (address - region.base)
        if not only_written:
            self._touched(self._rank, False, region, offsets, tensor.itemsize)
        if written:
            self._touched(self._rank, True, region, offsets, tensor.itemsize)
