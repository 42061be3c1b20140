"""Run Triton kernels on a CPU, from the same source that is compiled for a GPU, whether or not TRITON_INTERPRET is set.

`interpret` runs a launch block after block. The schedule explorer runs the blocks of all ranks as tasks that take
turns at every access instead: through `programs`, `engage` and `disengage`.

Triton's language is patched during a launch, with no effect on kernels elsewhere. Interpreted kernels run one at a time
in a process: the patches and the current block's index are global, and `_lock` protects them. A block that polls gives
the interpreter to a thread that waits for it, and takes it again later. So kernels of two threads (calls of two
groups) may begin in another order on every rank without a deadlock.
Code that depends on Triton's private names is in `triton_adapter`, `triton_shortcuts` and `interpreted_wide`.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl

from tricomm.deadline import poll
from tricomm.errors import CollectiveTimeout, InvalidArgument, TricommError
from tricomm.kernels.launch import triton_adapter
from tricomm.kernels.launch.memory_access import Director, Observer

SUPPORTED = ("3.6", "3.7", "3.8", "3.9")

_GIVEN_AWAY_SECONDS = 2e-4

_lock = threading.RLock()
_waiting: set[object] = set()  # one for each thread that waits for the interpreter
_launched: set[object] = set()  # one for each launch that has begun and not ended: it needs the patches
# The running block, how long its launch may wait for the interpreter, and its launch's `interrupt` and director.
_Running = tuple["Program", float, Callable[[], None] | None, Director | None]
_current: _Running | None = None
_engaged: Director | None = None


class Interrupts:
    """Ctrl-C during a launch: raised at once in the kernel's code, later in steps that must be atomic.

    Python runs signal handlers only after calls and backward jumps, so setting `raising` is atomic.
    """

    def __init__(self) -> None:
        self.raising = False
        self._noted: tuple[Any, ...] | None = None
        self._before: Any = None

    def begin(self) -> None:
        """Defer interrupts from here on."""
        main = threading.current_thread() is threading.main_thread()
        if main and callable(before := signal.getsignal(signal.SIGINT)):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)

    def let_through(self) -> None:
        """Raise interrupts from here on, also one that was deferred."""
        self.raising = True
        self._hand_on()

    def poll(self) -> None:
        """Raise a deferred interrupt, then defer again."""
        self.let_through()
        self.raising = False

    def over(self) -> None:
        """Restore the previous handler, and pass on signals that it missed. May be called again."""
        self.raising = False
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._hand_on()

    def _handle(self, *args: Any) -> None:
        self._noted = args
        if self.raising:
            self._hand_on()

    def _hand_on(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            self._before(*noted)


def supported() -> str | None:
    """None if tricomm was tested with this Triton's interpreter, else the reason why it is refused."""
    if not triton.__version__.startswith(tuple(f"{v}." for v in SUPPORTED)):
        return f"Triton {triton.__version__} is not among the tested versions {', '.join(SUPPORTED)}"
    missing = triton_adapter.missing_hooks()
    if missing:
        return f"Triton {triton.__version__} lacks what tricomm hooks into: {', '.join(missing)}"
    return None


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show every load, store and atomic of the kernels that run in this block to `observer`."""
    triton_adapter.observers.append(observer)
    try:
        yield
    finally:
        triton_adapter.observers.remove(observer)


def substitute(function: Any, python: Callable[..., Any]) -> None:
    """Run `python` in place of the device function `function` under the interpreter."""
    triton_adapter.substitutes[function.fn] = python


def interpret(
    blocks: Sequence[Program],
    timeout: float = 600.0,
    interrupt: Callable[[], None] | None = None,
    director: Director | None = None,
) -> None:
    """Run the `programs` of a launch, one after another.

    `interrupt` is called at each access and each branch of the kernel; an error that it raises ends the launch.
    `director` controls its accesses; None performs each at once.

    Raises `InvalidArgument` for a kernel that the interpreter cannot run; `CollectiveTimeout` if another thread of
    this process holds the interpreter for `timeout` seconds. Errors inside the kernel are raised unchanged.
    """
    nested = _held()  # by this thread: a signal handler runs a kernel in the middle of another one
    outer = _current if nested else None
    interrupts, launch = Interrupts(), object()
    try:
        interrupts.begin()
        triton_adapter.refresh()
        if not nested:
            _take_lock(blocks[0].kernel.fn.__name__, timeout, interrupts.poll)
            _launched.add(launch)
            triton_adapter.patch()
        interrupts.let_through()
        for block in blocks:
            _resume((block, timeout, interrupt, director))
            block()
        interrupts.raising = False
        _leave(launch, nested, outer)
        interrupts.over()
    except BaseException:
        # An exception may have interrupted any line, one of the three above included; all of them may run again.
        interrupts.raising = False
        _leave(launch, nested, outer)
        interrupts.over()
        raise


def _held() -> bool:
    """Whether this thread has the interpreter."""
    return bool(_lock._is_owned())  # type: ignore[attr-defined]


def _leave(launch: object, nested: bool, outer: _Running | None) -> None:
    """Release the interpreter if this launch has taken it. If the launch was `nested`, continue with `outer`, the block
    in the middle of which it ran."""
    if nested:
        _resume(outer)
        return
    _launched.discard(launch)
    # If an interrupt came while another thread had the interpreter, that thread's launch restores the language.
    if not _held() and not _lock.acquire(blocking=False):
        return
    if not _launched:
        triton_adapter.restore()
    _resume(None)  # otherwise it would keep the tensors of a launch alive
    while _held():
        _lock.release()


def _resume(running: _Running | None) -> None:
    global _current
    _current = running
    triton_adapter.interrupt, triton_adapter.director = running[2:] if running is not None else (None, _engaged)
    if running is not None:
        running[0].select()


def _give_way() -> bool:
    """Called in a block that polls and has seen nothing new: give the interpreter to a thread that waits for it, and
    take it again. False if no thread waits. Raises `CollectiveTimeout` if the other thread does not release it in
    time."""
    mine = _current
    if not _waiting or mine is None or not _held():
        return False
    program, timeout, *_ = mine
    _lock.release()
    time.sleep(_GIVEN_AWAY_SECONDS)
    _take_lock(program.kernel.fn.__name__, timeout, lambda: None)
    _resume(mine)
    return True


triton_adapter.give_way = _give_way


@dataclass(frozen=True)
class Program:
    """One block of a launch. `select` makes it the current one; calling it runs it to its end."""

    kernel: Any
    grid: tuple[int, int, int]
    index: tuple[int, int, int]
    values: dict[str, Any]

    def select(self) -> None:
        """Make `tl.program_id` return this block's index. If blocks take turns, call it after every switch."""
        triton_adapter.select(self.grid, self.index)

    def __call__(self) -> None:
        """Raises the kernel's own errors, and `InvalidArgument` for a kernel that the interpreter cannot run."""
        try:
            with np.errstate(all="ignore"):
                triton_adapter.python(self.kernel)(**self.values)
        except TricommError:
            raise
        except NotImplementedError as error:
            name = self.kernel.fn.__name__
            raise InvalidArgument(f"kernel {name} cannot run under the interpreter: {error}") from error


def programs(kernel: Any, grid: Sequence[int], args: Sequence[Any], constexprs: dict[str, Any]) -> list[Program]:
    """The blocks of a launch; x varies slowest. Raises `InvalidArgument` if the arguments do not fit the kernel."""
    values = check(kernel, args, constexprs)
    nx, ny, nz = (*grid, 1, 1)[:3]
    indices = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
    return [Program(kernel, (nx, ny, nz), index, values) for index in indices]


def engage(director: Director, timeout: float) -> None:
    """Take the interpreter for this thread, patch Triton, and put `director` in charge. Pairs with `disengage`.

    Raises `CollectiveTimeout` if another thread holds the interpreter for `timeout` seconds.
    """
    global _engaged
    _take_lock("under a schedule", timeout, lambda: None)
    triton_adapter.patch()
    _engaged = triton_adapter.director = director
    triton_adapter.interrupt = None


def disengage() -> None:
    """Undo `engage`."""
    global _engaged
    _engaged = triton_adapter.director = None
    triton_adapter.restore()
    _lock.release()


def check(kernel: Any, args: Sequence[Any], constexprs: dict[str, Any]) -> dict[str, Any]:
    """The kernel's arguments by name, in the interpreter's form; raises `InvalidArgument` if they do not fit."""
    reason = supported()
    if reason is not None:
        raise InvalidArgument(f"the interpreter is not available: {reason}")
    fixed = {p.name for p in triton_adapter.parameters(kernel) if p.is_constexpr}
    try:
        bound = inspect.signature(kernel.fn).bind(*args, **constexprs)
        bound.apply_defaults()
        values = {n: v if n in fixed else triton_adapter.implicit(v) for n, v in bound.arguments.items()}
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(f"kernel {kernel.fn.__name__}: its arguments do not fit: {error}") from error
    strange = [
        n for n, v in values.items() if n not in fixed and v is not None and not isinstance(v, tl.tensor | tuple)
    ]
    if strange:
        raise InvalidArgument(f"kernel {kernel.fn.__name__}: tensors, numbers and tuples of them fit, not {strange}")
    return values


def _take_lock(name: str, timeout: float, meanwhile: Callable[[], None]) -> None:
    waits = object()
    _waiting.add(waits)
    try:
        if not poll(lambda: _lock.acquire(timeout=min(0.05, timeout)), timeout, 0.0, meanwhile=meanwhile):
            raise CollectiveTimeout(
                f"kernel {name}: timeout after {timeout:g} s of waiting for the interpreter, which another thread of "
                "this process holds: interpreted kernels run one at a time, and one that polls without "
                "tricomm.kernels.primitives gives no other a turn"
            )
    finally:
        _waiting.discard(waits)


def _after_fork() -> None:
    """Called in a forked child: a thread of the parent may have held the interpreter; no thread of the child does."""
    global _lock, _engaged
    _lock, triton_adapter.interrupt = threading.RLock(), None
    _engaged = triton_adapter.director = None
    _waiting.clear()
    _launched.clear()
    triton_adapter.restore()


os.register_at_fork(after_in_child=_after_fork)
