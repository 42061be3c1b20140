"""The part of the control page that sharing GPU memory relies on, for ranks that are threads of one test."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

from tricomm import errors
from tricomm.store.arenas.local_arena import host_page_address
from tricomm.store.host_words import HostWords

PAGE = 4096


class FakeGroup:
    """A fake of the control page: rank threads that gather small messages, with a time limit."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.condition = threading.Condition()
        self.rounds: dict[int, dict[int, tuple[str, bytes]]] = {}
        self.dead: set[int] = set()
        self.pages = [mmap.mmap(-1, PAGE) for _ in range(world_size)]  # shared, so each has an identity
        self.controls = [FakeControl(self, rank) for rank in range(world_size)]

    def kill(self, rank: int) -> None:
        with self.condition:
            self.dead.add(rank)
            self.condition.notify_all()


class FakeControl:
    def __init__(self, group: FakeGroup, rank: int) -> None:
        self.group, self.rank, self.world_size = group, rank, group.world_size
        self.nonce, self.peers = bytes(16), tuple(r for r in range(group.world_size) if r != rank)
        self.host_words = HostWords(group.pages[rank], host_page_address(group.pages[rank]))
        self.tamper: Callable[[str, bytes], bytes] = lambda what, payload: payload
        self._round = 0

    def close(self) -> None:
        self.host_words.close()

    def alive(self, rank: int) -> bool:
        return rank not in self.group.dead

    def give_up_if_refused(self) -> None:
        with self.group.condition:
            for rank, (_, answer) in self.group.rounds.get(self._round + 1, {}).items():
                if answer[:1] == b"!":
                    kind = answer[1:].decode(errors="replace").partition(" ")[0]
                    raise getattr(errors, kind)(f"rank {self.rank} stopped waiting, because rank {rank} has failed")

    def exchange(
        self,
        payload: bytes,
        what: str,
        timeout: float,
        abort_on_fault: bool = False,
        error: BaseException | None = None,
    ) -> list[bytes]:
        assert len(payload) <= 1024
        mine = b"=" + self.tamper(what, payload)
        if error is not None:
            mine = f"!{type(error).__name__} {error}".encode()[:1024]
        answers = self._gather(mine, what, timeout)
        texts = [(rank, data[1:].decode(errors="replace")) for rank, data in enumerate(answers) if data[:1] == b"!"]
        if texts:
            failed = [(*text.partition(" ")[::2], rank) for rank, text in texts]
            reasons = "; ".join(f"rank {rank}: {text}" for _, text, rank in failed)
            raise getattr(errors, failed[0][0])(f"{what}: {reasons}")
        return [data[1:] for data in answers]

    def agree(self, error: BaseException | None, what: str, timeout: float) -> None:
        self.exchange(b"", what, timeout, error=error)

    def _gather(self, mine: bytes, what: str, timeout: float) -> list[bytes]:
        group, deadline = self.group, time.monotonic() + timeout
        with group.condition:
            self._round += 1
            posted = group.rounds.setdefault(self._round, {})
            posted[self.rank] = what, mine
            group.condition.notify_all()
            while len(posted) < self.world_size:
                gone = sorted(group.dead - posted.keys())
                if gone:
                    raise errors.PeerDied(f"rank(s) {gone} died during {what}")
                if not group.condition.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    late = sorted(set(range(self.world_size)) - posted.keys())
                    raise errors.CollectiveTimeout(f"rank(s) {late} did not reach {what} within {timeout} s")
            assert {stage for stage, _ in posted.values()} == {what}, f"the ranks are at different stages: {posted}"
            return [posted[rank][1] for rank in range(self.world_size)]
