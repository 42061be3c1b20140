"""Ranks for the tests of the handshake and of shared memory: threads of this process, and bodies for real processes."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, TCPStore

from tests import ranks
from tests.open_files import open_files
from tricomm.errors import TricommError
from tricomm.store import process
from tricomm.store.control import ControlPage
from tricomm.store.handshake import handshake
from tricomm.store.rendezvous import open_store

LAYOUT = 0x1234


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holdings(sockets: bool = True) -> dict[str, Any]:
    """The resources of this process that a group could leave; no sockets if it hosts a store, whose clients change.

    In /dev/shm only names that could be tricomm's count, because all processes of the machine share it.
    """
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[-2:] for line in maps if "tricomm" in line and "memfd" in line]
    names = sorted(t.name for t in threading.enumerate())
    return {
        "fds": sorted(f for f in open_files().values() if sockets or not f.startswith("socket:")),
        "maps": mapped,
        "threads": names,
        "shm": [name for name in os.listdir("/dev/shm") if "tricomm" in name],
    }


@contextmanager
def nothing_left() -> Iterator[None]:
    before = holdings()
    yield
    assert more_than(before) == {}


def more_than(before: dict[str, Any], sockets: bool = True) -> dict[str, list[Any]]:
    """The resources of this process that were not there `before`, after at most 2 s for threads that are ending."""
    end = time.monotonic() + 2.0
    while True:
        left = {}
        for kind, result in holdings(sockets).items():
            surplus = Counter(map(str, result)) - Counter(map(str, before[kind]))
            if surplus:
                left[kind] = sorted(surplus)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def in_threads(world_size: int, body: Callable[[int], Any], seconds: float = 30) -> list[Any]:
    """Run `body(rank)` in a thread "rank N" for each rank; return their results and errors."""
    outcomes: list[Any] = [TimeoutError(f"no outcome within {seconds} s")] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return outcomes


def succeed(world_size: int, body: Callable[[int], Any], seconds: float = 30) -> list[Any]:
    outcomes = in_threads(world_size, body, seconds)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@contextmanager
def pages(world_size: int) -> Iterator[list[ControlPage]]:
    """Control pages of ranks that are threads of this process."""
    store = HashStore()
    made: list[ControlPage] = succeed(world_size, lambda rank: handshake(store, rank, world_size, 10, LAYOUT))
    try:
        yield made
    finally:
        for page in made:
            page.close()


def serve(rank: int, world_size: int, tell: Callable[[Any], None]) -> None:
    """A process that hosts a TCPStore until it is killed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, None, True, timedelta(seconds=30), False, master_listen_fd=os.dup(listener.fileno())
        )
    tell(port)
    time.sleep(600)
    del store


def try_handshake(store: Any, rank: int, world_size: int, timeout: float, layout: int = LAYOUT) -> tuple[Any, ...]:
    """("ok", members' pids, seconds), or (class of the error, its text, seconds); checks that nothing is left."""
    before = holdings(sockets=False)
    began = time.monotonic()
    try:
        page = handshake(store, rank, world_size, timeout, layout)
    except TricommError as error:
        result = type(error).__name__, str(error), time.monotonic() - began
    else:
        result = "ok", [page.pid(r) for r in range(world_size)], time.monotonic() - began
        page.exchange(b"", "all are here", 10)
        page.close()
        del page
    if "is the store's server stopped" not in result[1]:  # a store call that never returns keeps its thread
        assert more_than(before, sockets=False) == {}
    return result


def connect_as(rank: int, world_size: int, tell: Any, url: str, claims: list[dict[str, Any]], timeout: float) -> Any:
    """Run the handshake with the arguments `claims[rank]`: rank, world size, layout, delay, token, patch."""
    claim = claims[rank]
    if "token" in claim:
        os.environ["TRICOMM_TOKEN"] = claim["token"]
    if claim.get("patch") == "boot":
        process.boot_id = lambda: b"another host    "
    if claim.get("patch") == "namespace":
        process.pid_namespace, process.is_pidfd = lambda: 42, lambda fd: False
    store, _, _ = open_store(url, 1 if url.startswith("tcp") else 0, 2, 10)
    if "uid" in claim:
        os.seteuid(claim["uid"])
    tell(os.getpid())
    time.sleep(claim.get("delay", 0.0))
    return try_handshake(store, claim["rank"], claim["world"], timeout, claim.get("layout", LAYOUT))


TIMEOUT = 8.0  # errors are raised long before


def good(world_size: int) -> list[dict]:
    return [{"rank": r, "world": world_size} for r in range(world_size)]


def results(group: ranks.Ranks) -> list[tuple]:
    return [outcome.value or (outcome.error, outcome.text, outcome.code) for outcome in group.results()]


def connect_over_file(tmp_path, claims, timeout=TIMEOUT):
    with ranks.start(len(claims), connect_as, f"file://{tmp_path}/store", claims, timeout) as group:
        pids = group.messages()
        return pids, results(group)


def try_in_thread(store, rank, world_size, timeout):
    try:
        page = handshake(store, rank, world_size, timeout, LAYOUT)
    except TricommError as error:
        return type(error).__name__, str(error)
    page.exchange(b"", "all are here", 10)
    page.close()
    return "ok", ""
