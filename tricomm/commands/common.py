"""What the commands share: exit codes, and how a bad argument is told.

0 fine, 1 a check failed or something got slower, 2 usage, 3 unsupported environment, 4 wrong result, 130 interrupt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

FAILED, USAGE, UNSUPPORTED, WRONG, INTERRUPTED = 1, 2, 3, 4, 130


def usage(function: Callable[[], Any]) -> Any:
    """The function's result; a bad argument becomes click's usage error (exit code 2)."""
    from tricomm.errors import InvalidArgument

    try:
        return function()
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that no command has put into words of its own; None for a fault of tricomm itself."""
    from tricomm.errors import InvalidArgument, ResourceError, TricommError

    if isinstance(error, InvalidArgument):
        return USAGE
    if isinstance(error, ResourceError):
        return UNSUPPORTED
    return FAILED if isinstance(error, TricommError) else None


def joined(nproc: int | None) -> tuple[int, bool, bool]:
    """(world size, whether torchrun has started the ranks, whether this one is to be quiet). Raises click's errors."""
    from tricomm import env

    started = env.text("RANK") is not None and env.text("WORLD_SIZE") is not None
    world_size = usage(lambda: env.integer("WORLD_SIZE")) if started else nproc or 2
    if started and nproc not in (None, world_size):
        raise click.UsageError(f"--nproc {nproc}: WORLD_SIZE={world_size} is set, so the ranks are already started")
    if not 1 <= (world_size or 0) <= 8:
        raise click.UsageError(f"WORLD_SIZE={world_size}: 1 to 8 ranks are possible")
    return world_size, started, started and usage(lambda: env.integer("RANK")) != 0
