"""The short way of the one call that is made most and waits least: a small all_reduce that the caller waits for.

It decides nothing of its own: a shape gets here only by `routing.decide`, once, and is counted like any other call.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch

from tricomm import env
from tricomm.c10d.call_guard import refused
from tricomm.c10d.conventions import operation
from tricomm.c10d.handles import FinishedWork
from tricomm.c10d.torch_names import c10d
from tricomm.errors import InvalidArgument
from tricomm.policy import backend_choice

_MOST = 1024
# Shared: whoever asks for a finished call to be waited for has the result in its hands already.
_FINISHED = FinishedWork([])
_OPTIONS = c10d.AllreduceOptions
# To compare two ReduceOps takes microseconds; the hash of one is its number.
_KINDS = [c10d.ReduceOp(kind) for name, kind in c10d.ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"]
_KINDS.append(c10d._make_nccl_premul_sum(2.0))
_DISTINCT = len({hash(kind) for kind in _KINDS}) == len(_KINDS)


class Quick:
    """Calls that run straight on the caller's stream, by type, count and operation."""

    def __init__(self, otherwise: Any, interrupted: Any) -> None:
        # The group's own methods: a cycle would delay its end.
        self._otherwise, self._interrupted = weakref.WeakMethod(otherwise), weakref.WeakMethod(interrupted)
        self._comm: Any = None
        self._site: backend_choice.Site | None = None
        self._known: dict[tuple[Any, ...], Any] = {}

    def use(self, comm: Any, site: backend_choice.Site) -> None:
        """From now on, tensors of `comm`'s device go this way."""
        if _DISTINCT:
            self._comm, self._site = comm, site

    def clear(self) -> None:
        self._site = None
        self._known.clear()

    def all_reduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """The group's `allreduce`: a finished handle; or what the long way gives, which also says what is wrong.

        Who calls this way orders what follows by their own stream, and finds the call's faults at the next one: a
        limit of time given with the call has nothing to limit.
        """
        # On one line: Python then looks for interrupts inside of the `try` only.
        try: return self._all_reduce(tensors, opts, timeout)  # noqa: E701 # fmt: skip
        except BaseException as error:
            if not refused(error):
                tell = self._interrupted()
                if tell is not None:
                    tell(error)
            raise

    def _all_reduce(self, tensors: Any, opts: Any, timeout: timedelta | None) -> Any:
        if type(tensors) is not list or type(opts) is not _OPTIONS or opts.asyncOp:
            return self._long(tensors, opts, timeout)
        try:
            (x,) = tensors
            known = self._known[x.dtype, x.numel(), hash(opts.reduceOp)]
        except KeyError:
            return self._first(x, tensors, opts, timeout)
        except (ValueError, AttributeError):  # not one tensor
            return self._long(tensors, opts, timeout)
        if known is None or not self._comm.repeat(known, x):  # sparse, requires grad, another device: the long way
            return self._long(tensors, opts, timeout)
        return _FINISHED

    def _long(self, tensors: Any, opts: Any, timeout: timedelta | None) -> Any:
        otherwise = self._otherwise()
        assert otherwise is not None, "a group that is called is alive"
        return otherwise(tensors, opts, timeout)

    def _first(self, x: torch.Tensor, tensors: Any, opts: Any, timeout: Any) -> Any:
        """A call of a shape that is not known yet, or that the communicator looks at closely each time."""
        key = (x.dtype, x.numel(), hash(opts.reduceOp))
        name = self._decide(x, opts.reduceOp, key)
        if name is None:
            return self._long(tensors, opts, timeout)
        try:
            self._comm.all_reduce(x, name)
        except InvalidArgument:  # sparse, requires grad, another device: nothing was sent, and the long way knows more
            return self._long(tensors, opts, timeout)
        known = self._comm.known(name, x.dtype, x.numel())
        if known is not None:
            self._known[key] = known
        return _FINISHED

    def _decide(self, x: torch.Tensor, op: Any, key: tuple[Any, ...]) -> str | None:
        """The operation's name where the kernels take the call."""
        if self._site is None or "routing" in (env.text("TRICOMM_LOG") or ""):
            return None  # the long way prints
        try:
            name = operation(op)
            route = backend_choice.decide(self._site, "all_reduce", x.dtype, name, x.numel() * x.itemsize)
        except InvalidArgument:
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
        if route.path == backend_choice.KERNELS:
            return name
        self._known[key] = None
        return None
