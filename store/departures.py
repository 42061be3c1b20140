"""How a process leaves the set-up of a group, and which other processes stop with it.

    why it leaves                                            before the ranks agree   once they have agreed
    the group is set up                                      CONNECTED                CONNECTED
    another process has told the reason                      QUIET                    QUIET
    shared: each rank notices it, as its own limit passes    QUIET; strict: TOLD_ALL  TOLD
    a peer's process has ended                               TOLD                     TOLD
    own: an error of this rank alone                         TOLD_ALL                 TOLD

    CONNECTED, QUIET   stop no other process
    TOLD               stops every process whose record this one has read
    TOLD_ALL           stops these, and every process that joins later, which gets the reason once

After a QUIET end the other ranks keep waiting, and this one may try again. In a strict set-up they stop as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tricomm.errors import CollectiveTimeout, GroupAborted, PeerDied, PeerStalled, RendezvousError, TricommError
from tricomm.store import process
from tricomm.store.records import NONCE_BYTES, MessageHeader, text_of

NOBODY = bytes(NONCE_BYTES)
_SHARED = (RendezvousError, PeerStalled, CollectiveTimeout, GroupAborted)
_HEAD = struct.Struct(f"<BiiQ{NONCE_BYTES}s32s512s")


class Ending(IntEnum):
    """How a set-up ends on one rank, ordered by the number of processes that stop with it."""

    CONNECTED = 0
    QUIET = 1
    TOLD = 2
    TOLD_ALL = 3


@dataclass(frozen=True)
class Rules:
    """How a set-up watches its ranks and tells them of errors. The defaults are for a c10d group.

    strict    see above
    kinds     errors that keep their class on the ranks that are told; others are a `RendezvousError` there
    prefix    begins messages; None: this rank's number
    state     the state of a rank's process, as `process.state_of`
    on_look   is called in each `look`, and may raise
    """

    strict: bool = False
    kinds: tuple[type[TricommError], ...] = (PeerDied,)
    prefix: str | None = None
    state: Callable[[Any], str | None] = process.state_of
    on_look: Callable[[], None] = lambda: None


USUAL = Rules()


def ending(error: BaseException, told: bool, agreed: bool, strict: bool) -> Ending:
    """The ending for an error, from the table above. `told`: another process has told the error; `agreed`: the ranks
    have agreed."""
    if told:
        return Ending.QUIET
    if agreed or isinstance(error, PeerDied):
        return Ending.TOLD
    return Ending.QUIET if isinstance(error, _SHARED) and not strict else Ending.TOLD_ALL


@dataclass(frozen=True)
class Departure:
    """A process that has left: `nonce` is its nonce, `known` are the nonces that it has read: one for each rank of its
    group, in order (`NOBODY` if there was none), followed by nonces of earlier groups. `kind` and `text` are its
    error."""

    ending: Ending
    rank: int
    world_size: int
    pid: int
    nonce: bytes
    known: tuple[bytes, ...]
    kind: str = ""
    text: str = ""

    def seal(self, header: MessageHeader, token: bytes | None) -> bytes:
        kind, text = self.kind.encode()[:32], self.text.encode(errors="replace")[:512]
        head = _HEAD.pack(self.ending, self.rank, self.world_size, self.pid, self.nonce, kind, text)
        return header.seal(head + b"".join(self.known), token)

    @classmethod
    def open(cls, sealed: bytes, header: MessageHeader, token: bytes | None) -> Departure:
        """The departure in `sealed`. Pure. Raises `RendezvousError` as `header.open` does, and if the data are no
        departure."""
        data = header.open(sealed, token)
        if len(data) < _HEAD.size or data[0] > max(Ending):
            raise RendezvousError(f"rank {header.rank}'s message: bad length or ending")
        end, rank, world_size, pid, nonce, kind, text = _HEAD.unpack_from(data)
        known = tuple(data[at : at + NONCE_BYTES] for at in range(_HEAD.size, len(data), NONCE_BYTES))
        return cls(Ending(end), rank, world_size, pid, nonce, known, text_of(kind), text_of(text))

    def stops(self, rank: int, nonce: bytes, earlier: Container[bytes]) -> bool:
        """Whether it stops the process of `rank` that has this `nonce`; `earlier`: nonces of which earlier processes of
        that rank knew."""
        read = self.known[rank] if rank < min(self.world_size, len(self.known)) else NOBODY
        comes_later = read == NOBODY and self.nonce not in earlier
        return self.ending >= Ending.TOLD and (read == nonce or self.ending == Ending.TOLD_ALL and comes_later)


def reason(error: BaseException, rank: int) -> tuple[str, str]:
    """The class of an error and its text, for other ranks."""
    kind = type(error).__name__
    return kind, f"{kind}: {error}" if isinstance(
        error, TricommError
    ) else f"rank {rank} was stopped by {kind}: {error}"
