"""`tricomm.simulate`: runs all ranks in this process, taking turns in a seeded order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from triton.runtime.jit import KernelInterface

from tricomm.communicator import Communicator
from tricomm.errors import CollectiveTimeout, InvalidArgument
from tricomm.explorer.compiled import compiled_runtime
from tricomm.explorer.execution import Ranks
from tricomm.explorer.report.findings import Execution, Subject
from tricomm.explorer.schedule.strategies import RandomWalk
from tricomm.kernels import layout
from tricomm.kernels.launch import interpreter
from tricomm.options import Options
from tricomm.policy import launch_shapes

_T = TypeVar("_T")
_OF_PROGRAMS = "sm_90"
INTERPRETED = "none"  # used in place of an architecture
_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def simulate(
    fn: Callable[[Communicator], _T],
    world_size: int,
    seed: int = 0,
    *,
    options: Options | None = None,
    compiled: str | None = None,
) -> list[_T]:
    """Run `fn(comm)` for every rank in this process, without a GPU, and return the ranks' results in rank order.

    The ranks are tasks that take turns at every access to shared memory, in an order that `seed` decides: the same
    seed gives the same interleaving and the same bits. The kernels are those that a GPU compiles, under Triton's
    interpreter. Host code (selection, plans, epochs, errors) is the same as everywhere. Each rank has its own random
    generators of `torch`, `random` and `numpy`, which are seeded by `seed`. `world_size` is 1 to 16.

    An exception in a rank is raised with a note that names the rank. To its peers, the rank has died (`PeerDied`). A
    deadlock is detected at once, and ends as it would after `options.timeout`: with `CollectiveTimeout`, which says who
    waits for what. Raises `InvalidArgument` for a function that takes no communicator, that makes a call in another
    thread or with another rank's communicator, or that blocks outside of tricomm for `options.stall_timeout` seconds
    (detected in the main thread only).

    `compiled` is an architecture, such as "sm_90": then the kernels are compiled for it, launched as on a GPU, and
    their PTX is executed. Blocks take turns, not warps. The default `options` then have an arena for a GPU's tiles.
    Raises `InvalidArgument` for an architecture that Triton does not know, for an unknown PTX instruction, and if
    TRITON_INTERPRET is set in the environment.

    Times measured in a simulation say nothing about a GPU.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise InvalidArgument(f"seed={seed!r}: an integer from 0 to 2**63 - 1 is needed")
    compiled = architecture_of(fn, compiled)
    if options is None and compiled is None:
        options = Options()
    subject = prepared(fn, world_size, options, compiled=compiled)
    outcome = Ranks(subject, Execution(seed), RandomWalk(seed), detect=False).execute()
    if outcome.errors:
        error = next(iter(outcome.errors.values()))
        if outcome.deadlock is not None and outcome.deadlock not in str(error):
            error.add_note(f"deadlock: {outcome.deadlock}")
        raise error
    if len(outcome.results) < world_size:
        raise CollectiveTimeout(f"timeout by a deadlock: {outcome.deadlock}")
    return [outcome.results[rank] for rank in range(world_size)]


def prepared(
    fn: Any,
    world_size: int,
    options: Options | None,
    residency: int | None = None,
    most_steps: int = 1_000_000_000,
    compiled: str | None = None,
) -> Subject:
    """The subject of an execution, with checked arguments. For compiled kernels `options` may be None: the smallest
    arena that has room for a GPU's tiles. Raises `InvalidArgument` for bad arguments."""
    reason = interpreter.supported()
    if reason is not None:
        raise InvalidArgument(f"no kernel can be interpreted: {reason}")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= layout.MAX_WORLD_SIZE:
        raise InvalidArgument(f"world_size={world_size!r}: 1 to {layout.MAX_WORLD_SIZE} ranks are possible")
    if not isinstance(options, Options) and not (options is None and compiled is not None):
        raise InvalidArgument(f"options={options!r}: tricomm.Options is needed")
    if not callable(fn) or is_kernel(fn):
        raise InvalidArgument(f"{name_of(fn)}: a function of one communicator that launches kernels is needed")
    if runs_later(fn):
        raise InvalidArgument(f"{name_of(fn)} is a generator or a coroutine: calling it runs nothing")
    if residency is not None and (isinstance(residency, bool) or not isinstance(residency, int) or residency < 1):
        raise InvalidArgument(f"residency={residency!r}: a number of blocks from 1 on, or None, is needed")
    program = is_program(fn)
    if not program and (reason := misfit(fn, None)) is not None:
        raise InvalidArgument(f"{name_of(fn)} cannot be called with one communicator, nor without: {reason}")
    if compiled is not None:
        compiled_runtime.capability_of(compiled)
        options = compiled_runtime.checked_options(world_size, options)
    else:
        assert options is not None
        launch_shapes.check_device("cpu", layout.plan(world_size, options.arena_bytes), options._tuning.tile)
    return Subject(fn, world_size, options, residency, most_steps, compiled, program)


def runs_later(fn: Any) -> bool:
    """True for a generator or a coroutine, because a call of it runs nothing."""
    return any(kind(fn) for kind in _LATER)


def is_program(fn: Any) -> bool:
    """True for a program, which uses torch's process groups and symmetric memory itself: a function without arguments,
    or with defaults that are not None."""
    if misfit(fn) is not None:
        return False
    if misfit(fn, None) is not None:
        return True
    try:
        first = next(iter(inspect.signature(fn).parameters.values()))
    except ValueError:
        return False
    return first.default is not first.empty and first.default is not None


def architecture_of(fn: Any, compiled: str | None = None) -> str | None:
    """The architecture that a function's kernels are compiled for; None for Triton's interpreter. `compiled` is an
    architecture, INTERPRETED, or None for the default."""
    if compiled is not None:
        return None if compiled == INTERPRETED else compiled
    return _OF_PROGRAMS if callable(fn) and is_program(fn) else None


def is_kernel(fn: Any) -> bool:
    """True for a Triton kernel, even an autotuned one."""
    return isinstance(fn, KernelInterface)


def misfit(fn: Any, *args: Any, **kwargs: Any) -> str | None:
    """Why `fn` cannot be called with these arguments; None if it can, or if it is a built-in without a signature."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return None


def name_of(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(fn, '__qualname__', fn)}{where}"
