"""The machine code of a kernel: prebuilt, or compiled by one process of this machine while the others wait for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tricomm import env
from tricomm.core import cubins
from tricomm.errors import ResourceError
from tricomm.kernels.launch import compiler
from tricomm.store import files

log = logging.getLogger("tricomm")
_PATIENCE = 300.0  # seconds for another process to compile a kernel; the slowest take one minute on a busy machine


def get(
    kernel: Any, constexprs: dict[str, Any], bits: int | None, aligned: bool, capability: int, refused: str = ""
) -> Any:
    """The machine code of a kernel, as `compiler.compile_kernel` makes it or as it was saved (`cubins`).

    Raises `ResourceError` if nothing can be compiled in this process, and if `refused`, which says why nothing is to
    be compiled now.
    """
    if compiler.refused() is not None:
        return compiler.compile_kernel(kernel, constexprs, bits, aligned, capability)
    name, key = kernel.fn.__name__, compiler.key_of(kernel, constexprs, bits, aligned, capability)
    found = cubins.find(name, key, capability)
    if found is not None:
        return found
    if refused:
        raise ResourceError(f"{name} for sm_{capability} would have to be compiled, and {refused}")
    return compiled(key, kernel, constexprs, bits, aligned, capability)


def compiled(key: str, *variant: Any) -> Any:
    """The result of `compiler.compile_kernel(*variant)`, whose key is `key`: compiled by one process at a time."""
    with _one_at_a_time(key):
        return compiler.compile_kernel(*variant)


@contextmanager
def _one_at_a_time(key: str) -> Iterator[None]:
    """Inside, no other process of this user on this machine compiles the kernel of `key`. The next one finds it in
    Triton's cache. The system frees the lock of a process that dies; without a lock the kernel is compiled as well.
    """
    folder = env.user_folder("XDG_CACHE_HOME", ".cache") / "locks"
    path = folder / key
    with ExitStack() as held:
        try:
            files.make_directory(folder)
            held.enter_context(files.locked(path, _PATIENCE))
            held.callback(_remove, path)
        except OSError as error:
            log.info("%s: %s; a kernel is compiled without this lock", path, error.strerror)
        yield


def _remove(path: Any) -> None:
    """A process that waits for the removed file, and one that makes a new one, both find the kernel in the cache."""
    with suppress(OSError):
        path.unlink()
