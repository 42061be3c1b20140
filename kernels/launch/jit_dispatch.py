"""The decisions of Triton's own dispatch about a launch, without a GPU: types, specialisation, and compiled code.

The one module that depends on private names of Triton's dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.launch import compiler

_binders: dict[tuple[Any, int], tuple[Any, Any, Any]] = {}
_compiled: dict[tuple[Any, ...], Any] = {}


def compile_for(
    kernel: Any, args: Sequence[Any], options: dict[str, Any], capability: int
) -> tuple[Any, list[Any], list[Any]]:
    """Triton's compiled form of a user's kernel for these arguments, their values and their types, in order.

    `options` are constexprs and launch options. A type is a name such as "i32" or "*fp32", "constexpr" for a value that
    was compiled in, or a tuple of the elements' types. Cached for the life of the process. Raises `InvalidArgument` if
    the arguments do not fit, `ResourceError` if Triton cannot compile the kernel, or nothing can be compiled here.
    """
    if (reason := compiler.refused()) is not None:
        raise ResourceError(reason)
    import triton
    from triton.compiler import ASTSource, CompilationError

    target, backend, binder = _binder(kernel, capability)
    name = kernel.fn.__name__
    try:
        bound, specialization, _ = binder(*args, **options)
        chosen, signature, constants, hints = kernel._pack_args(backend, options, bound, specialization, None)
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise InvalidArgument(f"kernel {name}: its arguments do not fit: {error}") from error
    for (global_name, _), (value, scope) in kernel.used_global_vals.items():
        if scope.get(global_name, value) is not value and scope[global_name] != value:
            raise InvalidArgument(
                f"kernel {name}: global {global_name} has changed since it was compiled, from {value} to "
                f"{scope[global_name]}; Triton refuses that as well"
            )
    key = (kernel.fn, kernel.cache_key, str(specialization), str(constants), str(chosen), capability)
    if key not in _compiled:
        try:
            source = ASTSource(kernel, signature, constants, hints)
            made = triton.compile(source, target=target, options=chosen.__dict__)
        except Exception as error:  # whatever a compiler may raise
            inner: BaseException = error
            while isinstance(inner.__cause__, CompilationError):  # of a function that the kernel calls
                inner = inner.__cause__
            text = f"Triton cannot compile {name} for sm_{capability}: {type(inner).__name__}: {inner}"
            raise ResourceError(text) from error
        _compiled[key] = compiler.noted(made)
    return _compiled[key], list(bound.values()), list(signature.values())


def type_name(value: Any) -> str:
    """Triton's name of the type that an argument of a kernel has, such as "*fp32"."""
    from triton.runtime.jit import mangle_type

    return str(mangle_type(value))


def _binder(kernel: Any, capability: int) -> tuple[Any, Any, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    if (kernel.fn, capability) not in _binders:
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _binders[kernel.fn, capability] = target, backend, binder
    return _binders[kernel.fn, capability]
