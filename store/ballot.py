"""A vote of several processes with one outcome: the first vote counts, even if its voter dies, and all can read it.

The votes are seals of a memfd. The kernel adds seals atomically, and refuses more after F_SEAL_SEAL. So the outcome
depends neither on the order of stores and loads, nor on a clock, nor on a running process.
"""

from __future__ import annotations

import fcntl
import os

from tricomm.errors import ResourceError
from tricomm.store.descriptors import OwnedDescriptors
from tricomm.store.segments import memfd

_YES, _NO = fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK


class Ballot:
    """A process's access to a vote, until `close`."""

    def __init__(self) -> None:
        """Opens nothing: see `make` and `take`."""
        self._fds = OwnedDescriptors()  # the last one counts

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close()

    def make(self) -> None:
        """A new vote. Raises `ResourceError` if a descriptor is refused."""
        try:
            self._fds.append(memfd("tricomm-ballot"))
        except OSError as error:
            raise ResourceError(f"no descriptor for the vote of the ranks: {error.strerror}") from error

    def take(self, descriptors: list[int]) -> None:
        """Take part in the vote whose descriptor is the last of `descriptors`, instead of the vote that `make` began.
        Removes the descriptor from the list."""
        self._fds.append(descriptors.pop())

    @property
    def fd(self) -> int:
        """The descriptor to pass to others."""
        return self._fds[-1]

    def vote(self, yes: bool) -> bool:
        """Vote, unless a process has voted already; returns the outcome."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, (_YES if yes else _NO) | fcntl.F_SEAL_SEAL)
        except PermissionError:  # sealed: not the first
            pass
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether the first vote is a yes; False if there is none yet."""
        return bool(self._fds) and bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & _YES)

    def close(self) -> None:
        """Idempotent; other processes can still vote."""
        while self._fds:
            os.close(self._fds.pop())
