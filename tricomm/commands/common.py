"""Exit codes, and messages for errors, of all commands.

0 fine, 1 a check failed or something got slower, 2 usage, 3 unsupported environment, 4 wrong result, 5 too few runs to
judge, 6 no data to compare, 130 interrupt.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

SECONDS = 10.0  # between two lines of progress of a long command
FAILED, USAGE, UNSUPPORTED, WRONG, UNJUDGED, NO_DATA, INTERRUPTED = 1, 2, 3, 4, 5, 6, 130
NO_RUNS = "the history has no runs: `tricomm bench` adds one"


class OutputFile(click.Path):
    """A file to write, by its path. `-`, which stands for standard output elsewhere, is refused."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail("a file is needed here; what is printed has an option of its own", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number in a range. Refuses `nan`, which click accepts for any range, and `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def usage(function: Callable[[], Any]) -> Any:
    """The function's result; a bad argument becomes click's usage error (exit code 2)."""
    from tricomm.errors import InvalidArgument

    try:
        return function()
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None


def exit_code(error: Exception) -> int | None:
    """The exit code for an error of tricomm or a missing extra; None for any other exception, which is a bug."""
    from tricomm.errors import InvalidArgument, ResourceError, TricommError

    if isinstance(error, InvalidArgument):
        return USAGE
    without_extra = isinstance(error, ImportError) and error.name == "greenlet"
    if isinstance(error, ResourceError) or getattr(error, "unsupported", False) or without_extra:
        return UNSUPPORTED
    return FAILED if isinstance(error, TricommError) else None


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A context manager: inside, an interrupt ends this process at once. For imports, which have nothing to undo,
    because parts of torch and Triton swallow a `KeyboardInterrupt` while they are loaded."""
    usual = threading.current_thread() is threading.main_thread()
    if not usual or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*signalled: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def told_every(text: Callable[[], str], silent: bool = False) -> Iterator[None]:
    """A context manager: inside, prints `text()` to standard error every `SECONDS`, unless `silent`. For output to a
    pipe."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(SECONDS):
            click.echo(f"  {text()}", err=True)

    teller = threading.Thread(target=tell, daemon=True)
    if not silent:
        teller.start()
    try:
        yield
    finally:
        ended.set()
        if not silent:
            teller.join()


def given(context: click.Context) -> dict[str, str]:
    """The options of the command line, as they are written, by the names of their parameters."""
    return {
        option.name: option.opts[0]
        for option in context.command.params
        if option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }


def check_row_options(context: click.Context, collectives: Sequence[str]) -> None:
    """Raises click's usage error if options of fused calls are given, and no collective is one."""
    from tricomm.core.fused.fused_call import FUSED

    asked = given(context)
    rows = [asked[name] for name in ("hidden", "quantize", "top_k") if name in asked]
    if rows and FUSED not in collectives:
        raise click.UsageError(
            f"{' and '.join(rows)}: only rows of {FUSED} have that, and asked for is "
            f"{', '.join(dict.fromkeys(collectives))}; give --collective {FUSED}, or leave {' and '.join(rows)} out"
        )


@contextmanager
def errors_told(command: str, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ends `command` with a message and an exit code if a `TricommError` is raised inside; `before` is called first."""
    from tricomm.errors import TricommError

    try:
        yield
    except TricommError as error:
        before()
        click.echo(f"tricomm {command}: {error}", err=True)
        sys.exit(exit_code(error))


def joined(nproc: int | None) -> tuple[int, bool, bool]:
    """(world size, True if torchrun has started the ranks, True if this rank prints nothing). Raises click's errors."""
    from tricomm import env

    started = env.text("RANK") is not None and env.text("WORLD_SIZE") is not None
    world_size = usage(lambda: env.integer("WORLD_SIZE")) if started else nproc or 2
    if started and nproc not in (None, world_size):
        raise click.UsageError(f"--nproc {nproc}: WORLD_SIZE={world_size} is set, so the ranks are already started")
    if not 1 <= (world_size or 0) <= 8:
        raise click.UsageError(f"WORLD_SIZE={world_size}: 1 to 8 ranks are possible")
    return world_size, started, started and usage(lambda: env.integer("RANK")) != 0
