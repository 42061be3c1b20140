"""Tensors of device "cuda" in a program's code, and the functions of `torch.cuda` about devices.

The memory is the CPU's: a device "cuda" in an argument is replaced, and a tensor says that it is on the rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only

from tricomm.explorer.compiled.compiled_runtime import PROCESSORS
from tricomm.explorer.standins.host import ProgramHost

_CPU = torch.device("cpu")
_TENSOR: Any = torch.Tensor
_DEVICE, _IS_CUDA = _TENSOR.device.__get__, _TENSOR.is_cuda.__get__
_MEMORY = 80 << 30


class CudaOnCpu(TorchFunctionMode):
    """Replaces device "cuda" by the CPU in the calls of a program's code."""

    def __init__(self, current: Callable[[], ProgramHost | None]) -> None:
        super().__init__()
        self._current = current

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, host = kwargs or {}, self._current()
        if host is None:
            return func(*args, **kwargs)
        if func is torch.device:
            return torch.device("cuda", args[0]) if args and isinstance(args[0], int) else func(*args, **kwargs)
        if func == _DEVICE:
            return torch.device("cuda", host.rank)
        if func == _IS_CUDA:
            return True
        name = getattr(func, "__name__", "")
        if name == "cuda" or name == "pin_memory" or name == "to" and len(args) > 1 and isinstance(args[1], int):
            return args[0]
        if name == "get_device":
            return host.rank
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": _CPU}
        if name == "record_stream":
            return None
        to_host = name == "cpu" or name == "to" and any(_device(v) == _CPU for v in (*args[1:2], kwargs.get("device")))
        if to_host:
            return args[0].clone()
        return func(*_on_cpu(args), **_on_cpu(kwargs))


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return torch.device(value) if isinstance(value, str) and value.startswith(("cpu", "cuda")) else None


def _on_cpu(values: Any) -> Any:
    return tree_map_only((torch.device, str), lambda v: _CPU if _device(v) is not None else v, values)


def _properties(host: ProgramHost) -> Any:
    major, minor = divmod(host.architecture, 10)
    processors = PROCESSORS.get(host.architecture, 132)
    return SimpleNamespace(
        name=_name(host), major=major, minor=minor, multi_processor_count=processors, total_memory=_MEMORY
    )


def _name(host: ProgramHost) -> str:
    return f"simulated sm_{host.architecture}"


_ANSWERS: dict[str, Callable[[ProgramHost], Any]] = {
    "is_available": lambda host: True,
    "is_initialized": lambda host: True,
    "device_count": lambda host: host.world_size,
    "current_device": lambda host: host.rank,
    "get_device_name": _name,
    "get_device_capability": lambda host: divmod(host.architecture, 10),
    "get_device_properties": _properties,
    "device": lambda host: nullcontext(),
    **dict.fromkeys(("set_device", "init", "empty_cache", "manual_seed", "manual_seed_all"), lambda host: None),
}


def patches() -> Mapping[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]]:
    """`torch.cuda`'s functions about devices: each rank has one GPU."""
    table: dict[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]] = {
        (torch.cuda, name): _answering(answer) for name, answer in _ANSWERS.items()
    }
    table[torch.cuda.nccl, "version"] = _answering(lambda host: (0, 0, 0))  # torch notes it in the log of an error
    table[DeviceContext, "__init__"] = lambda host: lambda self, device: setattr(self, "device", _CPU)
    table[torch, "set_default_device"] = _answering(lambda host: None)
    return table


def _answering(answer: Callable[[ProgramHost], Any]) -> Callable[[ProgramHost], Callable[..., Any]]:
    return lambda host: lambda *args, **kwargs: answer(host)
