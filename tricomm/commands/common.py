"""What the commands share: exit codes, and how a bad argument is told.

0 fine, 1 a check failed or something got slower, 2 usage, 3 unsupported environment, 4 wrong result, 130 interrupt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

FAILED, UNSUPPORTED, WRONG, INTERRUPTED = 1, 3, 4, 130


def usage(function: Callable[[], Any]) -> Any:
    """The function's result; a bad argument becomes click's usage error (exit code 2)."""
    from tricomm.errors import InvalidArgument

    try:
        return function()
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
