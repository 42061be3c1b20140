"""Compile a kernel for one GPU architecture outside of Triton's dispatch, so that reports read the code that is
launched."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import triton

from tricomm.errors import ResourceError
from tricomm.kernels import layout
from tricomm.kernels.launch import triton_adapter
from tricomm.kernels.specialization import specialized

# Fused multiply-add is off: a sum must have the same bits in every kernel that adds in the same order. The register
# limit is the hardware's: without it, ptxas spills a register or two to make room for more blocks than run. One stage,
# because no loop needs pipelining, and with more stages Triton spends time on looking for candidates.
COMPILE_OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False, "maxnreg": 255}

Compile = Callable[[Any, dict[str, Any], int | None, bool, int], Any]  # returns what `compile_kernel` returns

_TENSORS = ("x_ptr", "y_ptr")
_TABLES, _GROUP = ("table", "into"), "group"
_COUNTS = ("send_counts", "recv_counts")
_OPERANDS = "operands"
WIDE = ":16"  # suffix of the type of an operand that is 16-byte aligned if the tensors are
_READ = {"ttgir", "ptx", "cubin"}
_PTXAS = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
_LANGUAGE = os.path.join("triton", "language")  # Triton's own functions
_FILE = re.compile(r'(^\s*\.file\s+\d+\s+"|\bloc\(")([^"]*)', re.M)  # in PTX, in TTGIR


@dataclass(eq=False)
class _Origin:
    """The source of a cubin, as given by the latest kernel that has this cubin. Its kernels keep it alive."""

    ptx: str = ""
    kernel: Any = None


_by_cubin: WeakValueDictionary[bytes, _Origin] = WeakValueDictionary()
# In these versions the key of a function lacks the globals of callees whose key has not been computed yet. So it would
# differ in a process that has compiled other kernels, and code made by `tricomm compile` would not be found.
_KEYS_DEPEND_ON_ORDER = triton.__version__.startswith(("3.6.", "3.7."))
_keyed: set[Any] = set()  # the Python functions whose keys have been computed in the right order
_keying = threading.Lock()


def refused() -> str | None:
    """The reason why nothing can be compiled in this process; None if it can."""
    if triton_adapter.interpreted():
        return "TRITON_INTERPRET is set: Triton compiles nothing for a GPU in this process; unset it before the import"
    return None


def altered() -> str | None:
    """The reason why machine code of this process differs from a regular compilation; None if it does not."""
    if triton.knobs.compilation.override:
        return "TRITON_KERNEL_OVERRIDE is set, so that kernels are not compiled from their sources; unset it"
    if getattr(triton.knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return "a hook changes the stages of Triton's compiler (triton.knobs.runtime.add_stages_inspection_hook)"
    return None


def compile_kernel(kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, capability: int) -> Any:
    """Triton's compiled form of one of our kernels: `.asm` has ttgir, ptx and cubin, `.metadata` name and resources.

    `bits` is the width of the integers that `x_ptr` and `y_ptr` point to (None for a kernel without them). `aligned`:
    these pointers, and the OPERANDS marked `WIDE`, are multiples of 16. Tables are int64 and always aligned. Every
    other argument is a 64-bit number, or for uneven rows a tuple of one per rank; the group is one of
    `layout.group_argument`, and an epilogue's operands have the types of the constexpr OPERANDS. `constexprs` may hold
    compile options. `capability` is 90 for sm_90; no GPU is needed. Raises `ResourceError` if `refused()`.
    """
    if (reason := refused()) is not None:
        raise ResourceError(reason)
    from triton.backends.compiler import GPUTarget

    source, options = _source(kernel, constexprs, bits, aligned)
    return noted(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options))


def key_of(kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, capability: int) -> str:
    """64 hexadecimal digits that differ if `compile_kernel` of these arguments makes other machine code.

    Made of the parts of Triton's own cache key: the sources of the kernel and of all functions that it calls, types,
    constants, options, and the variables that Triton's compiler reads. Triton's version replaces the compiler's files
    and the ptxas in its wheel. If a variable names another ptxas, the key contains the version that it prints.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    if _KEYS_DEPEND_ON_ORDER:
        with _keying:
            for function in _functions(kernel, _keyed):
                function.hash, function.used_global_vals = None, {}
                function.cache_key  # noqa: B018  # is made again, after those of its callees
    source, options = _source(kernel, constexprs, bits, aligned)
    chosen = make_backend(GPUTarget("cuda", capability, 32)).parse_options(options)
    variables = sorted(get_cache_invalidating_env_vars().items())
    parts = (triton.__version__, capability, source.hash(), chosen.hash(), variables, _ptxas(capability))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ptxas(capability: int) -> str | None:
    """The version of a ptxas that the user has chosen; None if there is none."""
    if not any(os.environ.get(name) for name in _PTXAS):
        return None
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return str(get_ptxas(capability).version)
    except RuntimeError:  # there is no such program
        return None


def _source(kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool) -> tuple[Any, dict[str, Any]]:
    """Triton's source object of a kernel with these constexprs, and the compile options that were among them."""
    from triton.compiler import ASTSource

    signature, constants = {}, {}
    hints: dict[tuple[int, ...], Any] = {}  # by the parameter's place, for a tuple also the place in it
    values = specialized([parameter.name for parameter in kernel.params], constexprs, compiled=True)
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = values[name]
        elif name in _TENSORS:
            signature[name] = f"*i{bits}"
        elif name in _COUNTS:
            signature[name] = ("i64",) * constexprs["WORLD_SIZE"]
        elif name == _OPERANDS:
            kinds = constexprs["OPERANDS"]
            signature[name] = tuple(kind.removesuffix(WIDE) for kind in kinds)
            hints |= {(i, n): [["tt.divisibility", 16]] for n, k in enumerate(kinds) if k.endswith(WIDE) and aligned}
        elif name == _GROUP:
            signature[name] = ("*i64",) + ("i64",) * (layout.group_words(constexprs["WORLD_SIZE"]) - 1)
            hints[(i, 0)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "*i64" if name in _TABLES else "i64"
        if name in _TABLES or (name in _TENSORS and aligned):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return source, {name: value for name, value in constexprs.items() if name in COMPILE_OPTIONS}


def noted(compiled: Any) -> Any:
    """Register Triton's `compiled` kernel for `ptx_of` while it is alive, and return it.

    Drops its early forms, which take most of its memory and are never read.
    """
    for form in set(compiled.asm) - _READ:
        del compiled.asm[form]
    origin = compiled.origin = _by_cubin.setdefault(_digest(compiled.asm["cubin"]), _Origin())
    origin.ptx, origin.kernel = compiled.asm["ptx"], compiled.src.fn
    return compiled


def restored(compiled: Any) -> None:
    """Make `ptx_of` name the files of this kernel, even if another one has the same cubin."""
    compiled.origin.kernel = compiled.src.fn


def ptx_of(cubin: bytes) -> str | None:
    """The PTX that a cubin of this process was assembled from; None if no living kernel has it."""
    origin = _by_cubin.get(_digest(cubin))
    return None if origin is None else with_present_files(origin.ptx, origin.kernel)


def ptx_text(compiled: Any) -> str:
    """The PTX of Triton's `compiled` kernel with the file names of this process, even if it was cached."""
    return with_present_files(compiled.asm["ptx"], compiled.src.fn)


def ttgir_text(compiled: Any) -> str:
    """The TTGIR of Triton's `compiled` kernel with the file names of this process."""
    return with_present_files(compiled.asm["ttgir"], compiled.src.fn)


def _digest(cubin: bytes) -> bytes:
    return hashlib.sha256(cubin).digest()


def takes_data(kernel: Any) -> bool:
    """True for a kernel of (x_ptr, y_ptr, group, numel, call). Only the barrier is one of (group, call).

    The counts of uneven rows (`takes_counts`) or an epilogue's operands (`takes_operands`) may follow, then `extras`.
    """
    return bool(triton_adapter.parameters(kernel)[0].name == _TENSORS[0])


def takes_counts(kernel: Any) -> bool:
    """True for a kernel that takes, after `call`, the numbers of rows to and from each rank, for every call."""
    return any(p.name in _COUNTS for p in triton_adapter.parameters(kernel))


def takes_operands(kernel: Any) -> bool:
    """True for a kernel that takes, after `call`, a tuple of its epilogue's operands, for every call."""
    return any(p.name == _OPERANDS for p in triton_adapter.parameters(kernel))


def extras(kernel: Any) -> list[str]:
    """Names of the last 64-bit arguments, such as the root of a broadcast. Their values are the same in every launch of
    a plan."""
    others = (*_COUNTS, _OPERANDS)
    names = [p.name for p in triton_adapter.parameters(kernel) if not p.is_constexpr and p.name not in others]
    return names[names.index("call") + 1 :]


def with_present_files(text: str, kernel: Any) -> str:
    """`text`, PTX or TTGIR, with the files from which `kernel` and the functions that it calls were imported.

    Triton's cache identifies a kernel by its source, not by its path: code that was compiled for another checkout names
    that checkout's files, which may be gone. The lines are the same, because a line number is part of the key. Other
    file names stay unchanged.
    """
    paths = {os.path.abspath(f.fn.__code__.co_filename) for f in _functions(kernel, set())}
    named = {path for _, path in _FILE.findall(text)}
    present = {path: path if path in paths else _nearest(path, paths) for path in named}
    # A copy of a kernel may be in a file of another name.
    renamed = [path for path in named if present[path] == path and path not in paths and _LANGUAGE not in path]
    own = os.path.abspath(kernel.fn.__code__.co_filename)
    if own not in present.values() and len(renamed) == 1:
        present[renamed[0]] = own
    return _FILE.sub(lambda match: match[1] + present[match[2]], text)


def _functions(function: Any, seen: set[Any]) -> Iterator[Any]:
    """The functions that `function` calls, by the names in its code, attributes of modules included, and `function`.

    Callees come first. Functions whose Python function is in `seen` are left out; the others are added to `seen`.
    """
    if function.fn in seen:
        return
    seen.add(function.fn)
    code, names = function.fn.__code__, function.fn.__globals__
    known = [names[n] for n in code.co_names if n in names]
    known += [cell.cell_contents for cell in function.fn.__closure__ or ()]
    modules = [value for value in known if isinstance(value, ModuleType)]
    known += [getattr(module, n) for module in modules for n in code.co_names if hasattr(module, n)]
    for value in known:
        if hasattr(value, "used_global_vals"):  # one of Triton's, jitted or of @constexpr_function
            yield from _functions(value, seen)
    yield function


def _nearest(path: str, paths: set[str]) -> str:
    """The path with the same file name and the longest common end; `path` itself if there is none."""
    wanted = PurePath(path).parts[::-1]
    same = {p: len(os.path.commonprefix([wanted, PurePath(p).parts[::-1]])) for p in paths}
    best = max(same, key=lambda p: (same[p], p), default=path)
    return best if same.get(best) else path
