"""Triton's interpreter, behind one door: everything here leans on private names, and nothing else in tricomm does.

`interpret(kernel, grid, args, constexprs)` runs the very kernel objects that the GPU compiles, with no environment
variable set and no effect on kernels elsewhere: Triton's language is patched for the length of a launch and restored
after it, from a list that is made once (making it anew for each launch would dominate a small call's time).

It also mends what the interpreter computes otherwise than a GPU: fp32 to bf16 is rounded to nearest even instead of
truncated, bf16 to fp32 is exact for every pattern, and 3.9's atomic load and store are atomic and ordered.

Interpreted kernels run one at a time in a process: the patches and the current block's index are global.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as _triton
from triton.runtime.jit import JITFunction

from tricomm.errors import CollectiveTimeout, InvalidArgument, TricommError
from tricomm.kernels.interrupts import Interrupts

SUPPORTED = ("3.6", "3.7", "3.8", "3.9")

_lock = threading.RLock()
_launches = 0
_plain: dict[Any, tuple[Callable[..., Any], int]] = {}
_substitutes: dict[Any, Callable[..., Any]] = {}
_patches: list[tuple[Any, str, Any, Any]] = []
_observers: list[Observer] = []
_MISSING = object()


def supported() -> str | None:
    """None where this Triton's interpreter is one that tricomm was tested on, else the reason why it is refused."""
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, so @triton.jit makes no kernels; unset it, tricomm interprets without it"
    if not triton.__version__.startswith(tuple(f"{v}." for v in SUPPORTED)):
        return f"Triton {triton.__version__} is not among the tested versions {', '.join(SUPPORTED)}"
    return None


class Observer(Protocol):
    """Sees every access of the kernels while it is installed by `observe`."""

    def __call__(self, kind: str, addresses: np.ndarray[Any, Any], itemsize: int) -> None:
        """`kind` is load, store or atomic; `addresses` (uint64) are those of the elements, without masked ones."""


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show every load, store and atomic of the kernels that run in this block to `observer`."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def substitute(function: Any, python: Callable[..., Any]) -> None:
    """Run `python` in place of the device function `function` under the interpreter."""
    _substitutes[function.fn] = python


def interpret(
    kernel: Any, grid: Sequence[int], args: Sequence[Any], constexprs: dict[str, Any], timeout: float = 600.0
) -> None:
    """Run `kernel` over `grid`, block after block, on CPU tensors.

    Raises `InvalidArgument` before any block has run for arguments that do not fit the kernel, and for a kernel that
    the interpreter cannot run; `CollectiveTimeout` where another thread of this process holds the interpreter for
    `timeout` seconds. Errors inside the kernel come out as they are, wrapped in nothing.
    """
    values = check(kernel, args, constexprs)
    interrupts = Interrupts()
    try:
        _take_lock(kernel, timeout, interrupts)
        try:
            _patch()
            with np.errstate(all="ignore"):
                interrupts.let_through()
                try:
                    _run(kernel, (*grid, 1, 1)[:3], values)
                finally:
                    interrupts.raising = False
        finally:
            _restore()
            _lock.release()
    finally:
        interrupts.over()


def check(kernel: Any, args: Sequence[Any], constexprs: dict[str, Any]) -> dict[str, Any]:
    """The kernel's arguments by name, as the interpreter wants them; raises `InvalidArgument` where they do not fit."""
    reason = supported()
    if reason is not None:
        raise InvalidArgument(f"the interpreter is not available: {reason}")
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    try:
        bound = inspect.signature(kernel.fn).bind(*args, **constexprs)
        bound.apply_defaults()
        values = {n: v if n in fixed else _triton._implicit_cvt(v) for n, v in bound.arguments.items()}
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"kernel {kernel.fn.__name__}: its arguments do not fit: {error}") from error
    strange = [
        n for n, v in values.items() if n not in fixed and v is not None and not isinstance(v, tl.tensor | tuple)
    ]
    if strange:
        raise InvalidArgument(f"kernel {kernel.fn.__name__}: tensors, numbers and tuples of them fit, not {strange}")
    return values


def _take_lock(kernel: Any, timeout: float, interrupts: Interrupts) -> None:
    end = time.monotonic() + timeout
    while not _lock.acquire(timeout=min(0.05, max(0.0, end - time.monotonic()))):
        interrupts.let_through()
        interrupts.raising = False
        if time.monotonic() >= end:
            raise CollectiveTimeout(
                f"kernel {kernel.fn.__name__} waited {timeout:g} s for the interpreter, which another thread of this "
                "process holds: interpreted kernels run one at a time, so two groups must be used in the same order "
                "on all ranks"
            )


def _run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
    global _launches
    _launches += 1
    function = _python(kernel)
    builder = _triton.interpreter_builder
    builder.set_grid_dim(*grid)
    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                builder.set_grid_idx(x, y, z)
                _call(kernel, function, values)


def _call(kernel: Any, function: Callable[..., Any], values: dict[str, Any]) -> None:
    try:
        function(**values)
    except TricommError:
        raise
    except NotImplementedError as error:
        raise InvalidArgument(f"kernel {kernel.fn.__name__} cannot run under the interpreter: {error}") from error


class _Rewriter(_triton.FunctionRewriter):  # type: ignore[misc]
    """Triton's rewriter, except that it leaves the module that a kernel lives in as it was."""

    def _compile_and_exec(self, tree: Any) -> Callable[..., Any]:
        home = _globals_of(self.fn)
        names: dict[str, Any] = {}
        exec(compile(tree, filename=self.filename, mode="exec"), home, names)
        made = names[self.fn.__name__]
        made.__defaults__, made.__kwdefaults__ = self.fn.__defaults__, self.fn.__kwdefaults__
        return made  # type: ignore[no-any-return]


def _globals_of(function: Any) -> dict[str, Any]:
    """What a rewritten function sees: its module, what it closes over, and the names that the rewriting uses."""
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    used = ("interpreter_semantic", "_InterpreterComparison")
    return {
        **function.__globals__,
        **{name: cell.cell_contents for name, cell in closure},
        **{name: getattr(_triton, name) for name in used if hasattr(_triton, name)},
    }


def _python(function: Any) -> Callable[..., Any]:
    """The plain Python function that stands for a jitted one under the interpreter."""
    source = function.fn  # not the JITFunction: its hash walks its sources, which are patched now
    if source in _substitutes:
        return _substitutes[source]
    made, launch = _plain.get(source, (None, -1))
    if made is None:
        made = _Rewriter(source).rewrite_ast()
    elif launch != _launches:  # the module may have changed since
        made.__globals__.update(_globals_of(source))
    _plain[source] = (made, _launches)
    return made


def _patch() -> None:
    if not _patches:
        _collect()
    for owner, name, _, new in _patches:
        setattr(owner, name, new)


def _restore() -> None:
    for owner, name, old, _ in reversed(_patches):
        if old is not _MISSING:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)


def _after_fork() -> None:
    """In a child: another thread of the parent may have been interpreting; here nobody is."""
    global _lock
    _lock = threading.RLock()
    _restore()


os.register_at_fork(after_in_child=_after_fork)


def _collect() -> None:
    """Let Triton patch its language once, note every change, and put all back."""
    probe = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope = _triton._patch_lang(probe)
    first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for owner, name, old in scope._changes:
        old = _MISSING if old is _triton._MISSING else old
        first.setdefault((id(owner), name), (owner, name, old))
    changes = [(owner, name, old, getattr(owner, name)) for owner, name, old in first.values()]
    scope.restore()
    builder = type(_triton.interpreter_builder)
    mended = {
        "cast_impl": _cast(builder.cast_impl),
        "create_fp_to_fp": _fp_to_fp(builder.create_fp_to_fp),
        "create_atomic_load": _atomic_load,
        "create_atomic_store": _atomic_store,
        "create_masked_load": _seen_load(builder.create_masked_load),
        "create_masked_store": _seen_store(builder.create_masked_store),
        "create_atomic_rmw": _seen_atomic(builder.create_atomic_rmw),
    }
    changes += [(builder, name, builder.__dict__.get(name, _MISSING), new) for name, new in mended.items()]
    changes = [c for c in changes if c[:2] != (tl.core.tensor, "__index__")]
    changes.append((tl.core.tensor, "__index__", tl.core.tensor.__dict__.get("__index__", _MISSING), _index))
    changes.append((JITFunction, "__call__", JITFunction.__dict__["__call__"], _call_device_function))
    _patches.extend(changes)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return _python(self)(*args, **kwargs)


def _index(self: Any) -> int:
    return int(self.handle.data.reshape(-1)[0])  # 3.6 asks numpy for a scalar of a 1-element array, which 2.x refuses


def round_to_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """fp32 array to bf16 bit patterns (uint16), to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _widen_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return _triton.TensorHandle(round_to_bf16(source.data), tl.bfloat16)
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return _triton.TensorHandle(_widen_bf16(source.data), tl.float32)
        return original(self, source, target)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if {source.dtype.scalar, target.scalar} == {tl.float32, tl.bfloat16}:
            return self.cast_impl(source, target)
        return original(self, source, target, rounding)

    return create_fp_to_fp


def _atomic_load(self: Any, pointer: Any, mask: Any, sem: Any, scope: Any) -> Any:
    zero = _triton.TensorHandle(
        np.zeros(pointer.data.shape, _triton._get_np_dtype(pointer.get_element_ty())), pointer.get_element_ty()
    )
    return self.create_atomic_rmw(_triton._ir.ATOMIC_OP.OR, pointer, zero, mask, sem, scope)


def _atomic_store(self: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    return self.create_atomic_rmw(_triton._ir.ATOMIC_OP.XCHG, pointer, value, mask, sem, scope)


def _show(kind: str, pointer: Any, mask: Any) -> None:
    element = pointer.get_element_ty()
    taken = np.broadcast_to(mask.data, pointer.data.shape)
    for observer in _observers:
        observer(kind, pointer.data[taken], max(1, element.primitive_bitwidth // 8))


def _seen_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_load(self: Any, pointer: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if _observers:
            _show("load", pointer, mask)
        return original(self, pointer, mask, *rest, **named)

    return create_masked_load


def _seen_store(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_store(self: Any, pointer: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if _observers:
            _show("store", pointer, mask)
        return original(self, pointer, value, mask, *rest, **named)

    return create_masked_store


def _seen_atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _observers:
            _show("atomic", pointer, mask)
        return original(self, op, pointer, value, mask, sem, scope)

    return create_atomic_rmw


def yield_to_others(spins: Any) -> None:
    """Give the core away while a poll finds nothing; longer the longer nothing comes, up to a millisecond."""
    count = int(spins)
    if count > 2:
        time.sleep(min(2e-5 * (1 << min(count - 2, 6)), 1e-3))
