"""Finds the function that a command line or a report names."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.explorer import shipped
from tricomm.explorer.report.report import Report


def from_file(name: str) -> Callable[[Any], Any]:
    """The function that "file.py:function" names. Raises `InvalidArgument` if it does not exist or does not load."""
    path, _, function = name.rpartition(":")
    file = Path(path).resolve()
    if not path or not function.isidentifier() or not file.is_file():
        raise InvalidArgument(f"{name!r}: file.py:function is needed, of a file that exists")
    module_name = f"tricomm_checked_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(file.parent))  # as `python file.py` does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidArgument(f"{file} does not load: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    value = getattr(module, function, None)
    if not callable(value):
        there = [n for n, v in vars(module).items() if _defined(v, module_name)]
        raise InvalidArgument(f"{file} has no function {function!r}; it has {', '.join(there) or 'none'}")
    return value  # type: ignore[no-any-return]


def _defined(value: Any, module_name: str) -> bool:
    """True for a function of the module, or a partial of one. A class or an imported function is none."""
    function = value.func if isinstance(value, partial) else value
    return inspect.isfunction(function) and function.__module__ == module_name


def of_report(report: Report) -> Callable[[Any], Any]:
    """The function that a stored report is about. Raises `InvalidArgument` if it no longer exists."""
    subject = report.subject
    if "kernel" in subject:
        kernel = next((k for k in shipped.kernels(None, None, None) if k.name == subject["kernel"]), None)
        if kernel is None:
            raise InvalidArgument(f"the report is about {subject['kernel']}, which is no shipped kernel any more")
        return shipped.body(kernel, subject["sizes"])
    function = subject.get("function") or "no function"
    if not subject.get("file") or not function.isidentifier():
        raise InvalidArgument(
            f"the report is about {function}, which is not at the top level of a file: replay it from "
            "Python, tricomm.explorer.replay(report, fn)"
        )
    return from_file(f"{subject['file']}:{function}")
