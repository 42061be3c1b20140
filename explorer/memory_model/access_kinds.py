"""Kinds of accesses in one number: element size, scope and kind of address, on which it depends what can race."""

from __future__ import annotations

from typing import Any

RELEASES = ("release", "acq_rel")  # semantics
PLAIN = 0
SIZE = 31  # the low bits: bytes of the element; above them the scope, 0 for a weak access
MULTICAST = 128  # by an address that stands for all ranks' memory


def kind_of(scope: int, itemsize: int, multicast: bool = False) -> int:
    return scope << 5 | itemsize | (MULTICAST if multicast else 0)


def scope_of(kind: Any) -> Any:
    """The scope; 0 for a weak access."""
    return kind >> 5 & 3


def same_size(one: Any, other: Any) -> Any:
    return (one & SIZE) == (other & SIZE)


def apart(one: Any, other: Any) -> Any:
    """True if an alias fence is needed between the two: one access is by a multicast address, the other is not."""
    return (one ^ other) & MULTICAST > 0
