"""A kernel's accesses to memory under the interpreter, and the interfaces that observe or control them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(slots=True)
class Access:
    """One load, store or atomic of one block, before it happens.

    kind        "load", "store", "rmw" (a read-modify-write) or "cas"
    op          of an rmw: "ADD", "XCHG", ...
    lanes       bool: which elements of the tile are not masked
    addresses   uint64 [n]: of those elements
    itemsize    bytes of an element
    sem         None for a plain access, else "relaxed", "acquire", "release" or "acq_rel"; a volatile load is relaxed
    scope       None for a plain access, else "cta", "gpu" or "sys"
    perform     function that performs it, for all elements or for those that a bool [n] selects; returns the old
                values, or None
    """

    kind: str
    lanes: Array
    addresses: Array
    itemsize: int
    sem: str | None
    scope: str | None
    perform: Callable[[Array | None], Array | None] = field(repr=False)
    op: str = ""

    @property
    def reads(self) -> bool:
        return self.kind != "store"

    @property
    def writes(self) -> bool:
        return self.kind != "load"


class Director(Protocol):
    """While it is engaged, decides for every access of the kernels whether and when it happens."""

    def access(self, access: Access) -> None:
        """Call `access.perform` now or later; for a load, rmw or cas before returning."""

    def barrier(self) -> None:
        """The current block has reached a `tl.debug_barrier()`."""

    def compared(self, relation: str, left: Array, right: Array, result: Array) -> None:
        """The current block compares two values, or masks a value with &; `relation` is one of == != < <= > >= &."""


class Observer(Protocol):
    """Sees every access of the kernels while it is installed by `interpreter.observe`."""

    def __call__(self, kind: str, addresses: Array, itemsize: int) -> None:
        """`kind` is load, store or atomic; `addresses` (uint64) of the elements, without masked ones."""


def perform_at_once(access: Access, observers: list[Observer]) -> None:
    """Without a director: show the access to the observers, and perform it."""
    kind = "atomic" if access.kind in ("rmw", "cas") else access.kind
    for observer in observers:
        observer(kind, access.addresses, access.itemsize)
    access.perform(None)
