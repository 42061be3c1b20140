"""Runs a program for torch's symmetric memory, process groups and CUDA devices as a function to check."""

from __future__ import annotations

import builtins
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any

from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed import distributed_c10d as c10d
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from tricomm.communicator import Communicator
from tricomm.errors import InvalidArgument, TricommError
from tricomm.explorer.memory_model.regions import Memory, tensors_in
from tricomm.explorer.memory_model.source_lines import is_users
from tricomm.explorer.standins import cuda_device, process_group, symmetric_memory
from tricomm.explorer.standins.host import Board, ProgramHost
from tricomm.explorer.standins.module_state import ModuleState, modules_of
from tricomm.explorer.standins.symmetric_memory import SymmetricMemories
from tricomm.explorer.world.patches import Patches
from tricomm.explorer.world.world import Turns

SEEN = 90  # the architecture that an interpreted program sees
_running = threading.Lock()


class Standins:
    """The stand-ins of one execution. `turns` and `met` as in `Board`."""

    def __init__(
        self,
        program: Callable[[], Any],
        architecture: int,
        memory: Memory,
        turns: Turns,
        met: Callable[[int, int, bool], None],
    ) -> None:
        self._program, self._architecture, self._memory, self._in_host = program, architecture, memory, turns.in_host
        self._function = getattr(program, "function", program)
        self._modules = ModuleState(modules_of(self._function), _PATCHES.replacements)
        self._hosts: dict[int, ProgramHost] = {}
        self._board = Board(turns, met)

    def run(self, comm: Communicator) -> Any:
        """Called in a rank's host code: call the program, with a default process group."""
        host = ProgramHost(comm, self._memory, self._board, self._architecture)
        host.config = getattr(self._program, "config", 0)
        host.symmetric, host.modules = SymmetricMemories(host), self._modules
        self._hosts[comm.rank] = host
        self._modules.enter(comm.rank)
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
        """A context manager around the host code of a rank: torch's tables, the environment and the modules' globals
        are the rank's."""
        tables, environment, host = _tables(), dict(_VARIABLES), self._hosts.get(rank)
        if host is not None:
            _put_tables((host.group, host.workspaces, host.streams))
            _environment(host.environment)
            self._modules.enter(rank)
        try:
            yield
        finally:
            if rank in self._hosts:
                self._hosts[rank].environment = dict(_VARIABLES)
            _put_tables(tables)
            _environment(environment)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context manager in which a program's code uses the stand-ins. Raises `InvalidArgument` if another check of
        a program runs, in another thread or around this one, because both would change this process's environment and
        modules."""
        if not _running.acquire(blocking=False):
            raise InvalidArgument(
                "this process checks a program already, in another thread or around this call: check them one by one"
            )
        with ExitStack() as stack:
            stack.callback(_running.release)
            stack.callback(self._modules.leave)
            stack.enter_context(_PATCHES.installed(self._current))
            stack.enter_context(cuda_device.CudaOnCpu(self._current))
            yield

    def _current(self) -> ProgramHost | None:
        rank = self._in_host()
        host = None if rank is None else self._hosts.get(rank)
        return host if host is not None and host.in_program else None


class _Importing:
    """The host state while a program's file is imported: on the first GPU, without a group."""

    rank, world_size, default_device = 0, 1, None

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def __getattr__(self, name: str) -> Any:
        raise InvalidArgument("this call is made while the file is imported; make it in the function that is checked")


@contextmanager
def importing(architecture: int) -> Iterator[None]:
    """A context manager in which `torch.cuda` and Triton's driver behave as on a machine with a GPU."""
    host: Any = _Importing(architecture)
    with _PATCHES.installed(lambda: host), cuda_device.CudaOnCpu(lambda: host):
        yield


def _tables() -> tuple[Any, ...]:
    return c10d._world.default_pg, symm_mem._group_name_to_workspace_tensor, symm_mem._backend_streams


def _put_tables(tables: tuple[Any, ...]) -> None:
    c10d._world.default_pg, symm_mem._group_name_to_workspace_tensor, symm_mem._backend_streams = tables


# because a copy of `os.environ` would decode all variables at every turn
_VARIABLES: dict[bytes, bytes] = vars(os.environ)["_data"]


def _environment(values: Mapping[bytes, bytes]) -> None:
    if values != _VARIABLES:
        for name in _VARIABLES.keys() - values.keys():
            del os.environb[name]
        os.environb.update({name: value for name, value in values.items() if _VARIABLES.get(name) != value})


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
        run_time = {p.name: values.pop(p.name) for p in kernel.params if p.name in values and not p.is_constexpr}
        with host.library():
            for name, value in run_time.items():
                if any(cuda_device.on_host(t) and not cuda_device.is_pinned(t) for t in tensors_in(value)):
                    raise ValueError(f"kernel {kernel.__name__}: argument {name} is a tensor on the CPU; pass x.cuda()")
            gpu: Any = host.comm.gpu  # a `SimulatedGpu`
            with _interpreted(kernel) if gpu is None else gpu.driver.holding(host.addressed.values()):
                host.comm.launch(kernel, grid, *run_time.values(), **values)

    return run


@contextmanager
def _interpreted(kernel: Any) -> Iterator[None]:
    """A context manager that raises `InvalidArgument` if Triton's interpreter cannot run a kernel. Of its own, a kernel
    raises only assertions."""
    try:
        yield
        return
    except (AssertionError, TricommError) as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        cause: BaseException = error.__cause__
    except Exception as error:
        cause = error
    where = next(f"{f.filename}:{f.lineno}" for f in reversed(extract_tb(cause.__traceback__)) if is_users(f.filename))
    raise InvalidArgument(
        f"kernel {kernel.__name__}, {where}: Triton's interpreter cannot run this line ({type(cause).__name__}: "
        f"{cause}); compiled (--compiled sm_90) it may run"
    ) from cause


def _one_config(host: ProgramHost) -> Callable[..., Any]:
    """Let autotuned kernels run with one configuration, because times mean nothing here."""

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


def _importing(load: Callable[..., Any]) -> Callable[[ProgramHost], Callable[..., Any]]:
    return lambda host: load if isinstance(host, _Importing) else partial(host.modules.importing, load)


_PATCHES = Patches(
    lambda: {
        (JITFunction, "run"): _launch,
        (Autotuner, "run"): _one_config,
        (builtins, "__import__"): _importing(builtins.__import__),
        (importlib, "import_module"): _importing(importlib.import_module),
        **process_group.patches(),
        **symmetric_memory.patches(),
        **cuda_device.patches(),
    }
)
