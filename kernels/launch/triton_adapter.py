"""The code that depends on private names of Triton's interpreter; more is in `triton_shortcuts` and `interpreted_wide`.

The language is patched from a list that is made once (`patch`, `restore`), because a new one for each launch would
dominate a small call's time. Kernels become plain Python (`python`), and every access of a kernel calls `_accessed`,
which shows it to observers or leaves it to a director, which decides when it happens.

It also corrects results that differ from a GPU's: fp32 to bf16 is rounded to nearest even instead of truncated; bf16 to
fp32 is exact for every pattern; arithmetic gives one NaN; -0 is less than +0 for minimum and maximum; 3.9's atomic
load, store and poll are atomic and ordered.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as _triton
from triton.runtime.jit import JITFunction

from tricomm.kernels.launch import triton_shortcuts
from tricomm.kernels.launch.memory_access import Access, Array, Director, Observer, perform_at_once
from tricomm.kernels.launch.numpy_rounding import canonical, maximum, minimum, round_to_bf16, widen_bf16

# With TRITON_INTERPRET set, @triton.jit returns these for users' kernels, for ours, and for functions of tl.
_JITTED = (JITFunction, *([_triton.InterpretedFunction] if hasattr(_triton, "InterpretedFunction") else []))

director: Director | None = None
give_way: Callable[[], bool] | None = None  # set by the interpreter: lets another thread's kernel run
interrupt: Callable[[], None] | None = None  # set by the interpreter: an error that it raises ends the running kernel
observers: list[Observer] = []
substitutes: dict[Any, Callable[..., Any]] = {}
patches: list[tuple[Any, str, Any, Any]] = []
_launches = 0
_plain: dict[Any, tuple[Callable[..., Any], int]] = {}
_compilable: dict[Any, JITFunction[Any]] = {}
_MISSING = object()

# Methods that are hooked or corrected. The builder of every supported version has them, unless named in _LATER.
_SEMANTICS = {"RELAXED": "relaxed", "ACQUIRE": "acquire", "RELEASE": "release", "ACQUIRE_RELEASE": "acq_rel"}
_SCOPES = {"CTA": "cta", "GPU": "gpu", "SYSTEM": "sys"}
_HOOKED = (
    "cast_impl", "create_fp_to_fp", "create_masked_load", "create_masked_store", "create_atomic_rmw",
    "create_atomic_cas", "create_atomic_load", "create_atomic_store", "create_atomic_poll", "create_barrier",
    "create_minimumf", "create_maximumf", "create_fadd", "create_fsub", "create_fmul", "create_fdiv",
    "create_precise_divf",
)  # fmt: skip
_LATER = {"create_atomic_load": "3.9", "create_atomic_store": "3.9", "create_atomic_poll": "3.9"}
_RELATIONS = {
    "EQ": "==",
    "OEQ": "==",
    "UEQ": "==",
    "NE": "!=",
    "ONE": "!=",
    "UNE": "!=",
    **{sign + n: symbol for n, symbol in (("LT", "<"), ("LE", "<="), ("GT", ">"), ("GE", ">=")) for sign in "SUO"},
}


def missing_hooks() -> list[str]:
    """Private names of Triton's interpreter that tricomm relies on and that this Triton does not have."""
    module = (
        "interpreter_builder",
        "_interpreter",
        "FunctionRewriter",
        "InterpretedFunction",
        "TensorHandle",
        "_implicit_cvt",
        "_patch_lang",
        "_get_np_dtype",
    )
    builder = type(_triton.interpreter_builder)
    due = [n for n in _HOOKED if triton.__version__[:3] >= _LATER.get(n, "")]
    due += ["set_grid_idx", "set_grid_dim", "create_icmpEQ", "create_icmpNE", "create_fcmpUNE", "create_and"]
    return [n for n in module if not hasattr(_triton, n)] + [n for n in due if not hasattr(builder, n)]


def is_kernel(value: Any) -> bool:
    """True for a function of @triton.jit, without further decorators."""
    return isinstance(value, _JITTED)


def parameters(kernel: Any) -> list[Any]:
    """Triton's description of each parameter of a kernel: name, number, whether it is a constexpr."""
    if not isinstance(kernel, JITFunction):
        kernel = _compilable.setdefault(kernel.fn, JITFunction(kernel.fn))
    return list(kernel.params)


def interpreted() -> bool:
    """True if Triton was imported under TRITON_INTERPRET, or sees it now: then it compiles nothing in this process."""
    return bool(triton.knobs.runtime.interpret) or not isinstance(tl.sum, JITFunction)


def implicit(value: Any) -> Any:
    """A kernel's runtime argument in the interpreter's form; TypeError, ValueError or KeyError if it has none."""
    return _triton._implicit_cvt(value)


def select(grid: tuple[int, int, int], index: tuple[int, int, int]) -> None:
    """Make `tl.program_id` return `index`, of a launch over `grid`."""
    _triton.interpreter_builder.set_grid_dim(*grid)
    _triton.interpreter_builder.set_grid_idx(*index)


def refresh() -> None:
    """Read the modules of kernels again, because they may have changed."""
    global _launches
    _launches += 1


class _Rewriter(getattr(_triton, "FunctionRewriter", object)):  # type: ignore[misc]
    """Triton's rewriter, except that it leaves a kernel's module unchanged."""

    def _compile_and_exec(self, tree: Any) -> Callable[..., Any]:
        home = _globals_of(self.fn)
        names: dict[str, Any] = {}
        exec(compile(tree, filename=self.filename, mode="exec"), home, names)
        made = names[self.fn.__name__]
        made.__defaults__, made.__kwdefaults__ = self.fn.__defaults__, self.fn.__kwdefaults__
        return made  # type: ignore[no-any-return]


def _globals_of(function: Any) -> dict[str, Any]:
    """Globals of a rewritten function: its module, its closure, and the names that the rewriting uses."""
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    used = ("interpreter_semantic", "_InterpreterComparison")
    return {
        **function.__globals__,
        **{name: cell.cell_contents for name, cell in closure},
        **{name: getattr(_triton, name) for name in used if hasattr(_triton, name)},
    }


def python(function: Any) -> Callable[..., Any]:
    """The plain Python function that stands for a jitted one under the interpreter."""
    source = function.fn  # not the JITFunction: its hash walks its sources, which are patched now
    if source in substitutes:
        return substitutes[source]
    made, launch = _plain.get(source, (None, -1))
    if made is None:
        made = _Rewriter(source).rewrite_ast()
    elif launch != _launches:  # the module may have changed since
        made.__globals__.update(_globals_of(source))
    _plain[source] = (made, _launches)
    return made


def patch() -> None:
    if not patches:
        _collect()
    for owner, name, _, new in patches:
        setattr(owner, name, new)


def restore() -> None:
    for owner, name, old, _ in reversed(patches):
        if old is not _MISSING:
            setattr(owner, name, old)
        elif name in vars(owner):
            delattr(owner, name)


def _collect() -> None:
    """Let Triton patch its language once, record every change, and undo all."""
    probe = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope: Any = None
    try:  # an interrupt must not leave the language patched
        scope = _triton._patch_lang(probe)
        first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, old in scope._changes:
            old = _MISSING if old is _triton._MISSING else old
            first.setdefault((id(owner), name), (owner, name, old))
        changes = [
            (owner, name, old, triton_shortcuts.direct(getattr(owner, name))) for owner, name, old in first.values()
        ]
        changes.append((tl.core.tensor, "__bool__", _MISSING, _decided(tl.core.tensor.__bool__)))
        scope.restore()
    except BaseException:
        if scope is not None:
            scope.restore()
        raise
    builder = type(_triton.interpreter_builder)
    mended = {
        "cast_impl": _cast(builder.cast_impl),
        "create_fp_to_fp": _fp_to_fp(builder.create_fp_to_fp),
        "create_masked_load": _load(builder.create_masked_load),
        "create_masked_store": _store(builder.create_masked_store),
        "create_atomic_rmw": _rmw(builder.create_atomic_rmw, "rmw"),
        "create_atomic_cas": _cas(builder.create_atomic_cas),
        "create_atomic_load": _atomic_load(_rmw(builder.create_atomic_rmw, "load")),
        "create_atomic_store": _atomic_store(_rmw(builder.create_atomic_rmw, "store")),
        "create_atomic_poll": _atomic_poll,
        "create_barrier": _barrier,
        "create_minimumf": lambda self, left, right: self.binary_op(left, right, minimum),
        "create_maximumf": lambda self, left, right: self.binary_op(left, right, maximum),
    }
    for name in ("create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_precise_divf"):
        mended[name] = _arithmetic(getattr(builder, name))
    for prefix in ("create_icmp", "create_fcmp"):
        for name, symbol in _RELATIONS.items():
            if hasattr(builder, prefix + name):
                mended[prefix + name] = _compare(getattr(builder, prefix + name), symbol)
    mended["create_and"] = _compare(builder.create_and, "&")
    changes += [(builder, name, builder.__dict__.get(name, _MISSING), new) for name, new in mended.items()]
    changes = [c for c in changes if c[:2] != (tl.core.tensor, "__index__")]
    changes.append((tl.core.tensor, "__index__", tl.core.tensor.__dict__.get("__index__", _MISSING), _index))
    changes += [(kind, "__call__", kind.__dict__["__call__"], _call_device_function) for kind in _JITTED]
    changes += triton_shortcuts.changes()
    patches.extend(changes)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return python(self)(*args, **kwargs)


def _index(self: Any) -> int:
    return int(self.handle.data.reshape(-1)[0])  # 3.6 converts a 1-element array to a scalar, which numpy 2 refuses


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return _triton.TensorHandle(round_to_bf16(source.data), tl.bfloat16)
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return _triton.TensorHandle(widen_bf16(source.data), tl.float32)
        return original(self, source, target)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if {source.dtype.scalar, target.scalar} == {tl.float32, tl.bfloat16}:
            return self.cast_impl(source, target)
        return original(self, source, target, rounding)

    return create_fp_to_fp


def _arithmetic(original: Callable[..., Any]) -> Callable[..., Any]:
    def arithmetic(self: Any, left: Any, right: Any) -> Any:
        result = original(self, left, right)
        result.data = canonical(result.data)
        return result

    return arithmetic


def _taken(pointer: Any, mask: Any) -> Array:
    return np.broadcast_to(mask.data, pointer.data.shape)


def _accessed(
    kind: str, pointer: Any, mask: Any, sem: Any, scope: Any, original: Callable[[Any], Any], volatile: bool = False,
    op: str = "",
) -> Any:  # fmt: skip
    """Perform an access by `original(mask)`, through the director if there is one. Returns its TensorHandle."""
    taken, done = _taken(pointer, mask), []

    def perform(lanes: Array | None) -> Array | None:
        some = mask
        if lanes is not None:
            some = _triton.TensorHandle(np.zeros(pointer.data.shape, bool), tl.int1)
            some.data[taken] = lanes
        done.append(original(some))
        return None if kind == "store" else done[-1].data[taken]

    itemsize = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    sem = ("relaxed" if volatile else None) if sem is None else _SEMANTICS[sem.name]
    scope = ("sys" if volatile else None) if scope is None else _SCOPES[scope.name]
    access = Access(kind, taken, pointer.data[taken], itemsize, sem, scope, perform, op)
    if director is not None:
        director.access(access)
    else:
        perform_at_once(access, observers)
    return done[-1] if done else None


def _decided(original: Callable[..., bool]) -> Callable[..., bool]:
    """Call `interrupt` at each branch and loop iteration, because a loop that waits for a peer may never end."""

    def decided(self: Any) -> bool:
        if interrupt is not None:
            interrupt()
        return original(self)

    return decided


def _unobserved() -> bool:
    if interrupt is not None:
        interrupt()
    return director is None and not observers


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_load(self: Any, pointer: Any, mask: Any, other: Any = None, *rest: Any, **named: Any) -> Any:
        if _unobserved():
            return original(self, pointer, mask, other, *rest, **named)
        volatile = bool(named.get("is_volatile", rest[-1] if rest else False))  # the last one, in every version
        return _accessed(
            "load", pointer, mask, None, None, lambda m: original(self, pointer, m, other, *rest, **named), volatile
        )

    return create_masked_load


def _store(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_store(self: Any, pointer: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if _unobserved():
            return original(self, pointer, value, mask, *rest, **named)
        return _accessed(
            "store", pointer, mask, None, None, lambda m: original(self, pointer, value, m, *rest, **named)
        )

    return create_masked_store


def _rmw(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def create_atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _unobserved():
            return original(self, op, pointer, value, mask, sem, scope)
        return _accessed(
            kind, pointer, mask, sem, scope, lambda m: original(self, op, pointer, value, m, sem, scope), op=op.name
        )

    return create_atomic_rmw


def _cas(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_cas(self: Any, pointer: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        if _unobserved():
            return original(self, pointer, expected, value, sem, scope)
        everywhere = _triton.TensorHandle(np.ones(pointer.data.shape, bool), tl.int1)
        return _accessed(
            "cas", pointer, everywhere, sem, scope, lambda m: original(self, pointer, expected, value, sem, scope)
        )

    return create_atomic_cas


def _atomic_load(rmw: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_load(self: Any, pointer: Any, mask: Any, sem: Any, scope: Any) -> Any:
        element = pointer.get_element_ty()
        zero = _triton.TensorHandle(np.zeros(pointer.data.shape, _triton._get_np_dtype(element)), element)
        return rmw(self, _triton._ir.ATOMIC_OP.OR, pointer, zero, mask, sem, scope)

    return create_atomic_load


def _atomic_store(rmw: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_store(self: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        return rmw(self, _triton._ir.ATOMIC_OP.XCHG, pointer, value, mask, sem, scope)

    return create_atomic_store


def _atomic_poll(self: Any, pointer: Any, expected: Any, timeout: Any, sem: Any, scope: Any) -> Any:
    """Poll until every element has its expected value, or `timeout` nanoseconds have passed."""
    everywhere = _triton.TensorHandle(np.ones(pointer.data.shape, bool), tl.int1)
    end = None if timeout is None else time.perf_counter_ns() + int(timeout.data.item())
    spins = 0
    while True:
        seen = self.create_atomic_load(pointer, everywhere, sem, scope)
        matched = self.create_icmpEQ(seen, expected)
        if matched.data.all() or (end is not None and time.perf_counter_ns() >= end):
            return matched
        spins += 1
        if director is None:
            yield_to_others(spins)


def yield_to_others(spins: Any) -> None:
    """Yield the core while a poll finds nothing, with a backoff of up to a millisecond."""
    if director is None and give_way is not None and give_way():
        return
    count = int(spins)
    if count > 2:
        time.sleep(min(2e-5 * (1 << min(count - 2, 6)), 1e-3))


def _barrier(self: Any) -> None:
    if director is not None:
        director.barrier()


def _compare(original: Callable[..., Any], relation: str) -> Callable[..., Any]:
    def compare(self: Any, left: Any, right: Any) -> Any:
        result = original(self, left, right)
        if director is not None:
            director.compared(relation, left.data, right.data, result.data)
        return result

    return compare
