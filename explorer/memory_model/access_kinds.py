"""The kind of an access as one number: element size, scope, and plain or multicast address. It decides what can
race."""

from __future__ import annotations

from typing import Any

RELEASES = ("release", "acq_rel")  # semantics
PLAIN = 0
SIZE = 31  # the low bits are the bytes of the element; the bits above them the scope, 0 for a weak access
MULTICAST = 128  # an access by a multicast address, which stands for all ranks' memory


def kind_of(scope: int, itemsize: int, multicast: bool = False) -> int:
    return scope << 5 | itemsize | (MULTICAST if multicast else 0)


def scope_of(kind: Any) -> Any:
    """The scope; 0 for a weak access."""
    return kind >> 5 & 3


def same_size(one: Any, other: Any) -> Any:
    return (one & SIZE) == (other & SIZE)


def apart(one: Any, other: Any) -> Any:
    """True if an alias fence is needed between the two, because exactly one is by a multicast address."""
    return (one ^ other) & MULTICAST > 0
