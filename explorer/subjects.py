"""Finds the function that a command line or a report names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tricomm.errors import InvalidArgument, TricommError
from tricomm.explorer import shipped
from tricomm.explorer.compiled.compiled_runtime import capability_of
from tricomm.explorer.report.report import Report, digest
from tricomm.explorer.schedule.host_watchdog import OutOfTime, Watchdog
from tricomm.explorer.simulation import INTERPRETED, is_kernel, misfit, name_of
from tricomm.explorer.standins.program import SEEN, importing


def from_file(
    name: str, stubs: Sequence[str] = (), program: bool = False, ends: float = math.inf, compiled: str | None = None
) -> Callable[..., Any]:
    """The function `name`, as "file.py:function". A `program`, and any function without arguments, uses
    torch.distributed itself. Its file is imported as on a box with a GPU of architecture `compiled`.

    A file in a package is imported as a part of the package. If the package does not load, the file is imported without
    the `__init__` modules above it. `stubs` are modules to replace by `Stub`, such as those that need a GPU. Raises
    `InvalidArgument` if the function does not exist, or its file does not load, or does not load before `ends`, a time
    of the monotonic clock.
    """
    path, _, function = name.rpartition(":")
    file = Path(path).resolve()
    if not path or not function.isidentifier() or not file.is_file():
        raise InvalidArgument(f"{name!r}: file.py:function is needed, of a file that exists")
    for stub in stubs:
        if not isinstance(sys.modules.get(stub, Stub(stub)), Stub):
            raise InvalidArgument(f"--stub {stub}: this module is there")
        sys.modules[stub] = Stub(stub)
    as_program = program or _is_program(file, function)
    sees = capability_of(compiled) if compiled not in (None, INTERPRETED) else SEEN
    try:
        with Watchdog(lambda: None, math.inf, ends), importing(sees) if as_program else nullcontext():
            module = _of_package(file) if (file.parent / "__init__.py").is_file() else _alone(file)
    except OutOfTime:
        raise InvalidArgument(
            f"{file}: the budget has ended while it was imported; give more, or make its import faster"
        ) from None
    value = getattr(module, function, None)
    if is_kernel(value):
        raise InvalidArgument(f"{name} is a kernel: name a function that allocates its memory and launches it")
    if not callable(value):
        there = [n for n, v in vars(module).items() if _defined(v, module.__name__)]
        raise InvalidArgument(f"{file} has no function {function!r}; it has {', '.join(there) or 'none'}")
    return getattr(value, "checked_body", value)  # type: ignore[no-any-return]


def _is_program(file: Path, function: str) -> bool:
    """True if the text of a file defines a function `function` without arguments."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return False
    defined = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return any(not (node.args.posonlyargs or node.args.args) for node in defined)


class Stub(ModuleType):
    """A module that has every name. Each name is a function that returns itself. As a decorator it changes nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Stub)
        return args[0] if decorates else self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


def with_arguments(
    function: Callable[..., Any], arguments: str, calls: int, name: str, stubs: Sequence[str] = (), config: int = 0
) -> Callable[[], Any]:
    """A program that makes `calls` calls of `function`. `arguments` is Python text, as between the brackets of a call,
    which each rank evaluates for each call. It may use the names of the function's module, torch, dist, symm_mem, rank
    and world_size. Autotuned kernels take their configuration number `config`."""
    file, _, own = name.rpartition(":")
    try:
        tree = ast.parse(f"_function({arguments})", "--args", "eval")
    except SyntaxError as error:
        raise InvalidArgument(f"--args {arguments!r}: {error.msg}") from None
    if not isinstance(tree.body, ast.Call) or not isinstance(tree.body.func, ast.Name):
        raise InvalidArgument(f"--args {arguments!r}: the arguments of one call are needed")
    code = compile(tree, "--args", "eval")

    def program() -> Any:
        import torch
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory as symm_mem

        names = {
            "torch": torch,
            "dist": dist,
            "symm_mem": symm_mem,
            "_function": lambda *args, **kwargs: (args, kwargs),
        }
        names |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        namespace = {**getattr(inspect.unwrap(function), "__globals__", {}), **names}
        return [_called(function, code, namespace, arguments) for _ in range(calls)]

    path = str(Path(file).resolve())
    subject: dict[str, Any] = {"file": path, "function": own, "sha256": digest(path), "arguments": arguments}
    subject |= {"calls": calls, "stubs": list(stubs), "config": config}
    program.subject, program.function, program.config = subject, function, config  # type: ignore[attr-defined]
    return program


def _called(function: Callable[..., Any], code: Any, namespace: dict[str, Any], arguments: str) -> Any:
    """Call `function` with the arguments that `code` evaluates to. Raises `InvalidArgument` if `code` fails or they do
    not fit."""
    try:
        args, kwargs = eval(code, namespace)
    except TricommError:
        raise
    except Exception as error:
        raise InvalidArgument(f"--args {arguments!r}: {type(error).__name__}: {error}") from error
    if (reason := misfit(function, *args, **kwargs)) is not None:
        raise InvalidArgument(
            f"--args {arguments!r}: {reason}; {name_of(function)} takes {inspect.signature(function)}"
        )
    return function(*args, **kwargs)


def _alone(file: Path) -> ModuleType:
    name = f"tricomm_checked_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _path(file.parent):  # on the path, as with `python file.py`
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise _unloadable(file, error) from error
    return module


def _of_package(file: Path) -> ModuleType:
    """The module of a file in a package. After a failed import the modules of the package are removed."""
    packages = [file.parent]
    while (packages[0].parent / "__init__.py").is_file():
        packages.insert(0, packages[0].parent)
    names = [".".join(p.name for p in packages[: n + 1]) for n in range(len(packages))]
    module = f"{names[-1]}.{file.stem}"
    before = set(sys.modules)
    with _path(packages[0].parent):
        try:
            return importlib.import_module(module)
        except (Exception, SystemExit):
            for name in [n for n in sys.modules if n not in before and n.partition(".")[0] == names[0]]:
                del sys.modules[name]
        for name, folder in zip(names, packages, strict=True):
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = [str(folder)]
        try:
            return importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise _unloadable(file, error) from error


@contextmanager
def _path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _unloadable(file: Path, error: BaseException) -> InvalidArgument:
    missing = error.name if isinstance(error, ImportError) else None
    remedy = f"; --stub {missing} replaces it" if missing else ""
    return InvalidArgument(f"{file} does not load: {type(error).__name__}: {error}{remedy}")


def _defined(value: Any, module_name: str) -> bool:
    """True for a function that is defined in the module, or a partial of one. False for a class or an imported
    function."""
    function = value.func if isinstance(value, partial) else value
    return inspect.isfunction(function) and function.__module__ == module_name


def of_report(report: Report) -> Callable[..., Any]:
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
    name = f"{subject['file']}:{function}"
    found = from_file(name, subject.get("stubs", ()), "arguments" in subject, compiled=report.compiled)
    if "arguments" not in subject:
        return found
    calls, config = int(subject["calls"]), int(subject.get("config", 0))
    return with_arguments(found, subject["arguments"], calls, name, subject.get("stubs", ()), config)
