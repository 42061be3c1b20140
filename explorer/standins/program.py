"""A program that is written for torch's symmetric memory, process groups and CUDA devices, as a function to check."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from tricomm.communicator import Communicator
from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.standins import cuda_device, process_group, symmetric_memory
from tricomm.explorer.standins.host import ProgramHost
from tricomm.explorer.standins.module_state import ModuleState, modules_of
from tricomm.explorer.standins.symmetric_memory import SymmetricMemories
from tricomm.explorer.world.patches import Patches

_running = threading.Lock()


class Standins:
    """The stand-ins of one execution. `in_host()` is the rank whose host code runs, or None."""

    def __init__(
        self, program: Callable[[], Any], architecture: int, memory: Memory, in_host: Callable[[], int | None]
    ) -> None:
        self._program, self._architecture, self._memory, self._in_host = program, architecture, memory, in_host
        self._modules = modules_of(getattr(program, "function", program))
        self._hosts: dict[int, ProgramHost] = {}
        self._board: dict[int, list[Any]] = {}

    def run(self, comm: Communicator) -> Any:
        """In a rank's host code: call the program, with a default process group."""
        host = ProgramHost(comm, self._memory, self._board, self._architecture)
        host.config = getattr(self._program, "config", 0)
        host.symmetric, host.modules = SymmetricMemories(host), ModuleState(self._modules, _PATCHES.replacements())
        self._hosts[comm.rank] = host
        host.modules.put()
        _environment(host.environment)
        process_group.start(host)
        _put_tables((host.group, host.workspaces, host.streams))
        host.in_program = True
        try:
            return self._program()
        finally:
            host.in_program = False
            process_group.leave(host)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Around the host code of a rank: torch's tables, the environment and the modules' globals are the rank's."""
        tables, environment, host = _tables(), dict(os.environ), self._hosts.get(rank)
        if host is not None:
            _put_tables((host.group, host.workspaces, host.streams))
            _environment(host.environment)
            host.modules.put()
        try:
            yield
        finally:
            if rank in self._hosts:
                self._hosts[rank].modules.take()
                self._hosts[rank].environment = dict(os.environ)
            _put_tables(tables)
            _environment(environment)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, a program's code uses the stand-ins. Raises `InvalidArgument` if another thread checks a program:
        its environment and modules are those of the process."""
        if not _running.acquire(blocking=False):
            raise InvalidArgument("another thread of this process checks a program; check one after the other")
        with ExitStack() as stack:
            stack.callback(_running.release)
            stack.enter_context(_PATCHES.installed(self._current))
            stack.enter_context(cuda_device.CudaOnCpu(self._current))
            yield

    def _current(self) -> ProgramHost | None:
        rank = self._in_host()
        host = None if rank is None else self._hosts.get(rank)
        return host if host is not None and host.in_program else None


def _tables() -> tuple[Any, ...]:
    return c10d._world.default_pg, symm_mem._group_name_to_workspace_tensor, symm_mem._backend_streams


def _put_tables(tables: tuple[Any, ...]) -> None:
    c10d._world.default_pg, symm_mem._group_name_to_workspace_tensor, symm_mem._backend_streams = tables


def _environment(values: Mapping[str, str]) -> None:
    now = dict(os.environ)
    for name in now.keys() - values.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in values.items() if now.get(name) != value})


def _launch(host: ProgramHost) -> Callable[..., None]:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        names = [p.name for p in kernel.params]
        values = dict(zip(names, args, strict=False))
        if warmup:
            return
        if len(args) > len(names) or values.keys() & given.keys():
            raise InvalidArgument(f"kernel {kernel.__name__} takes {', '.join(names)}; arguments do not fit")
        values |= {p.name: p.default for p in kernel.params if p.has_default} | given | values
        if callable(grid):
            grid = grid(values)
        run_time = [values.pop(p.name) for p in kernel.params if p.name in values and not p.is_constexpr]
        with host.library():
            host.comm.launch(kernel, grid, *run_time, **values)

    return run


def _one_config(host: ProgramHost) -> Callable[..., Any]:
    """An autotuned kernel runs with one configuration, because times mean nothing here."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if host.config >= len(tuner.configs):
            raise InvalidArgument(
                f"kernel {tuner.base_fn.__name__} has no configuration {host.config}; it has 0 to "
                f"{len(tuner.configs) - 1}: {'; '.join(map(str, tuner.configs))}"
            )
        chosen = tuner.configs[host.config]
        given = {**kwargs, **chosen.all_kwargs()}
        if chosen.pre_hook is not None:
            chosen.pre_hook(dict(zip(tuner.arg_names, args, strict=False)) | given)
        return tuner.fn.run(*args, **given)

    return run


_PATCHES = Patches(
    lambda: {
        (JITFunction, "run"): _launch,
        (Autotuner, "run"): _one_config,
        **process_group.patches(),
        **symmetric_memory.patches(),
        **cuda_device.patches(),
    }
)
