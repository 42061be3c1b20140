"""Every failure of a handshake, on every rank, within its time limits."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from tests import ranks
from tests.store.store_ranks import (
    LAYOUT,
    connect_as,
    connect_over_file,
    good,
    in_threads,
    nothing_left,
    results,
    serve,
    succeed,
    try_handshake,
    try_in_thread,
)
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.handshake import handshake
from tricomm.store.page import NBYTES
from tricomm.store.rendezvous import open_store
from tricomm.store.segments import Segment


def odd_one(size: int, **odd: object) -> list[dict]:
    """Ranks that match, and a last one that does not."""
    return [*good(size)[:-1], good(size)[-1] | odd]


TOKENS = [{"rank": 0, "world": 2, "token": "Secret"}, {"rank": 1, "world": 2, "token": "secret"}]
MISFITS = {
    "duplicate": (
        odd_one(3, rank=1),
        "RendezvousError",
        "duplicate rank",
        "pid {1}",
        "pid {2}",
        "says that it is rank 1, and so does this one",
    ),
    "outside": (odd_one(3, rank=5), "RendezvousError", r"rank 5 is not in 0\.\.2"),
    "negative": (odd_one(3, rank=-1), "RendezvousError", r"rank -1 is not in 0\.\.2"),
    "world sizes": (odd_one(3, world=4), "RendezvousError", "says that the world size is [34]", "says [34]", "rank 2"),
    "layout": (odd_one(2, layout=7), "RendezvousError", "has other options than rank", "memory layout", "1234"),
    "host": (odd_one(2, patch="boot"), "SpansNodes", "is on another host than rank", re.escape(socket.gethostname())),
    "no pidfd, and another namespace": (
        odd_one(2, patch="namespace"),
        "ResourceError",
        "lives in another PID namespace",
        "pidfd_open",
        "--pid=host",
    ),
    "token on one": (odd_one(2, token="secret"), "RendezvousError", "bad MAC", "TRICOMM_TOKEN"),
    "two tokens": (TOKENS, "RendezvousError", "bad MAC", "TRICOMM_TOKEN"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_ranks_that_do_not_fit(tmp_path, misfit):
    claims, error, *words = MISFITS[misfit]
    pids, result = connect_over_file(tmp_path, claims)
    for name, text, seconds in result:
        assert name == error, text
        assert seconds < 2.0 + ranks.BUSY  # at once, not at the timeout
        for word in words:
            assert re.search(word.format(*pids), text), (word, text)
    for _, text, _ in result:
        assert re.match(r"rank -?\d of \d \(pid \d+\): ", text)


def test_one_token_for_all(tmp_path):
    _, result = connect_over_file(tmp_path, [claim | {"token": "secret"} for claim in good(2)])
    assert [name for name, *_ in result] == ["ok", "ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user():
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    with ranks.start(
        2, connect_as, f"tcp://127.0.0.1:{store.port}", good(2)[:1] + [good(2)[1] | {"uid": 65534}], 20.0
    ) as group:
        result = results(group)
    assert [name for name, *_ in result] == ["RendezvousError"] * 2, result
    assert all("runs as uid" in text and "65534" in text and seconds < 2.0 + ranks.BUSY for _, text, seconds in result)


def test_a_missing_rank_and_a_late_one_and_then_all(tmp_path):
    store = HashStore()
    began = time.monotonic()
    result = in_threads(2, lambda r: try_in_thread(store, r, 3, 1.0))
    assert 1.0 <= time.monotonic() - began < 20
    for name, text in result:
        assert name == "RendezvousError"
        assert "timeout after 1 s: rank(s) [2] did not come" in text
    began = time.monotonic()
    name, text = try_in_thread(store, 2, 3, 5.0)
    assert name == "RendezvousError" and "was aborted by rank" in text and "[2] did not come" in text
    assert time.monotonic() - began < 4.5, "the wait ended at its limit of 5 s only"
    assert succeed(3, lambda r: try_in_thread(store, r, 3, 10.0)[0]) == ["ok"] * 3


def test_a_late_duplicate_does_not_disturb_the_group(tmp_path):
    claims = good(2) + [{"rank": 1, "world": 2, "delay": 1.0}]
    with ranks.start(3, stay, f"file://{tmp_path}/store", claims) as group:
        result = group.messages()
        assert result[0][0] == result[1][0] == "ok"
        assert result[2][0] == "RendezvousError" and "still runs: is the number taken?" in result[2][1]
        assert 1.0 <= result[2][2] < 2.0
        assert [outcome.value for outcome in group.results()] == ["ok", "ok", None]


def stay(rank, world_size, tell, url, claims):
    claim = claims[rank]
    store, _, _ = open_store(url, 0, 2, 20)
    time.sleep(claim.get("delay", 0.0))
    tell(try_handshake(store, claim["rank"], 2, 1.0 if rank == 2 else 10.0))
    if rank < 2:
        time.sleep(3)
        return try_handshake(store, rank, 2, 10.0)[0]


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 10, b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(216)])
def test_garbage_in_the_store(garbage):
    store = HashStore()
    store.set("tricomm/handshake/rank/1", garbage)
    with nothing_left():
        name, text = try_in_thread(store, 0, 2, 5.0)
    assert name == "RendezvousError" and "rank 1's record: bad " in text


def test_the_segment_of_another_group_is_refused(monkeypatch):
    """A rank that passes another control page than its record describes."""
    usual = DescriptorSocket.exchange

    def exchange(passing, sender, names, mine, *more):
        other = Segment.create("tricomm-test", NBYTES, shared=False)
        usual(passing, sender, names, [other.fd, mine[1]] if sender.rank == 1 else mine, *more)
        other.close()

    monkeypatch.setattr(DescriptorSocket, "exchange", exchange)
    with nothing_left():
        store = HashStore()
        result = in_threads(2, lambda r: try_in_thread(store, r, 2, 5.0))
    assert [name for name, _ in result] == ["ResourceError"] * 2
    assert all("is not its control page" in text for _, text in result), result


def without_a_server(hurt, body, pause=0.0):
    """Send the signal `hurt` to the store's server of two ranks that run `body`; return their results."""
    with ranks.start(1, serve) as server:
        with ranks.start(2, body, server.message(0), 2.0) as group:
            assert group.messages() == ["open"] * 2
            time.sleep(pause)
            os.kill(server.pids[0], hurt)
            return results(group)


def wait_in_meeting(rank, world_size, tell, port, timeout):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 10)
    tell("open")
    return try_handshake(store, rank, 3, timeout)


@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_dies_while_ranks_wait(hurt):
    for name, text, seconds in without_a_server(hurt, wait_in_meeting, 0.5):
        assert name == "RendezvousError" and re.search(r"store (check|get|set)\('\w+", text), text
        assert seconds < 3.0 + ranks.BUSY and (hurt == signal.SIGKILL or seconds >= 2.0)


def meet_then_work(rank, world_size, tell, port):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 10)
    page = handshake(store, rank, world_size, 10, LAYOUT)
    tell("met")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            store.check(["key"])
        except RuntimeError:
            break
    answers = [page.exchange(b"%d" % step, "work", 10) for step in range(20)]
    page.agree(None, "work", 10)
    page.close()
    return answers


def test_the_group_works_on_when_the_server_dies():
    with ranks.start(1, serve) as server:
        port = server.message(0)
        with ranks.start(2, meet_then_work, port) as group:
            assert group.messages() == ["met"] * 2
            os.kill(server.pids[0], signal.SIGKILL)
            for outcome in group.results():
                assert outcome.value == [[b"%d" % step] * 2 for step in range(20)], outcome.text
