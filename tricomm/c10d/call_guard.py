"""The entry of every call of a group: handles interrupts, and tensors that wrap other tensors.

Ctrl-C, or an exception from a signal handler, can interrupt a call at any line, while the other ranks wait for this
one. So the group is aborted, and the other ranks are told. Any other error that is raised before a call is sent (by an
allocation, by Dynamo, by a dispatch mode of the caller) leaves the group usable.

Only a tensor subclass (TwoTensor, AsyncCollectiveTensor) knows how a call applies to the tensors that it wraps. So such
a call passes its tensors to an operator of torch, and torch's dispatcher passes them to the subclass. The subclass
calls the operator with the inner tensors: it may wait for them first, call once for each, or refuse. The operator makes
the group's call with these.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch.library import Library
from torch.utils import _pytree as pytree

from tricomm.c10d.work_handles import CombinedWork, FinishedWork
from tricomm.errors import InvalidArgument, TricommError
from tricomm.store.tcp.waits import told

# Raised before anything is sent, or by the call itself; the group stays usable.
_REFUSALS = (TricommError, TypeError, ValueError, NotImplementedError)
NOTHING_SENT = "tricomm_nothing_sent"  # attribute of an exception: it was raised before anything was sent
_lib = Library("tricomm", "FRAGMENT")
_pending: dict[int, Callable[[list[torch.Tensor]], None]] = {}
_tokens = itertools.count()
_sending: set[CodeType] = set()


def guard_methods(*names: str) -> Callable[[type], type]:
    """A class decorator: the methods `names` accept wrapper tensors. If one raises an exception that is no refusal, it
    calls `self.interrupted(error)`."""

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, guarded_call(getattr(kind, name)))
        return kind

    return decorate


def guarded_call(method: Any) -> Any:
    """The guarded form of `method` (see `guard_methods`), whose first argument is a group."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        # On one line, so that Python checks for interrupts only inside of the `try`.
        try:
            return _run(method, self, args, keywords)  # noqa: E701
        except BaseException as error:
            if not is_refusal(error):
                self.interrupted(error)
            told(error)
            raise

    return call


def sends(function: Any) -> Any:
    """Decorator: an exception that leaves `function` may have interrupted a call."""
    _sending.add(function.__code__)
    return function


def is_refusal(error: BaseException) -> bool:
    """Whether the group stays usable after `error`: because the call raised it, for its arguments or for a fault, or
    because it was raised before the call was sent and is no interrupt."""
    if not isinstance(error, Exception) or comes_from_handler(error):
        return False
    if isinstance(error, _REFUSALS) or getattr(error, NOTHING_SENT, False):
        return True
    return _codes(error).isdisjoint(_sending)


def comes_from_handler(error: BaseException) -> bool:
    """Whether a signal's handler has raised `error`."""
    return not _codes(error).isdisjoint(_signal_handlers())


def _codes(error: BaseException) -> set[CodeType]:
    return {frame.f_code for frame, _ in walk_tb(error.__traceback__)}


def _signal_handlers() -> set[CodeType]:
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    handlers = [h.func if isinstance(h, functools.partial) else h for h in handlers]
    functions = [f for h in handlers for f in (h, vars(type(h)).get("__call__"))]
    return {f.__code__ for f in functions if hasattr(f, "__code__")}


def _run(method: Any, group: Any, args: Any, keywords: Any) -> Any:
    try:
        return method(group, *args, **keywords)
    except WrapperTensor:
        return call_unwrapped(method, group, args, keywords)


class WrapperTensor(InvalidArgument):
    """A tensor that wraps other tensors was given."""


def check_not_wrapper(x: torch.Tensor, what: str) -> None:
    """Raises `WrapperTensor` if `x` wraps other tensors and has no memory itself."""
    kind = type(x)
    if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise WrapperTensor(f"{what}: a {kind.__name__} wraps other tensors; pass the plain one, as x.to_local() has")


def call_unwrapped(method: Any, group: Any, args: Any, keywords: Any) -> Any:
    """Call `method(group, *args, **keywords)` with the inner tensors, once or more often; returns one handle.

    Raises `InvalidArgument` if the subclass does not know how to unwrap itself.
    """
    leaves, shape = pytree.tree_flatten((args, keywords))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    works: list[Any] = []

    def call(inner: list[torch.Tensor]) -> None:
        for place, tensor in zip(places, inner, strict=True):
            leaves[place] = tensor
        inner_args, inner_keywords = pytree.tree_unflatten(leaves, shape)
        works.append(method(group, *inner_args, **inner_keywords))

    token = next(_tokens)
    _pending[token] = call
    try:
        with torch.no_grad():
            torch.ops.tricomm.unwrapped_(tensors, token)
    except NotImplementedError as error:
        names = ", ".join(sorted({type(t).__name__ for t in tensors}))
        raise InvalidArgument(
            f"the tensors ({names}) wrap other tensors and do not say how to unwrap them; pass the plain ones, as "
            "x.to_local() has"
        ) from error
    finally:
        del _pending[token]
    return CombinedWork(works) if works else FinishedWork([])


_lib.define("unwrapped_(Tensor(a!)[] tensors, int token) -> ()")
_lib.impl("unwrapped_", lambda tensors, token: _pending[token](tensors), "CompositeExplicitAutograd")
_lib.impl("unwrapped_", lambda tensors, token: None, "Meta")  # fake tensors in a trace: no data, no call
