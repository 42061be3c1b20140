"""How the handle of GPU memory, or of a multicast object, gets from one rank to the others.

    descriptor: rank 0 ── its socket's name, in a record; then a file descriptor over the socket ──▶ rank 1
    fabric:     rank 0 ── the handle itself, 64 bytes in a record ──▶ rank 1

A fabric handle needs no directory that the ranks share, but a permission: the machine's administrator has to give the
ranks an IMEX channel. Records go over the control page, which only the group's ranks have mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tricomm.deadline import Deadline
from tricomm.store.collective_stages import pass_descriptors
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import FABRIC, HANDLE_BYTES, Driver
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.records import NAME_BYTES

TOKEN_BYTES = HANDLE_BYTES
Load = Callable[[int, Callable[[], int]], None]


class Passing(Protocol):
    """Passes one handle of each rank to all others: all ranks `offer`, exchange the tokens, and `take`."""

    def offer(self, driver: Driver, handle: int | None) -> bytes:
        """This rank's token, `TOKEN_BYTES` long, for all ranks; with `handle` None this rank only takes."""

    def take(self, driver: Driver, tokens: Sequence[bytes], load: Load, deadline: Deadline) -> None:
        """Call `load(rank, fetch)` for every other rank; `fetch()` imports its handle, for the caller to release."""

    def abandon(self) -> None:
        """Clean up, however far it has come. Idempotent."""


def passing(sharing: str, control: ControlPage, what: str) -> Passing:
    """How to pass handles made for `sharing` (`DESCRIPTOR` or `FABRIC`); `what` names them in messages."""
    return _ByFabric(control) if sharing == FABRIC else _ByDescriptor(control, what)


class _ByDescriptor:
    def __init__(self, control: ControlPage, what: str) -> None:
        self._control, self._what = control, what
        self._socket = DescriptorSocket()
        self._exported: list[int] = []  # at most one

    def offer(self, driver: Driver, handle: int | None) -> bytes:
        if handle is None:  # every rank has to send a descriptor; the others ignore this one
            self._exported.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        else:
            self._exported.append(driver.export_descriptor(handle))
            os.set_inheritable(self._exported[0], False)
        self._socket.bind()
        return self._socket.name.ljust(TOKEN_BYTES, b"\0")

    def take(self, driver: Driver, tokens: Sequence[bytes], load: Load, deadline: Deadline) -> None:
        def load_all(rank: int, held: list[int]) -> None:
            load(rank, partial(driver.import_descriptor, held[0]))

        names = [token[:NAME_BYTES] for token in tokens]
        pass_descriptors(self._control, self._socket, names, self._exported, load_all, self._what, deadline)
        self._socket.close()
        self._close_exported()

    def abandon(self) -> None:
        self._socket.abandon()
        self._close_exported()

    def _close_exported(self) -> None:
        while self._exported:
            os.close(self._exported.pop())


class _ByFabric:
    def __init__(self, control: ControlPage) -> None:
        self._rank = control.rank

    def offer(self, driver: Driver, handle: int | None) -> bytes:
        return bytes(TOKEN_BYTES) if handle is None else driver.export_fabric(handle)

    def take(self, driver: Driver, tokens: Sequence[bytes], load: Load, deadline: Deadline) -> None:
        for rank, token in enumerate(tokens):
            if rank != self._rank:
                load(rank, partial(driver.import_fabric, token))

    def abandon(self) -> None:
        """Nothing to do: a fabric handle does not keep the memory alive."""
