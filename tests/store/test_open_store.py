"""The store that a rank opens or hosts: its address, its owner, refused URLs, and time limits of its calls."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

import tricomm
from tests import ranks
from tests.open_files import open_files
from tests.store.store_ranks import LAYOUT, free_port, nothing_left, try_in_thread
from tricomm.errors import InvalidArgument, RendezvousError
from tricomm.store.bounded_store import BoundedStore
from tricomm.store.handshake import handshake
from tricomm.store.rendezvous import open_store


def listeners() -> set[str]:
    """Addresses (hex, as in /proc/net/tcp) on which this process listens."""
    inodes = set(open_files().values())
    results = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            for line in table.read().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    results.add(fields[1].split(":")[0])
    return results


def listen(rank, world_size, tell, how):
    before = listeners()
    port = free_port()
    if how == "torch":
        store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), False)
    else:
        store, _, _ = open_store(f"tcp://{how}:{port}?rank=0&world_size=1", None, None, 10)
        again, _, _ = open_store(f"tcp://{how}:{port}?rank=0&world_size=1", None, None, 10)
        assert again is store
    store.set("key", "value")
    assert store.get("key") == b"value"
    return listeners() - before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_listens_on_loopback_only(host):
    [result] = ranks.run(1, listen, host)
    assert result == {"0100007F"} or result == {"00000000000000000000000001000000"}


def test_the_scan_finds_a_wildcard():
    [result] = ranks.run(1, listen, "torch")
    assert result == {"0" * 32} or result == {"0" * 8}


def test_the_file_is_private_to_the_user(tmp_path):
    path = tmp_path / "store"
    store, _, _ = open_store(f"file://{path}", 0, 1, 5)
    store.set("key", "value")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path = tmp_path / "open"
    path.touch()
    path.chmod(0o666)
    with pytest.raises(RendezvousError, match="mode 666.*can be written by others"):
        open_store(f"file://{path}", 0, 1, 5)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "store")
    with pytest.raises(RendezvousError, match="it is a symbolic link"):
        open_store(f"file://{link}", 0, 1, 5)


@pytest.mark.parametrize(
    "url,environment,words",
    [
        ("mpi://", {}, "use env://, tcp://host:port or file:///path"),
        ("", {}, "use env://"),
        (7, {}, "a string is needed"),
        ("env://", {}, "rank is missing: .*set RANK"),
        ("env://", {"RANK": "0"}, "world_size is missing: .*set WORLD_SIZE"),
        ("env://", {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT: start with torchrun"),
        ("env://", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "needs MASTER_PORT"),
        ("env://", {"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not an integer"),
        ("env://?rank=0&world_size=0", {}, "world_size=0"),
        ("tcp://127.0.0.1:29655?rank=3&world_size=2", {}, "rank=3: the ranks of world_size=2 are 0 to 1"),
        ("env://", {"RANK": "-1", "WORLD_SIZE": "2"}, "rank=-1: the ranks of world_size=2 are 0 to 1"),
        ("env://?rank=x&world_size=2", {}, "rank='x' is not a number"),
        ("env://?rank=0&world_size=2&size=2", {}, "unknown size"),
        ("tcp://127.0.0.1?rank=0&world_size=2", {}, "host and port are needed"),
        ("tcp://:29500?rank=0&world_size=2", {}, "host and port are needed"),
        ("tcp://127.0.0.1:99999?rank=0&world_size=2", {}, "[Pp]ort"),
        ("tcp://127.0.0.1:0?rank=0&world_size=2", {}, "port 0 is not in"),
        ("file://relative?rank=0&world_size=2", {}, "an absolute path is needed"),
        ("file:///no/such/directory/store?rank=0&world_size=2", {}, "'/no/such/directory' does not exist; make it"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_urls(monkeypatch, url, environment, words):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=words):
        open_store(url, None, None, 5)


def test_url_and_argument_that_differ(tmp_path):
    with pytest.raises(InvalidArgument, match="says rank=1, the argument says 0"):
        open_store(f"file://{tmp_path}/store?rank=1&world_size=2", 0, None, 5)


@pytest.mark.parametrize(
    "rank,world_size", [(3, 2), (-1, 2), (2, 2), ("0", 2), (True, 2), (0, 0), (0, 2.0), (0, 1 << 40)]
)
def test_an_impossible_rank_is_refused_before_anything_is_sent(rank, world_size):
    store = HashStore()
    with pytest.raises(InvalidArgument, match=rf"(rank|world_size)={(rank, world_size)[rank == 0]!r}: "):
        tricomm.Communicator(store, rank, world_size, "cpu", timeout=1)
    assert store.num_keys() == 0


@pytest.mark.parametrize("rank,world_size,timeout", [(True, 2, 1), (0, 0, 1), (0, 1 << 20, 1), (0, 1, 0), ("0", 1, 1)])
def test_invalid_arguments(rank, world_size, timeout):
    with pytest.raises(InvalidArgument):
        handshake(HashStore(), rank, world_size, timeout, LAYOUT)


def test_no_rank_hosts_the_store():
    port, began = free_port(), time.monotonic()
    with nothing_left():
        words = rf"no store at 127.0.0.1:{port}: timeout after [01]\.\d s.*rank 0"
        with pytest.raises(RendezvousError, match=words) as error:
            open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 1.0)
    assert 0.9 <= time.monotonic() - began < 20
    del error


def test_the_port_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, began = taken.getsockname()[1], time.monotonic()
        with nothing_left():
            with pytest.raises(
                RendezvousError, match=f"cannot host a store at 127.0.0.1:{port} .Address already in use"
            ):
                open_store(f"tcp://127.0.0.1:{port}?rank=0&world_size=2", None, None, 30)
            waited = time.monotonic() - began
        assert waited < 20, "the wait ended at its limit of 30 s only"


def open_silent(rank, world_size, tell, port):
    began = time.monotonic()
    try:
        open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 1.5)
    except RendezvousError as error:
        return str(error), time.monotonic() - began
    return "opened", 0


def test_a_silent_server_listens_on_the_port():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        [(text, seconds)] = ranks.run(1, open_silent, port)
    assert f"127.0.0.1:{port}" in text and 1.0 <= seconds < 2.5 + ranks.BUSY


def test_bounded_calls_end_and_leave_no_thread():
    class Silent:
        def set(self, key, value):
            time.sleep(1.5)

        def add(self, key, amount):
            raise ValueError("first line\nsecond line")

    with nothing_left():
        bounded = BoundedStore(HashStore(), 5)
        bounded.set("key", b"\0\xff")
        assert bounded.read("key") == b"\0\xff" and bounded.check("key") and not bounded.check("other")
        assert bounded.read("other") is None and bounded.add("n", 2) == 2
        bounded.close()
        bounded.close()
    with nothing_left():
        bounded = BoundedStore(Silent(), 0.5)
        with pytest.raises(RendezvousError, match=r"store add\('n'\) failed after 0\.\d s: ValueError: first line$"):
            bounded.add("n", 1)
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=r"store set\('key'\): timeout after 0\.[45] s"):
            bounded.set("key", b"")
        assert 0.4 <= time.monotonic() - began < 2.5 and not bounded.usable
        with pytest.raises(RendezvousError, match="still does not answer store set"):
            bounded.add("n", 1)
        bounded.close()
        time.sleep(1.5)


def host(rank, world_size, tell):
    """Host a store as rank 0 does, send its port to the others, and meet over it."""
    port = free_port()
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=0&world_size=2", None, None, 30)
    tell(port)
    return try_in_thread(store, 0, 2, 30)[0]


def join_there(rank, world_size, tell, port):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 30)
    return try_in_thread(store, 1, 2, 30)[0]


def test_strangers_at_the_stores_port_disturb_no_rank():
    """Send HTTP and garbage, and open silent connections, before the ranks meet over the same port."""
    garbage = [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\x16\x03\x01" + bytes(500), os.urandom(4096), b"\0"]
    with ranks.start(1, host) as server, contextlib.ExitStack() as strangers:
        port = server.message(0)
        for number in range(200):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            if number % 2:
                with contextlib.suppress(OSError):  # it may have been closed already
                    stranger.sendall(garbage[number // 2 % len(garbage)])
        assert ranks.run(1, join_there, port) == ["ok"]
        assert [outcome.value for outcome in server.results()] == ["ok"]


def test_no_wait_is_counted_on_a_clock_that_jumps():
    """Only reports to users have the time of day: statistics, and the flight recorder's entries."""
    root = Path(tricomm.__file__).parents[1]
    files = [f for room in ("tricomm", "store", "kernels") for f in (root / room).rglob("*.py")]
    assert len(files) > 150
    says = re.compile(r"\btime\.time(_ns)?\(|from time import|\bCLOCK_REALTIME\b|\bdatetime\.(now|utcnow|today)\(")
    recorded = {"call_queue.py", "call_recording.py", "call_states.py", "flight_document.py", "point_to_point.py"}
    found = {f.name for f in files if says.search(f.read_text())}
    assert found == {"counters.py", "publish.py", "launcher.py"} | recorded
