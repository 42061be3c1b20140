"""Processes that write to a rank's socket without permission: each kind of message that must be refused."""

from __future__ import annotations

import array
import os
import random
import socket
from collections import Counter
from dataclasses import replace
from typing import Any

from tricomm.store import descriptors
from tricomm.store.descriptors import Sender

USER = 65534
RIGHT = 2  # descriptors that a rank sends
# The counter that a message of each kind increments; None: no message arrives.
KINDS: dict[str, str | None] = {
    "another user's claim": "user",
    "another user": None,
    "wrong nonce": "nonce",
    "no descriptor": "descriptors",
    "one too many": "descriptors",
    "twenty": "descriptors",
    "garbage": "record",
    "cut": "record",
    "empty": "record",
    "flipped bit": "record",
    "another address": "address",
    "another purpose": "address",
    "another group": "address",
    "silence": None,
    "gone": None,
}


class Hostile:
    """A hostile peer of the socket of rank `to` at `path`. `sender`: a rank's secrets, part of which it knows."""

    def __init__(self, kind: str, path: str, sender: Sender, to: int, rng: random.Random) -> None:
        self.kind, self._path = kind, path
        told = {
            "wrong nonce": replace(sender, nonce=rng.randbytes(16)),
            "another purpose": replace(sender, what="another"),
            "another group": replace(sender, world_size=sender.world_size + 1),
        }.get(kind, sender)
        valid = told.record(to + (kind == "another address")).pack(None)
        bit = rng.randrange(8 * len(valid))
        self._data = {
            "garbage": rng.randbytes(rng.randrange(1, 600)),
            "cut": valid[: rng.randrange(1, len(valid))],
            "empty": b"",
            "flipped bit": bytes(byte ^ (1 << bit % 8) * (n == bit // 8) for n, byte in enumerate(valid)),
        }.get(kind, valid)
        self._uid = USER if kind == "another user's claim" else os.geteuid()
        self._descriptors = {"no descriptor": 0, "one too many": RIGHT + 1, "twenty": 20}.get(kind, RIGHT)

    def tries(self) -> bool:
        """Whether it got a message into the socket's queue."""
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(self._descriptors)]
        me = descriptors._CREDENTIALS.pack(os.getpid(), self._uid, os.getegid())
        extra: list[Any] = [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, me)]
        if opened:
            extra.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened)))
        root = os.geteuid() == 0
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                own.settimeout(60)
                if self.kind in ("silence", "gone"):
                    own.connect(self._path)
                    return False
                if self.kind == "another user" and root:
                    os.seteuid(USER)
                elif self.kind.startswith("another user") and not root:
                    return False  # only root can be another user
                own.sendmsg([self._data], extra, 0, self._path)
                return True
        except PermissionError:
            return False
        finally:
            if root:
                os.seteuid(0)
            for fd in opened:
                os.close(fd)


def attack(
    rank: int, world_size: int, tell: Any, paths: list[str], senders: list[Sender], count: int, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """Be `count` hostile peers of all kinds in turn, in a separate process; count their kinds and expected counters."""
    rng, kinds, expected = random.Random(seed), Counter[str](), Counter[str]()
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        to = rng.randrange(len(paths))
        kinds[kind] += 1
        if Hostile(kind, paths[to], senders[1 - to], to, rng).tries():
            expected[str(KINDS[kind])] += 1
    return kinds, expected
