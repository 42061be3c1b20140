"""The entry of every call of a group: interrupts, and tensors that wrap other tensors.

Ctrl-C, or an exception that a signal handler raises, may come at any line of a call. The other ranks may be waiting for
this one at that moment. So the group is given up, and they are told.

Only a tensor subclass that wraps other tensors, as TwoTensor and AsyncCollectiveTensor do, knows what a call means for
its inner tensors. So the tensors of such a call pass through an operator of torch's. torch's dispatcher hands them to
the subclass. The subclass calls the operator with the inner tensors: it may wait for them first, call once for each, or
refuse. The operator makes the group's call with these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library
from torch.utils import _pytree as pytree

from tricomm.c10d.work_handles import CombinedWork, FinishedWork, told
from tricomm.errors import InvalidArgument, TricommError

# Errors of a call's own, raised before anything is sent or by the call itself; the group goes on.
_REFUSALS = (TricommError, TypeError, ValueError, NotImplementedError)
NOTHING_SENT = "tricomm_nothing_sent"  # attribute of an exception by which a native backend refuses a call
_lib = Library("tricomm", "FRAGMENT")
_pending: dict[int, Callable[[list[torch.Tensor]], None]] = {}
_tokens = itertools.count()


def guard_methods(*names: str) -> Callable[[type], type]:
    """Class decorator: the methods `names` take wrapper tensors, and call `self.interrupted(error)` if a foreign
    exception leaves them."""

    def decorate(kind: type) -> type:
        for name in names:
            setattr(kind, name, guarded_call(getattr(kind, name)))
        return kind

    return decorate


def guarded_call(method: Any) -> Any:
    """`method`, whose first argument is a group, as `guard_methods` makes it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        # On one line: Python then looks for interrupts inside of the `try` only.
        try: return _run(method, self, args, keywords)  # noqa: E701 # fmt: skip
        except BaseException as error:
            if not is_refusal(error):
                self.interrupted(error)
            told(error)
            raise

    return call


def is_refusal(error: BaseException) -> bool:
    """Whether `error` is one that a call itself raises, for its arguments or for a fault; others are interrupts."""
    return isinstance(error, _REFUSALS) or getattr(error, NOTHING_SENT, False)


def _run(method: Any, group: Any, args: Any, keywords: Any) -> Any:
    try:
        return method(group, *args, **keywords)
    except WrapperTensor:
        return call_unwrapped(method, group, args, keywords)


class WrapperTensor(InvalidArgument):
    """A tensor that wraps other tensors was given."""


def check_not_wrapper(x: torch.Tensor, what: str) -> None:
    """Raises `WrapperTensor` if `x` wraps other tensors instead of having memory of its own."""
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
