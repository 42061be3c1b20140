"""Stand-ins for tensors of device "cuda" in a program's code, and for the functions of `torch.cuda` about devices.

The memory is the CPU's: a device "cuda" in an argument is replaced, and a tensor says that it is on the rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.compiled_runtime import PROCESSORS
from tricomm.explorer.memory_model.regions import tensors_in
from tricomm.explorer.standins.host import ProgramHost

_CPU = torch.device("cpu")
_TENSOR: Any = torch.Tensor
_MEMORY = 80 << 30


class CudaOnCpu(TorchFunctionMode):
    """Replaces device "cuda" by the CPU in the calls of a program's code. Tracks which tensors are meant to be on the
    CPU: those that were made or moved there, and those that are computed from such tensors only."""

    def __init__(self, current: Callable[[], ProgramHost | None]) -> None:
        super().__init__()
        self._current = current
        for key in [key for key, (storage, _) in _on_host.items() if storage.expired()]:
            del _on_host[key]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, host = dict(kwargs or {}), self._current()
        if host is None:
            return func(*args, **kwargs)
        if func is torch.device:
            return torch.device("cuda", args[0]) if args and isinstance(args[0], int) else func(*args, **kwargs)
        if func is torch.Tensor.data_ptr:
            address = func(*args, **kwargs)
            if not on_host(args[0]) or is_pinned(args[0]):
                host.addressed[address] = args[0]
            return address
        if func in _ASKED and args[0].device == _CPU:
            return _ASKED[func](args[0], host.rank)
        name = getattr(func, "__name__", "")
        if name == "record_stream":
            return None
        pinned = name == "pin_memory" or bool(kwargs.pop("pin_memory", False))
        device = _CPU if pinned else _wanted(name, args, kwargs)
        if name in ("cuda", "pin_memory"):
            func, args, kwargs = torch.Tensor.to, (args[0], _CPU), {}
        elif name == "to" and isinstance(args[-1], int):
            args = (args[0], _CPU)
        elif name == "tolist":
            args = (args[0].clone(),)  # a clone, because its read of memory is not traced
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _CPU
        given = tensors_in((args, kwargs))
        return _placed(func(*_on_cpu(args), **_on_cpu(kwargs)), given, device, pinned, host)


# By storage, the tensors that are meant to be on the CPU: a weak reference, and True if they are pinned.
_on_host: dict[int, tuple[StorageWeakRef, bool]] = {}


def on_host(tensor: torch.Tensor) -> bool:
    """True for a tensor that is meant to be on the CPU."""
    return _strided(tensor) and _key(tensor) in _on_host


def is_pinned(tensor: torch.Tensor) -> bool:
    return on_host(tensor) and _on_host[_key(tensor)][1]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, on the same device."""
    made = tensor.clone()
    if on_host(tensor):
        _on_host[_key(made)] = StorageWeakRef(made.untyped_storage()), is_pinned(tensor)
    return made


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.device == _CPU and tensor.layout == torch.strided


_ASKED: dict[Any, Callable[[torch.Tensor, int], Any]] = {
    _TENSOR.device.__get__: lambda t, rank: _CPU if on_host(t) else torch.device("cuda", rank),
    _TENSOR.is_cuda.__get__: lambda t, rank: not on_host(t),
    _TENSOR.is_cpu.__get__: lambda t, rank: on_host(t),
    torch.Tensor.get_device: lambda t, rank: -1 if on_host(t) else rank,
    torch.Tensor.is_pinned: lambda t, rank: is_pinned(t),
}


def _wanted(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call asks for."""
    if name in ("cuda", "cpu"):
        return torch.device(name)
    asked = args[1] if name == "to" and len(args) > 1 else kwargs.get("device")
    if isinstance(asked, torch.Tensor):
        return _CPU if on_host(asked) else torch.device("cuda")
    return torch.device("cuda") if isinstance(asked, int) else _device(asked)


def _placed(result: Any, given: list[torch.Tensor], device: torch.device | None, pinned: bool, host: Any) -> Any:
    """The result of a call with the tensors `given`, placed on `device`. None: on their device, or on the default
    one."""
    before = {_key(t): on_host(t) for t in given if _strided(t)}
    if device is None:
        here = all(before.values()) if given else (_device(host.default_device) or _CPU) == _CPU
    else:
        here = device == _CPU
    if isinstance(result, torch.Tensor) and device is not None and _strided(result):
        if before.get(_key(result), here) != here or pinned and not is_pinned(result):
            result = result.clone()
    for tensor in tensors_in(result) if here else ():
        if _strided(tensor) and _key(tensor) not in before:
            _on_host[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), pinned
    return result


def _device(value: Any) -> torch.device | None:
    """The CPU or a GPU that an argument names."""
    if isinstance(value, torch.device):
        return value if value.type in ("cpu", "cuda") else None
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
    "mem_get_info": lambda host: (_MEMORY, _MEMORY),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda host: 0),
    **dict.fromkeys(("set_device", "init", "empty_cache", "manual_seed", "manual_seed_all"), lambda host: None),
    "reset_peak_memory_stats": lambda host: None,
    # Events and streams of an interpreted program. For a compiled one, see `torch_cuda`.
    **dict.fromkeys(("current_stream", "default_stream"), lambda host: OneStream()),
    "Event": lambda host: InOrder(),
    "synchronize": lambda host: host.comm.synchronize(),
    "is_current_stream_capturing": lambda host: False,
}
_ONLY_COMPILED = ("Stream", "set_stream", "CUDAGraph", "graph")


class InOrder:
    """As `torch.cuda.Event`, for kernels that end before their launch returns."""

    stands_for = "Event"

    def record(self, stream: Any = None) -> None: ...

    wait = wait_event = wait_stream = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: InOrder) -> float:
        return 0.0


class OneStream(InOrder):
    """As `torch.cuda.Stream`: the only stream of an interpreted program."""

    stands_for, cuda_stream = "Stream", 0

    def record_event(self, event: InOrder | None = None) -> InOrder:
        return event or InOrder()

    def __enter__(self) -> OneStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneStream)

    def __hash__(self) -> int:
        return hash(OneStream)


def patches() -> Mapping[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]]:
    """Patches of `torch.cuda`'s functions about devices. Each rank has one GPU."""
    table: dict[tuple[Any, str], Callable[[ProgramHost], Callable[..., Any]]] = {
        (torch.cuda, name): _answering(answer) for name, answer in _ANSWERS.items()
    }
    table[torch.cuda.nccl, "version"] = _answering(lambda host: (0, 0, 0))  # torch writes it into the log of an error
    table |= {(torch.cuda, name): _only_compiled(name) for name in _ONLY_COMPILED}
    table[torch.cuda, "stream"] = lambda host: lambda stream: nullcontext() if stream is None else stream
    table |= {(torch.cuda.nvtx, name): _answering(lambda host: 0) for name in ("range_push", "range_pop", "mark")}
    table[torch, "set_default_device"] = lambda host: partial(setattr, host, "default_device")
    table[torch, "Generator"] = lambda host: lambda device=None: _GENERATOR()
    table[torch, "from_numpy"] = lambda host: _from_numpy
    table[type(triton.runtime.driver), "active"] = lambda host: lambda config: _Driver(host)
    return table


_GENERATOR, _FROM_NUMPY = torch.Generator, torch.from_numpy


def _from_numpy(array: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        tensor = _FROM_NUMPY(array)
        _on_host[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), False
    return tensor


def _only_compiled(name: str) -> Callable[[ProgramHost], Callable[..., Any]]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidArgument(
            f"torch.cuda.{name}: an interpreted program has one stream; compiled (--compiled sm_90) it has several"
        )

    return lambda host: refuse


class _Driver:
    """As Triton's active driver, with the functions about the device."""

    def __init__(self, host: ProgramHost) -> None:
        self._host = host
        properties = {"multiprocessor_count": _properties(host).multi_processor_count, "warpSize": 32}
        properties |= {"max_shared_mem": 232448, "max_num_regs": 65536, "mem_clock_rate": 0, "mem_bus_width": 0}
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(properties))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._host.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self._host.rank)

    def get_current_device(self) -> int:
        return self._host.rank

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._host.architecture, 10)

    def get_current_stream(self, device: int = 0) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def get_device_interface(self) -> Any:
        return torch.cuda


def _answering(answer: Callable[[ProgramHost], Any]) -> Callable[[ProgramHost], Callable[..., Any]]:
    return lambda host: lambda *args, **kwargs: answer(host)
