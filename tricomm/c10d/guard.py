"""What becomes of a group if a call is left by an exception that is not the call's own.

Ctrl-C, or an exception that a signal handler raises, may come at any line of a call. The other ranks may be waiting for
this one then, so the group is given up and they are told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tricomm.c10d.wrappers import WrapperTensor, unwrapped
from tricomm.errors import TricommError

# What a call says of its arguments before anything is sent; the group goes on.
_REFUSALS = (TricommError, TypeError, ValueError, NotImplementedError)
NOTHING_SENT = "tricomm_nothing_sent"  # attribute of an exception that a native backend refuses a call with


def guarded(*names: str) -> Callable[[type], type]:
    """Class decorator: the methods `names` take wrapper tensors, and call `self.interrupted(error)` if a foreign
    exception leaves them."""

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, _guarded(getattr(kind, name)))
        return kind

    return decorate


def _guarded(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        # On one line: Python then looks for interrupts inside of the `try` only.
        try: return _unwrapping(method, self, args, keywords)  # noqa: E701 # fmt: skip
        except _REFUSALS:
            raise
        except BaseException as error:
            if not getattr(error, NOTHING_SENT, False):
                self.interrupted(error)
            raise

    return call


def _unwrapping(method: Any, group: Any, args: Any, keywords: Any) -> Any:
    try:
        return method(group, *args, **keywords)
    except WrapperTensor:
        return unwrapped(method, group, args, keywords)
