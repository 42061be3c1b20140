"""Passes the handle of shared memory, or of a multicast object, from one rank to the others.

    descriptor: rank 0 ── its socket's name, in a record; then file descriptors over the socket ──▶ rank 1
    fabric:     rank 0 ── the handle itself, 64 bytes in a record ──▶ rank 1

A fabric handle needs no directory that the ranks share, but the machine's administrator has to give the ranks an IMEX
channel. Records are exchanged over the control page, which only the group's ranks have mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tricomm.deadline import Deadline
from tricomm.errors import PeerDied
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import FABRIC, HANDLE_BYTES, Driver
from tricomm.store.descriptors import DescriptorSocket, Sender
from tricomm.store.records import NAME_BYTES

TOKEN_BYTES = HANDLE_BYTES
Load = Callable[[int, Callable[[], int]], None]


class DescriptorPassing:
    """Passes the same number of descriptors from each rank to all others, as a stage of a set-up: all ranks `bind`,
    exchange the names, and `take`. `what` names the stage in messages; it closes the descriptors in `exported`."""

    def __init__(self, control: ControlPage, what: str) -> None:
        self.exported: list[int] = []
        self._control, self._what = control, what
        self._socket = DescriptorSocket()

    def bind(self) -> bytes:
        """The name of this rank's socket, `NAME_BYTES` long, for all ranks."""
        if self._control.world_size > 1:
            self._socket.bind()
        return self._socket.name

    def take(
        self, names: Sequence[bytes], mine: Sequence[int], load: Callable[[int, list[int]], None], deadline: Deadline
    ) -> None:
        """Send `mine` to all other ranks, and call `load(rank, descriptors)` for each of them, as
        `DescriptorSocket.exchange`.

        Also raises `PeerDied` if a rank has ended, and an error of the same class if the stage has failed on another
        rank.
        """
        control = self._control

        def look() -> None:
            control.give_up_if_refused()
            ended = [rank for rank in control.peers if not control.alive(rank)]
            if ended:
                raise PeerDied(f"rank(s) {ended} died")

        sender = Sender(control.rank, control.world_size, control.nonce, self._what)
        self._socket.exchange(sender, names, mine, load, deadline, look)
        self._socket.close()
        self._close_exported()

    def abandon(self) -> None:
        """Clean up after any number of steps. Idempotent."""
        self._socket.abandon()
        self._close_exported()

    def _close_exported(self) -> None:
        while self.exported:
            os.close(self.exported.pop())


class Passing(Protocol):
    """Passes a handle of each rank to all others: all ranks `offer` theirs, exchange the tokens, and `take`."""

    def offer(self, driver: Driver, handle: int | None) -> bytes:
        """This rank's token, `TOKEN_BYTES` long, for all ranks; with `handle` None this rank only takes."""

    def take(self, driver: Driver, tokens: Sequence[bytes], load: Load, deadline: Deadline) -> None:
        """Call `load(rank, fetch)` for every other rank; `fetch()` imports its handle, for the caller to release."""

    def abandon(self) -> None:
        """Clean up after any number of steps. Idempotent."""


def passing(sharing: str, control: ControlPage, what: str) -> Passing:
    """The `Passing` for handles made for `sharing` (`DESCRIPTOR` or `FABRIC`); `what` names them in messages."""
    return _ByFabric(control) if sharing == FABRIC else _ByDescriptor(control, what)


def export(driver: Driver, handle: int, exported: list[int]) -> None:
    """Add a descriptor of the memory of `handle` to `exported`, which owns it."""
    exported.append(driver.export_descriptor(handle))
    os.set_inheritable(exported[-1], False)


class _ByDescriptor:
    def __init__(self, control: ControlPage, what: str) -> None:
        self._descriptors = DescriptorPassing(control, what)
        self.abandon = self._descriptors.abandon

    def offer(self, driver: Driver, handle: int | None) -> bytes:
        exported = self._descriptors.exported
        if handle is None:  # every rank has to send a descriptor; the others ignore this one
            exported.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        else:
            export(driver, handle, exported)
        return self._descriptors.bind().ljust(TOKEN_BYTES, b"\0")

    def take(self, driver: Driver, tokens: Sequence[bytes], load: Load, deadline: Deadline) -> None:
        def load_all(rank: int, held: list[int]) -> None:
            load(rank, partial(driver.import_descriptor, held[0]))

        names = [token[:NAME_BYTES] for token in tokens]
        self._descriptors.take(names, self._descriptors.exported, load_all, deadline)


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
