"""The machine code of a kernel: prebuilt, or compiled by one process of this machine while the others wait for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import triton

from tricomm.core import cubins
from tricomm.errors import ResourceError
from tricomm.kernels.launch import compiler
from tricomm.store import files

log = logging.getLogger("tricomm")
_PATIENCE = 60.0  # seconds for another process to compile a kernel; then this one compiles it as well


def get(
    kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, capability: int, refused: str = ""
) -> Any:
    """The machine code of a kernel: prebuilt (`cubins`), or made by `compiler.compile_kernel`.

    Prebuilt code has `instead`, for a driver that refuses it. Raises `ResourceError` if nothing can be compiled in this
    process, or if `refused` gives a reason not to compile now.
    """
    if compiler.refused() is not None:
        return compiler.compile_kernel(kernel, constexprs, bits, aligned, capability)
    name, key = kernel.fn.__name__, compiler.key_of(kernel, constexprs, bits, aligned, capability)
    make = partial(_made, key, refused)
    found = cubins.find(name, key, capability) if compiler.altered() is None else None
    if found is not None:
        return found._replace(instead=partial(_instead, make))
    return make("it is neither prebuilt nor prepared", kernel, constexprs, bits, aligned, capability)


def _instead(make: Any, error: str, kernel: Any, *variant: Any) -> Any:
    cubins.say(f"{kernel.fn.__name__}: {error}")
    return make("the driver refuses what was prebuilt", kernel, *variant)


def _made(key: str, refused: str, why: str, kernel: Any, *variant: Any) -> Any:
    if refused:
        raise ResourceError(
            f"{kernel.fn.__name__} for sm_{variant[-1]} would have to be compiled ({why}), and {refused}"
        )
    return compiled(key, kernel, *variant)


def compiled(key: str, *variant: Any) -> Any:
    """The result of `compiler.compile_kernel(*variant)`, whose key is `key`. Only one process at a time compiles it."""
    with _one_at_a_time(key):
        return compiler.compile_kernel(*variant)


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    """A context manager: inside, no other process with the same Triton cache compiles the kernel of `key`; the next
    process then loads it from that cache. The system frees the lock of a process that dies. If the lock cannot be
    taken, the kernel is compiled without it.
    """
    folder = Path(triton.knobs.cache.dir) / "tricomm-locks"
    path = folder / key
    if triton.knobs.compilation.always_compile or not folder.is_absolute():
        yield  # the next process would not find the kernel in the cache
        return
    with ExitStack() as held:
        try:
            files.make_directory(folder)
            held.enter_context(files.locked(path, _PATIENCE))
            held.callback(_remove, path)
        except OSError as error:
            log.info("%s: %s; a kernel is compiled without this lock", path, error.strerror)
        yield


def _remove(path: Any) -> None:
    """Remove the lock file. Processes that wait for it or make a new one find the kernel in the cache."""
    with suppress(OSError):
        path.unlink()
