"""Meeting: over every kind of store, again and again, and every way in which it can fail, with both time bounds."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from tests import ranks
from tests.store.store_ranks import (
    LAYOUT,
    free_port,
    holdings,
    in_threads,
    meet_as,
    nothing_left,
    serve,
    succeed,
    try_to_meet,
)
from tricomm.errors import InvalidArgument, RendezvousError, TricommError
from tricomm.store.control import State
from tricomm.store.deadline import Bounded
from tricomm.store.rendezvous import meet, open_store

TIMEOUT = 8.0  # what ends by an error ends long before


def good(world_size: int) -> list[dict]:
    return [{"rank": r, "world": world_size} for r in range(world_size)]


def results(group: ranks.Ranks) -> list[tuple]:
    return [outcome.value or (outcome.error, outcome.text, outcome.code) for outcome in group.results()]


def meet_over_file(tmp_path, claims, timeout=TIMEOUT):
    with ranks.start(len(claims), meet_as, f"file://{tmp_path}/store", claims, timeout) as group:
        pids = [group.message(r) for r in range(len(claims))]
        return pids, results(group)


# Every kind of store


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_threads_over_a_hash_store(world_size):
    store = HashStore()
    with nothing_left():
        pages = succeed(world_size, lambda r: meet(store, r, world_size, 10, LAYOUT))
        assert len({p.group for p in pages}) == 1
        assert not [name for name in holdings()["fds"] if "tricomm" in name]  # nobody else can attach any more
        assert all(p.state(r) == State.READY for p in pages for r in range(world_size))
        for page in pages:
            page.close()
        del pages, page


def by_url(rank, world_size, tell, url, environment):
    os.environ.update({k: v.format(rank=rank) for k, v in environment.items()})
    store, mine, world = open_store(url.format(rank=rank), None, None, 20)
    return mine, world, try_to_meet(store, mine, world, 20)[0]


@pytest.mark.parametrize("kind", ["env", "tcp", "tcp with query", "file", "agent"])
def test_processes_over_every_url(kind, tmp_path):
    port = str(free_port())
    numbers = {"RANK": "{rank}", "WORLD_SIZE": "3"}
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    agent = None
    if kind == "agent":
        agent = TCPStore("127.0.0.1", int(port), None, True, timedelta(seconds=20), False)
        master |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    url, environment = {
        "env": ("env://", numbers | master),
        "agent": ("env://", numbers | master),
        "tcp": (f"tcp://127.0.0.1:{port}", numbers),
        "tcp with query": (f"tcp://localhost:{port}?rank={{rank}}&world_size=3", {}),
        "file": (f"file://{tmp_path}/store", numbers),
    }[kind]
    assert ranks.run(3, by_url, url, environment) == [(r, 3, "ok") for r in range(3)]
    if agent is not None:
        assert agent.get("/worker/attempt_2/tricomm/0/met") == b"1"


def again_and_again(rank, world_size, tell, url, times):
    store, rank, world_size = open_store(url, rank, world_size, 20)
    assert try_to_meet(store, rank, world_size, 20)[0] == "ok"
    before, groups = holdings(sockets=False), set()
    for _ in range(times):
        page = meet(store, rank, world_size, 20, LAYOUT)
        groups.add(page.group)
        assert page.exchange(page.nonce, "work", 20) == [page.nonce] * world_size
        page.close()
    del page
    assert holdings(sockets=False) == before
    return groups


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_again_and_again_over_one_store(scheme, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    times = 200 if scheme == "tcp" else 50
    one, two = ranks.run(2, again_and_again, url, times)
    assert one == two and len(one) == times


def two_groups(rank, world_size, tell, url):
    store, rank, world_size = open_store(url, rank, world_size, 20)
    order = ["a", "b"]
    pages = {name: meet(PrefixStore(name, store), rank, world_size, 20, LAYOUT) for name in order}
    said = {name: page.exchange(name.encode(), "name", 20) for name, page in pages.items()}
    groups = {page.group for page in pages.values()}
    for page in pages.values():
        page.close()
    return said, len(groups)


def test_several_groups_over_one_store_with_prefixes(tmp_path):
    for said, groups in ranks.run(3, two_groups, f"file://{tmp_path}/store"):
        assert said == {"a": [b"a"] * 3, "b": [b"b"] * 3} and groups == 2


def test_opposite_orders_of_two_groups_do_not_deadlock_but_fail_in_time():
    store = HashStore()

    def body(rank):
        for name in ("ab", "ba")[rank]:
            meet(PrefixStore(name, store), rank, 2, 1.0, LAYOUT)

    began = time.monotonic()
    assert [type(o) for o in in_threads(2, body)] == [RendezvousError] * 2
    assert 1.0 <= time.monotonic() - began < 2.0


# Every way to fail


@pytest.mark.parametrize(
    "claims,error,words",
    [
        pytest.param(
            [{"rank": 0, "world": 3}, {"rank": 1, "world": 3}, {"rank": 1, "world": 3}],
            "RendezvousError",
            ["duplicate rank", "pid {1}", "pid {2}", "both say that they are rank 1"],
            id="duplicate",
        ),
        pytest.param(
            [{"rank": 0, "world": 3}, {"rank": 1, "world": 3}, {"rank": 5, "world": 3}],
            "RendezvousError",
            [r"rank 5 is not in 0\.\.2"],
            id="outside",
        ),
        pytest.param(
            [{"rank": 0, "world": 3}, {"rank": 1, "world": 3}, {"rank": -1, "world": 3}],
            "RendezvousError",
            [r"rank -1 is not in 0\.\.2"],
            id="negative",
        ),
        pytest.param(
            [{"rank": 0, "world": 3}, {"rank": 1, "world": 3}, {"rank": 2, "world": 4}],
            "RendezvousError",
            ["says that the world size is [34]", "says [34]", "rank 2"],
            id="world sizes",
        ),
        pytest.param(
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "layout": 7}],
            "RendezvousError",
            ["has other options than rank", "memory layout", "1234"],
            id="layout",
        ),
        pytest.param(
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "patch": "boot"}],
            "RendezvousError",
            ["is on another host than rank", re.escape(socket.gethostname())],
            id="host",
        ),
        pytest.param(
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "patch": "namespace"}],
            "ResourceError",
            ["lives in another PID namespace than rank", "--pid=host"],
            id="namespace",
        ),
        pytest.param(
            [{"rank": 0, "world": 2}, {"rank": 1, "world": 2, "token": "secret"}],
            "RendezvousError",
            ["bad MAC", "TRICOMM_TOKEN"],
            id="token on one",
        ),
        pytest.param(
            [{"rank": 0, "world": 2, "token": "Secret"}, {"rank": 1, "world": 2, "token": "secret"}],
            "RendezvousError",
            ["bad MAC", "TRICOMM_TOKEN"],
            id="two tokens",
        ),
    ],
)
def test_ranks_that_do_not_fit(tmp_path, claims, error, words):
    pids, found = meet_over_file(tmp_path, claims)
    for name, text, seconds in found:
        assert name == error, text
        assert seconds < 2.0  # at once, not when the time is up
        for word in words:
            assert re.search(word.format(*pids), text), (word, text)
    for _, text, _ in found:
        assert re.match(r"rank -?\d of \d \(pid \d+\): ", text)


def test_one_token_for_all(tmp_path):
    _, found = meet_over_file(tmp_path, [claim | {"token": "secret"} for claim in good(2)])
    assert [name for name, *_ in found] == ["ok", "ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user():
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
    with ranks.start(
        2, meet_as, f"tcp://127.0.0.1:{store.port}", good(2)[:1] + [good(2)[1] | {"uid": 65534}], 4.0
    ) as group:
        found = results(group)
    assert [name for name, *_ in found] == ["RendezvousError"] * 2, found
    assert all("runs as uid" in text and "65534" in text and seconds < 2 for _, text, seconds in found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_segment_cannot_be_opened_by_another_user(tmp_path):
    with ranks.start(1, hold_a_segment) as group:
        pid, fd = group.message(0)
        [(name, code)] = ranks.run(1, open_as_nobody, pid, fd)
    assert name == "PermissionError" and code == 13


def hold_a_segment(rank, world_size, tell):
    from tricomm.store.segments import Segment

    segment = Segment.create("tricomm-test", 4096)
    tell((os.getpid(), segment.fd))
    time.sleep(60)
    segment.close()


def open_as_nobody(rank, world_size, tell, pid, fd):
    os.setegid(65534)
    os.seteuid(65534)
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
    except OSError as error:
        return type(error).__name__, error.errno
    return "opened", 0


def test_a_missing_rank_and_a_late_one_and_then_all(tmp_path):
    store = HashStore()
    began = time.monotonic()
    found = in_threads(2, lambda r: try_in_thread(store, r, 3, 1.0))
    assert 1.0 <= time.monotonic() - began < 2.0
    for name, text in found:
        assert name == "RendezvousError"
        assert "rank(s) [2] did not come" in text and "within 1 s" in text
        assert f"rank 0 (pid {os.getpid()}, world size 3)" in text and "rank 1 (pid" in text
    began = time.monotonic()
    name, text = try_in_thread(store, 2, 3, 5.0)
    assert name == "RendezvousError" and "meeting 1 was given up by rank" in text and "[2] did not come" in text
    assert time.monotonic() - began < 0.5
    assert succeed(3, lambda r: try_in_thread(store, r, 3, 10.0)[0]) == ["ok"] * 3


def try_in_thread(store, rank, world_size, timeout):
    try:
        page = meet(store, rank, world_size, timeout, LAYOUT)
    except TricommError as error:
        return type(error).__name__, str(error)
    page.exchange(b"", "all are here", 10)
    page.close()
    return "ok", ""


def test_a_rank_outside_after_many_meetings():
    store = HashStore()
    for _ in range(3):
        assert succeed(2, lambda r: try_in_thread(store, r, 2, 10)[0]) == ["ok"] * 2
    with nothing_left():
        found = in_threads(3, lambda r: (time.sleep(0.3 * (r == 2)), try_in_thread(store, [0, 0, 7][r], 2, 5))[1])
    assert all("rank 7 is not in 0..1" in str(text) or "duplicate" in str(text) for _, text in found)
    found = in_threads(2, lambda r: (time.sleep(0.2 * r), try_in_thread(store, [0, 9][r], 2, 5))[1])
    assert all(name == "RendezvousError" and "rank 9 is not in 0..1" in text for name, text in found)


def test_after_a_duplicate_the_right_ranks_meet():
    store = HashStore()
    found = in_threads(3, lambda r: try_in_thread(store, [0, 1, 1][r], 3, 5))
    assert all("duplicate rank" in text for _, text in found), found
    assert "duplicate rank" in try_in_thread(store, 2, 3, 5)[1]  # it was late for that meeting
    assert succeed(3, lambda r: try_in_thread(store, r, 3, 10)[0]) == ["ok"] * 3


def test_a_duplicate_that_comes_too_late_spoils_nothing(tmp_path):
    claims = good(2) + [{"rank": 1, "world": 2, "delay": 1.0}]
    with ranks.start(3, stay, f"file://{tmp_path}/store", claims) as group:
        found = [group.message(r) for r in range(3)]
        assert found[0][0] == found[1][0] == "ok"
        assert found[2][0] == "RendezvousError" and "still runs: is the number taken?" in found[2][1]
        assert 1.0 <= found[2][2] < 2.0
        assert [outcome.value for outcome in group.results()] == ["ok", "ok", None]


def stay(rank, world_size, tell, url, claims):
    claim = claims[rank]
    store, _, _ = open_store(url, 0, 2, 20)
    time.sleep(claim.get("delay", 0.0))
    tell(try_to_meet(store, claim["rank"], 2, 1.0 if rank == 2 else 10.0))
    if rank < 2:
        time.sleep(3)
        return try_to_meet(store, rank, 2, 10.0)[0]


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 10, b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(216)])
def test_garbage_in_the_store(garbage):
    store = HashStore()
    store.set("tricomm/1/hello/1", garbage)
    with nothing_left():
        name, text = try_in_thread(store, 0, 2, 5.0)
    assert name == "RendezvousError" and "rank 1's record: bad " in text


def test_a_number_that_is_none():
    store = HashStore()
    store.set("tricomm/0/met", "9" * 5000)
    store.add("tricomm/0/generation", 1)
    name, text = try_in_thread(store, 0, 2, 5.0)
    assert name == "RendezvousError" and "'tricomm/0/met' is not a number" in text


def test_another_jobs_hello_is_refused():
    """A hello whose segment is gone, as a stale job on the same store leaves it."""
    store, fresh = HashStore(), HashStore()
    try_in_thread(store, 1, 2, 0.2)
    fresh.set("tricomm/1/hello/1", bytes(store.get("tricomm/1/hello/1")))
    with nothing_left():
        name, text = try_in_thread(fresh, 0, 2, 5.0)
    assert name == "ResourceError" and "rank 1's" in text and "control page" in text


@pytest.mark.parametrize("point", ["before hello", "after hello", "attach", "met", "confirm"])
def test_a_rank_is_killed_at(point, tmp_path):
    claims = good(3)
    claims[1]["die"] = point
    timeout = 2.0 if point == "before hello" else 20.0
    with ranks.start(3, meet_as, f"file://{tmp_path}/store", claims, timeout) as group:
        pids = [group.message(r) for r in range(3)]
        found = results(group)
    assert found[1] == (None, "", -signal.SIGKILL)
    for name, text, seconds in (found[0], found[2]):
        assert name == "RendezvousError", text
        if point == "before hello":
            assert "[1] did not come" in text and seconds < 3.0
        else:
            assert f"rank 1 (pid {pids[1]}) died" in text and seconds < 2.0
    assert max(found[0][2], found[2][2]) >= 1.9 or point != "before hello"


def test_a_rank_dies_while_others_still_wait_for_a_third(tmp_path):
    claims = good(3)
    claims[1]["die"] = "after hello"
    claims[2]["delay"] = 2.0
    with ranks.start(3, meet_as, f"file://{tmp_path}/store", claims, 20.0) as group:
        pids = [group.message(r) for r in range(3)]
        found = results(group)
    for name, text, seconds in (found[0], found[2]):
        assert name == "RendezvousError" and f"rank 1 (pid {pids[1]}) died during the meeting" in text
        assert seconds < 1.5


def wait_then_meet(rank, world_size, tell, port, timeout):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 10)
    tell("open")
    time.sleep(0.5)
    return try_to_meet(store, rank, world_size, timeout)


@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_is_killed_or_stopped(hurt):
    with ranks.start(1, serve) as server:
        port = server.message(0)
        with ranks.start(2, wait_then_meet, port, 2.0) as group:
            assert [group.message(r) for r in range(2)] == ["open"] * 2
            os.kill(server.pids[0], hurt)
            found = results(group)
    for name, text, seconds in found:
        assert name == "RendezvousError" and "store add('tricomm/" in text
        if hurt == signal.SIGKILL:
            assert "failed after 0." in text and seconds < 1.0
        else:
            assert "did not return within 2." in text and 2.0 <= seconds < 3.0


def wait_in_meeting(rank, world_size, tell, port, timeout):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 10)
    tell("open")
    return try_to_meet(store, rank, 3, timeout)


@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_goes_while_ranks_wait(hurt):
    with ranks.start(1, serve) as server:
        port = server.message(0)
        with ranks.start(2, wait_in_meeting, port, 2.0) as group:
            assert [group.message(r) for r in range(2)] == ["open"] * 2
            time.sleep(0.5)
            os.kill(server.pids[0], hurt)
            found = results(group)
    for name, text, seconds in found:
        assert name == "RendezvousError" and re.search(r"store (check|get|set)\('tricomm/", text), text
        assert seconds < 3.0 and (hurt == signal.SIGKILL or seconds >= 2.0)


def meet_then_work(rank, world_size, tell, port):
    store, _, _ = open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 10)
    page = meet(store, rank, world_size, 10, LAYOUT)
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
            assert [group.message(r) for r in range(2)] == ["met"] * 2
            os.kill(server.pids[0], signal.SIGKILL)
            for outcome in group.results():
                assert outcome.value == [[b"%d" % step] * 2 for step in range(20)], outcome.text


# The store that we open


def listeners() -> set[str]:
    """Addresses (hex, as in /proc/net/tcp) on which this very process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            for line in table.read().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add(fields[1].split(":")[0])
    return found


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
    [found] = ranks.run(1, listen, host)
    assert found == {"0100007F"} or found == {"00000000000000000000000001000000"}


def test_the_scan_would_see_a_wildcard():
    [found] = ranks.run(1, listen, "torch")
    assert found == {"0" * 32} or found == {"0" * 8}


def test_the_file_is_the_users_own(tmp_path):
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
    with pytest.raises(RendezvousError, match="symbolic links"):
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


@pytest.mark.parametrize("rank,world_size,timeout", [(True, 2, 1), (0, 0, 1), (0, 1 << 20, 1), (0, 1, 0), ("0", 1, 1)])
def test_arguments_that_make_no_sense(rank, world_size, timeout):
    with pytest.raises(InvalidArgument):
        meet(HashStore(), rank, world_size, timeout, LAYOUT)


def test_nobody_hosts_the_store():
    port, began = free_port(), time.monotonic()
    with nothing_left():
        with pytest.raises(RendezvousError, match=rf"no store at 127.0.0.1:{port} within [01]\.\d s.*rank 0") as error:
            open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 1.0)
    assert 0.9 <= time.monotonic() - began < 2.0
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
                open_store(f"tcp://127.0.0.1:{port}?rank=0&world_size=2", None, None, 5)
        assert time.monotonic() - began < 1


def open_silent(rank, world_size, tell, port):
    began = time.monotonic()
    try:
        open_store(f"tcp://127.0.0.1:{port}?rank=1&world_size=2", None, None, 1.5)
    except RendezvousError as error:
        return str(error), time.monotonic() - began
    return "opened", 0


def test_something_else_listens_there_and_says_nothing():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        [(text, seconds)] = ranks.run(1, open_silent, port)
    assert f"127.0.0.1:{port}" in text and 1.0 <= seconds < 2.5


def test_bounded_calls_end_and_leave_no_thread():
    class Silent:
        def set(self, key, value):
            time.sleep(3)

        def add(self, key, amount):
            raise ValueError("first line\nsecond line")

    with nothing_left():
        bounded = Bounded(HashStore(), 5)
        bounded.set("key", b"\0\xff")
        assert bounded.get("key") == b"\0\xff" and bounded.check("key") and not bounded.check("other")
        assert bounded.read("other") is None and bounded.add("n", 2) == 2
        bounded.close()
        bounded.close()
    with nothing_left():
        bounded = Bounded(Silent(), 0.5)
        with pytest.raises(RendezvousError, match=r"store add\('n'\) failed after 0.0 s: ValueError: first line$"):
            bounded.add("n", 1)
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=r"store set\('key'\) did not return within 0\.[45] s"):
            bounded.set("key", b"")
        assert 0.4 <= time.monotonic() - began < 1.0 and not bounded.usable
        with pytest.raises(RendezvousError, match="still does not answer store set"):
            bounded.add("n", 1)
        bounded.close()
        time.sleep(3)


def test_only_monotonic_clocks(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1 / 0)
    store = HashStore()
    assert succeed(2, lambda r: try_in_thread(store, r, 2, 10)[0]) == ["ok"] * 2
