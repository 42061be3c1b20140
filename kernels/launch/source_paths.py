"""Paths in code that came from Triton's cache.

Triton's cache identifies a kernel by its source, not by its path: code that was compiled for another checkout names
that checkout's files, which may be gone. The lines are the same, because a line number is part of the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePath
from types import ModuleType
from typing import Any

_FILE = re.compile(r'(^\s*\.file\s+\d+\s+"|\bloc\(")([^"]*)', re.M)  # in PTX, in TTGIR


def of_this_process(text: str, kernel: Any) -> str:
    """`text`, PTX or TTGIR, with the files from which `kernel` and the functions that it calls were imported.

    Other file names stay unchanged.
    """
    import triton

    paths = {os.path.abspath(f.fn.__code__.co_filename) for f in _functions(kernel, triton.JITFunction, set())}

    def present(match: re.Match[str]) -> str:
        return match[1] + (match[2] if match[2] in paths else _nearest(match[2], paths))

    return _FILE.sub(present, text)


def _functions(function: Any, kind: type, seen: set[Any]) -> Iterator[Any]:
    """`function` and the functions that it calls, by the names in its code, attributes of modules included."""
    if function in seen:
        return
    seen.add(function)
    yield function
    code, names = function.fn.__code__, function.fn.__globals__
    known = [names[n] for n in code.co_names if n in names]
    known += [cell.cell_contents for cell in function.fn.__closure__ or ()]
    modules = [value for value in known if isinstance(value, ModuleType)]
    known += [getattr(module, n) for module in modules for n in code.co_names if hasattr(module, n)]
    for value in known:
        if isinstance(value, kind):
            yield from _functions(value, kind, seen)


def _nearest(path: str, paths: set[str]) -> str:
    """The one of `paths` with the same name at its end, and as many folders as possible; `path` if there is none."""
    wanted = PurePath(path).parts[::-1]
    same = {p: len(os.path.commonprefix([wanted, PurePath(p).parts[::-1]])) for p in paths}
    best = max(same, key=lambda p: (same[p], p), default=path)
    return best if same.get(best) else path
