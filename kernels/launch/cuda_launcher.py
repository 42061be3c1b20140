"""A prepared launch: fill in addresses and numbers, and call CUDA's driver.

Triton's own dispatch looks at every argument of every launch to choose a compiled kernel: tens of microseconds on the
host, more than a small collective takes on the GPU. Here a kernel is compiled and loaded once for a device, and a
launch packs 64-bit words into memory that the driver already has a pointer to.

Every argument of our kernels is one 64-bit word, or a tuple of them: addresses and int64 numbers, and fp32 numbers in
the lower half of one. Triton adds two
pointers to scratch memory at the end, which our kernels do not use.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
import triton

from tricomm.cuda_bindings import load_bindings
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.launch.compiler import Compile, compile_kernel, takes_counts, takes_data, takes_operands

_SCRATCH = 2
_WORD = (1 << 64) - 1
_MOST_STATIC_SHARED = 48 * 1024
_MOST_STREAMS = 64  # per kernel, for which prepared driver calls are kept
# CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE, _CONTEXT_IS_DESTROYED: errors of a launch in another device's context, or
# in a thread that has used no device yet.
_NOT_THIS_CONTEXT = (201, 400, 709)
_compiling = threading.Lock()
_compiled: dict[tuple[Any, ...], Any] = {}  # by variant
_loaded: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # by variant and device
_loading: dict[tuple[Any, ...], threading.Lock] = {}  # likewise


class Device(Protocol):
    """A GPU: `TorchDevice`, or a fake in tests and measurements."""

    capability: int

    @property
    def bindings(self) -> Any:
        """The module `cuda.bindings.driver`, or a fake."""

    @property
    def name(self) -> str:
        """Its name in messages; no two devices have the same."""

    @property
    def context(self) -> Any:
        """Its primary context, the one that torch uses."""

    def stream(self) -> int:
        """The handle of the current stream."""


class TorchDevice:
    """`device` as torch sees it, through `cuda.bindings`."""

    def __init__(self, device: torch.device) -> None:
        self.bindings: Any = load_bindings("driver")
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = 10 * major + minor
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self.stream: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, self._index)

    @property
    def name(self) -> str:
        return str(self._device)

    @cached_property
    def context(self) -> Any:
        """The primary context, retained for the life of the process, as torch does."""
        (device,) = _check(self, "cuDeviceGet", self.bindings.cuDeviceGet(self._index))
        (context,) = _check(self, "cuDevicePrimaryCtxRetain", self.bindings.cuDevicePrimaryCtxRetain(device))
        return context


@cache
def torch_device(device: torch.device) -> TorchDevice:
    return TorchDevice(device)


def make_launcher(
    kernel: Any,
    blocks: int,
    constexprs: dict[str, Any],
    bits: int | None,
    aligned: bool,
    more: Sequence[int | torch.Tensor],
    group: Sequence[Any],
    device: Device,
) -> Callable[..., None]:
    """`run(x, y, count, call, rows=())` launches `kernel` on the current stream of `device`. One thread at a time.

    `group` (`layout.group_argument`) and `more`, the last arguments, are the same in every launch. All others belong to
    one launch alone: the driver has copied them, also into a graph, when `run` returns.

    `run.repeat(count, facts)` returns `again(addresses, number, stream)`, which launches the call `number << 32 |
    facts` over `count` elements, with the addresses of x and y, on the current `stream`; all other arguments are those
    of this launcher. `run.with_operands(count, facts, operands)` returns the same for a kernel with an epilogue. Its
    `addresses` are those of x and y and of the tensors among `operands`; numbers among `operands` are fixed.

    Raises `ResourceError` if Triton cannot compile the kernel or the driver refuses it.
    """
    function, compiled = _load(kernel, constexprs, bits, aligned, device)
    data, uneven, operands = takes_data(kernel), takes_counts(kernel), takes_operands(kernel)
    # Per-launch words first: x, y, count, call, then row counts or operands.
    count_at, call_at = (2, 3) if data else (0, 0)
    own = call_at + 1 + (2 * constexprs["WORLD_SIZE"] if uneven else len(constexprs["OPERANDS"]) if operands else 0)
    fixed = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in (*group, *more)]
    words = (ctypes.c_uint64 * (own + len(fixed) + _SCRATCH))()
    words[own : own + len(fixed)] = fixed
    before, after = 2 if data else 0, own + len(group)  # places of the group's parameters: after the two tensors
    order = (*range(before), *range(own, after), *range(before, own), *range(after, len(words)))
    first = ctypes.addressof(words)
    pointers = (ctypes.c_void_p * len(words))(*(first + 8 * place for place in order))
    word = memoryview(words).cast("B").cast("Q")  # writes one word faster than struct or ctypes
    bindings, current, used = device.bindings, device.stream, None
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    dependent = constexprs.get("DEPENDENT", False)

    @lru_cache(_MOST_STREAMS)
    def on(raw: int) -> Callable[[], Any]:
        shape = (blocks, 1, 1, threads, 1, 1, shared)
        return driver_call(bindings, function, shape, raw, ctypes.addressof(pointers), dependent)

    launch = on(0)

    def run(x: torch.Tensor, y: torch.Tensor, count: int, call: int, rows: tuple[tuple[int, ...], ...] = ()) -> None:
        if data:
            word[0] = address = x.data_ptr()
            word[1] = address if y is x else y.data_ptr()
            word[count_at] = count
            if uneven:
                words[call_at + 1 : own] = [*rows[0], *rows[1]]
            elif operands:
                words[call_at + 1 : own] = [_word(value) for value in rows[0]]
        word[call_at] = call
        if (raw := current()) != used:
            follow(raw)
        (result,) = launch()
        if result != 0:
            refused(result)

    def follow(raw: int) -> None:
        nonlocal launch, used
        launch, used = on(raw), raw

    def refused(result: Any) -> None:
        if int(result) in _NOT_THIS_CONTEXT:
            with _current(device):
                (result,) = launch()
        _check(device, "cuLaunchKernelEx" if dependent else "cuLaunchKernel", (result,))

    def repeat(count: int, facts: int) -> Callable[[Sequence[int], int, int], None]:
        half = memoryview(words).cast("B").cast("I")  # little endian, as on every host of a GPU
        word[count_at], half[2 * call_at], number_at = count, facts, 2 * call_at + 1

        def again(addresses: Sequence[int], number: int, stream: int) -> None:
            word[0], word[1] = addresses
            half[number_at] = number
            if stream != used:
                follow(stream)
            (result,) = launch()
            if result != 0:
                refused(result)

        return again

    def with_operands(count: int, facts: int, operands: Sequence[Any]) -> Callable[[Sequence[int], int, int], None]:
        half = memoryview(words).cast("B").cast("I")
        word[count_at], half[2 * call_at], number_at = count, facts, 2 * call_at + 1
        places = [0, 1]
        for place, value in enumerate(operands, call_at + 1):
            if isinstance(value, torch.Tensor):
                places.append(place)
            else:
                words[place] = _word(value)

        def again(addresses: Sequence[int], number: int, stream: int) -> None:
            for place, address in zip(places, addresses, strict=True):
                word[place] = address
            half[number_at] = number
            if stream != used:
                follow(stream)
            (result,) = launch()
            if result != 0:
                refused(result)

        return again

    run.tables = more  # type: ignore[attr-defined]  # they live as long as what is launched with them
    run.repeat = repeat  # type: ignore[attr-defined]
    run.with_operands = with_operands  # type: ignore[attr-defined]
    return run


def driver_call(
    bindings: Any, function: Any, shape: tuple[int, ...], stream: int, parameters: int, dependent: bool
) -> Callable[[], Any]:
    """A function that calls the driver to launch `function` on `stream`, with its arguments built in advance.

    `shape`: grid and block (three numbers each) and bytes of dynamic shared memory. `dependent`: the kernel may begin
    before the one before it has ended, and waits for that end itself (programmatic dependent launch).
    """
    if not dependent:
        return partial(bindings.cuLaunchKernel, function, *shape, bindings.CUstream(stream), parameters, 0)
    attribute, config = bindings.CUlaunchAttribute(), bindings.CUlaunchConfig()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ, *block, config.sharedMemBytes = shape
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.hStream, config.attrs, config.numAttrs = bindings.CUstream(stream), [attribute], 1
    return partial(bindings.cuLaunchKernelEx, config, function, parameters, 0)


def _word(value: Any) -> int:
    """An operand of an epilogue as 64 bits: a tensor's address, a whole number, or an fp32 number in the lower half."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value & _WORD if isinstance(value, int) else int.from_bytes(struct.pack("<f", value), "little")


def _load(kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, device: Device) -> Any:
    """The driver's function and Triton's compiled kernel, loaded once per process.

    Devices of one architecture share a compiled kernel. Loading may wait for all work on the device, and that work may
    wait for a rank on another thread. So no lock is held here that another kernel, another device or a loaded kernel
    needs.
    """
    variant = (kernel, constexprs, bits, aligned, device.capability)
    place = (*_variant(*variant), device.name)
    found = _loaded.get(place)
    if found is None:
        compiled = code_of(*variant, compile_kernel)
        with _loading.setdefault(place, threading.Lock()):
            found = _loaded.get(place)
            if found is None:
                try:
                    function = _function(compiled, kernel.fn.__name__, device)
                except ResourceError as error:
                    compiled = _instead_of(compiled, str(error), *variant)
                    if compiled is None:
                        raise
                    function = _function(compiled, kernel.fn.__name__, device)
                found = _loaded[place] = function, compiled
    return found


def code_of(
    kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, capability: int, by: Compile
) -> Any:
    """The compiled form of a kernel, which all later launches of it in this process use.

    Made by calling `by` if the process has none. Raises `ResourceError` if that fails, `InvalidArgument` if Triton
    cannot compile a user's function of rows.
    """
    variant = _variant(kernel, constexprs, bits, aligned, capability)
    if variant not in _compiled:
        with _compiling:
            if variant not in _compiled:
                _compiled[variant] = _compile(by, kernel, constexprs, bits, aligned, capability)
    return _compiled[variant]


def _variant(kernel: Any, constexprs: dict[str, Any], *more: Any) -> tuple[Any, ...]:
    return kernel, tuple(sorted(constexprs.items())), *more


def _instead_of(refused: Any, error: str, *variant: Any) -> Any:
    """The compiled form that replaces prebuilt code that a driver refuses; None if `refused` was compiled here."""
    instead = getattr(refused, "instead", None)
    if instead is None:
        return None
    place = _variant(*variant)
    with _compiling:
        if _compiled.get(place, refused) is refused:  # not yet replaced for another device
            _compiled.pop(place, None)  # even if compiling fails
            _compiled[place] = _compile(partial(instead, error), *variant)
        return _compiled[place]


def _compile(by: Compile, kernel: Any, *variant: Any) -> Any:
    try:
        return by(kernel, *variant)
    except ResourceError:
        raise
    except Exception as error:  # whatever a compiler may raise
        inner: BaseException = error
        while isinstance(inner.__cause__, triton.CompilationError):  # the error in a function that the kernel calls
            inner = inner.__cause__
        text = f"Triton cannot compile {kernel.fn.__name__} for sm_{variant[-1]}: {type(inner).__name__}: {inner}"
        if takes_operands(kernel) and isinstance(error, triton.CompilationError):  # a user's function, on all ranks
            raise InvalidArgument(text) from error
        raise ResourceError(text) from error


def _function(compiled: Any, name: str, device: Device) -> Any:
    metadata, bindings = compiled.metadata, device.bindings
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ResourceError(f"{name}: Triton wants scratch memory (a profiler's?), which this launch does not give")
    symbol = metadata.name.encode()
    with _current(device):
        (module,) = _check(device, "cuModuleLoadData", bindings.cuModuleLoadData(compiled.asm["cubin"]))
        (function,) = _check(device, "cuModuleGetFunction", bindings.cuModuleGetFunction(module, symbol))
        if metadata.shared > _MOST_STATIC_SHARED:
            most = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(device, "cuFuncSetAttribute", bindings.cuFuncSetAttribute(function, most, metadata.shared))
        # Load it now, because at the first launch a peer's kernel may be running.
        try:
            answer = bindings.cuFuncLoad(function)
        except (AttributeError, RuntimeError):  # a driver before CUDA 12.4, where cuModuleGetFunction has loaded it
            return function
        _check(device, "cuFuncLoad", answer)
    return function


@contextmanager
def _current(device: Device) -> Iterator[None]:
    """A context manager: the device's context is this thread's current one inside, and the previous one again
    afterwards.

    Not `torch.cuda.set_device`: in a thread that has used no device yet, device 0 counts as the current one already,
    and no context is made current.
    """
    _check(device, "cuCtxPushCurrent", device.bindings.cuCtxPushCurrent(device.context))
    try:
        yield
    finally:
        device.bindings.cuCtxPopCurrent()


def _check(device: Device, call: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    result, *values = answer
    if result != 0:
        name = getattr(result, "name", str(result))
        raise ResourceError(
            f"{call} on {device.name} failed: {name}; an earlier kernel may have failed, look above and at dmesg"
        )
    return tuple(values)
