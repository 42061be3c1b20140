"""A rank's call of shrink, as its page shows it."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from tricomm.store.records import NAME_BYTES, NONCE_BYTES

_HEAD = struct.Struct(f"<III??Q{NAME_BYTES}s{NONCE_BYTES}s")
_ERROR_BYTES = 600
PHASES = 8  # of a page's word `step`: the number of the call, and its phase


class Phase(enum.IntEnum):
    """The phases of a rank's call of shrink."""

    WITHDRAWN = 0
    PROPOSED = 1
    INVITED = 2
    READY = 3
    DECIDED = 4


@dataclass(frozen=True)
class Proposal:
    """A rank's latest call of shrink, as its page shows it.

    number   of the call on that rank, from 1
    attempt  of the ranks together to which it belongs, from 1; once it has failed: the latest one that has failed
    exclude  the ranks that it leaves out; None: those that have ended or closed the group
    failed   the attempt that its latest call that failed has failed; 0: none
    socket   the name of the socket at which it takes descriptors
    nonce    of the new group, from the leader
    invited  by rank, the number of the call that the leader invites; 0 for a rank that is left out; () before that
    error    of that call, as `packed_error`
    again    it is a call of replace: new processes come for the ranks that it leaves out
    """

    number: int
    attempt: int
    exclude: frozenset[int] | None
    failed: int = 0
    socket: bytes = bytes(NAME_BYTES)
    nonce: bytes = bytes(NONCE_BYTES)
    invited: tuple[int, ...] = ()
    error: bytes = b""
    again: bool = False

    def pack(self) -> bytes:
        bits = sum(1 << rank for rank in self.exclude or ())
        numbers = self.number, self.attempt, self.failed
        head = _HEAD.pack(*numbers, self.exclude is not None, self.again, bits, self.socket, self.nonce)
        invited = struct.pack(f"<B{len(self.invited)}I", len(self.invited), *self.invited)
        return head + invited + self.error[:_ERROR_BYTES]

    @classmethod
    def unpack(cls, data: bytes, world_size: int) -> Proposal:
        number, attempt, failed, named, again, bits, socket, nonce = _HEAD.unpack_from(data)
        invited = struct.unpack_from(f"<{data[_HEAD.size]}I", data, _HEAD.size + 1)
        exclude = frozenset(rank for rank in range(world_size) if bits >> rank & 1) if named else None
        error = data[_HEAD.size + 1 + 4 * len(invited) :]
        return cls(number, attempt, exclude, failed, socket, nonce, invited, error, again)

    def hopeless(self, gone: set[int]) -> bool:
        """Whether it cannot succeed, because it does not leave out all of these ranks, which have ended."""
        return self.exclude is not None and not gone <= self.exclude

    def asks(self) -> str:
        """The ranks that it leaves out, in words."""
        ranks = "those that have ended" if self.exclude is None else sorted(self.exclude)
        return f"{'replaces' if self.again else 'leaves out'} {ranks}"
