"""Descriptors over sockets: ranks receive them, other processes do not, and no file is left."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import stat
import tempfile
import threading
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests import ranks
from tests.store.sockets.hostile_peers import KINDS, RIGHT, Hostile, attack
from tests.store.store_ranks import in_threads, nothing_left, succeed
from tricomm.deadline import Deadline
from tricomm.errors import InvalidArgument, RendezvousError, ResourceError
from tricomm.store import descriptors
from tricomm.store.descriptors import DescriptorSocket, Sender

NONCE = bytes(range(16))
DELAY = 1.0  # seconds by which hostile peers may delay a meeting, on a busy machine


@pytest.fixture
def folder(monkeypatch):
    """The parent directory of all sockets, which other users may enter; must be empty at the end."""
    parent = Path(tempfile.mkdtemp(prefix="tc"))
    parent.chmod(0o711)
    monkeypatch.setenv(descriptors.VARIABLE, str(parent))
    descriptors._remove_orphans.cache_clear()
    yield parent
    parent.rmdir()


def sender(rank: int, world_size: int, **other) -> Sender:
    return Sender(rank, world_size, NONCE, "a test", **other)


class Meeting:
    """Ranks in this process; each sends descriptors of memory that names it."""

    def __init__(self, world_size: int) -> None:
        self.sockets = [DescriptorSocket() for _ in range(world_size)]
        self.senders = [sender(rank, world_size) for rank in range(world_size)]
        for each in self.sockets:
            each.bind()
        self.names = [each.name for each in self.sockets]
        self.paths = [descriptors._path(descriptors.base(), name) for name in self.names]

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()
            each.close()

    def join(self, rank: int, seconds: float = 30.0, look=lambda: None) -> dict[int, list[str]]:
        """Receive the descriptors of rank `rank`'s peers; return the contents of the files that they open."""
        got: dict[int, list[str]] = {}
        mine = [memory(f"{rank} {n}") for n in range(2)]

        def take(other: int, held: list[int]) -> None:
            assert other not in got
            got[other] = [os.pread(fd, 100, 0).decode() for fd in held]

        try:
            passing = self.sockets[rank]
            passing.exchange(self.senders[rank], self.names, mine, take, Deadline(seconds), look)
        finally:
            for fd in mine:
                os.close(fd)
        return got

    def refused(self) -> Counter[str]:
        return sum((each.refused for each in self.sockets), Counter[str]())


def received(meeting: Meeting) -> list[int]:
    """The rank whose message rank 0 accepts next, if any."""
    got: list[int] = []
    meeting.sockets[0]._receive(meeting.senders[0], RIGHT, None, lambda rank, held: not got.append(rank))
    return got


def memory(text: str) -> int:
    fd = os.memfd_create("tricomm-test")
    os.write(fd, text.encode())
    return fd


def expected(world_size: int, rank: int) -> dict[int, list[str]]:
    return {other: [f"{other} 0", f"{other} 1"] for other in range(world_size) if other != rank}


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_every_rank_receives_the_messages_of_all_others(world_size, folder):
    with nothing_left():
        with Meeting(world_size) as meeting:
            for path in meeting.paths:
                result = os.stat(os.path.dirname(path))
                assert stat.S_IMODE(result.st_mode) == 0o700 and result.st_uid == os.geteuid()
            got = succeed(world_size, meeting.join)
            assert got == [expected(world_size, rank) for rank in range(world_size)]
            assert not meeting.refused()
        del meeting


def test_more_ranks_than_the_backlog_of_a_socket(folder):
    """The kernel queues about ten messages for a socket: a rank that is late does not block the others."""
    late = threading.Event()
    with Meeting(24) as meeting:

        def body(rank):
            if rank == 5:
                late.wait(0.5)
            return meeting.join(rank)

        assert succeed(24, body) == [expected(24, rank) for rank in range(24)]


def hostile_meeting(count: int) -> None:
    """Three ranks meet while `count` hostile peers write to the sockets of two of them; the third comes after those."""
    forkserver.ensure_running()
    with nothing_left():
        delay = _hostile_meeting(count)
    assert delay < DELAY + ranks.BUSY


def _hostile_meeting(count: int) -> float:
    with Meeting(3) as meeting, ranks.start(1, attack, meeting.paths[:2], meeting.senders, count, 7) as hostile:

        def body(rank):
            if rank < 2:
                return meeting.join(rank, 300.0), time.monotonic()
            kinds, sent = hostile.results()[0].value
            came = time.monotonic()
            return meeting.join(rank), came, kinds, sent

        (zero, ended), (one, ended_too), (two, came, kinds, sent) = succeed(3, body, 300)
        refused = meeting.refused()
    assert [zero, one, two] == [expected(3, rank) for rank in range(3)]
    assert refused == sent and sum(kinds.values()) == count and set(kinds) == set(KINDS)
    delay = max(ended, ended_too) - came
    print(
        f"\n{count} hostile peers: {dict(kinds)}\nrefused {dict(refused)}, 0 got in; a rank waited {delay:.3f} s more"
    )
    return delay


def test_hostile_peers_do_not_get_in(folder):
    hostile_meeting(300)


@pytest.mark.soak
def test_ten_thousand_hostile_peers_do_not_get_in(folder):
    hostile_meeting(10_000)


@pytest.mark.parametrize(
    "kind,name,instead",
    [("another user's claim", "_of_this_user", lambda extra: True), ("wrong nonce", "_same", lambda one, other: True)],
)
def test_without_its_protection_a_hostile_peer_gets_in(kind, name, instead, folder, monkeypatch):
    """Without each check, the peer is taken for a rank."""
    if kind == "another user's claim" and os.geteuid() != 0:
        pytest.skip("only root can claim to be another user")
    with Meeting(2) as meeting:
        for believed in (False, True):
            if believed:
                monkeypatch.setattr(descriptors, name, instead)
            assert Hostile(kind, meeting.paths[0], meeting.senders[1], 0, random.Random(1)).tries()
            assert received(meeting) == [1] * believed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_enter_the_directory(folder):
    """The mode of the directory decides: with a wider one, the message reaches the check of its user."""
    with Meeting(2) as meeting:
        for mode, gets_there in ((0o700, False), (0o777, True)):
            os.chmod(os.path.dirname(meeting.paths[0]), mode)
            os.chmod(meeting.paths[0], mode)
            args = meeting.paths[:1], [meeting.senders[1]] * 2, list(KINDS).index("another user") + 1, 7
            with ranks.start(1, attack, *args) as hostile:
                kinds, sent = hostile.results()[0].value
            assert kinds["another user"] == 1 and sent["None"] == gets_there


def test_a_second_message_of_a_rank_is_refused(folder):
    with Meeting(2) as meeting:
        for _ in range(2):
            assert Hostile("valid", meeting.paths[0], meeting.senders[1], 0, random.Random(1)).tries()
        taken: list[int] = []
        fd = memory("x")
        passing = meeting.sockets[0]
        passing.exchange(
            meeting.senders[0],
            meeting.names,
            [fd] * 2,
            lambda rank, held: taken.append(rank),
            Deadline(5.0),
            lambda: None,
        )
        os.close(fd)
        assert taken == [1] and passing.refused == {"again": 1}


def test_a_rank_that_aborts_ends_the_wait_of_the_others(folder):
    def look():
        raise ResourceError("there is no use in waiting")

    with Meeting(2) as meeting, nothing_left():
        began = time.monotonic()
        with pytest.raises(ResourceError, match="no use"):
            meeting.join(0, 60.0, look)
        assert time.monotonic() - began < 1.0 + ranks.BUSY


def test_a_missing_rank_is_named(folder):
    with Meeting(3) as meeting, nothing_left():
        outcomes = in_threads(2, lambda rank: meeting.join(rank, 0.5))
        for outcome in outcomes:
            assert isinstance(outcome, RendezvousError) and "from or to rank(s) [2]" in str(outcome)
        del outcomes, outcome


def test_a_closed_socket_and_one_whose_process_died(folder):
    with Meeting(2) as meeting:
        assert not descriptors.died(meeting.names[1])
        meeting.sockets[1]._sockets[0].close()  # as the kernel does when the process is killed
        assert descriptors.died(meeting.names[1])
        with pytest.raises(ResourceError, match=r"rank 1's socket is not in .*: it has given up.*TRICOMM_SOCKET_DIR"):
            meeting.join(0)
        meeting.sockets[0].abandon()
        assert not os.path.exists(os.path.dirname(meeting.paths[1]))
        assert not descriptors.died(meeting.names[1])


def test_a_directory_that_others_may_enter_is_not_trusted(folder):
    with Meeting(2) as meeting:
        os.chmod(os.path.dirname(meeting.paths[1]), 0o750)
        with pytest.raises(ResourceError, match=r"rank 1's directory of sockets is not of uid .* alone \(.*mode 750"):
            meeting.join(0)


def starved(rank, world_size, tell, parent):
    os.environ[descriptors.VARIABLE] = parent
    with Meeting(2) as meeting:
        assert Hostile("one too many", meeting.paths[0], meeting.senders[1], 0, random.Random(1)).tries()
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            meeting.sockets[0]._receive(meeting.senders[0], RIGHT, None, lambda rank, held: True)
        except ResourceError as error:
            return str(error), len(os.listdir("/proc/self/fd")) - 1 - used


def test_a_lack_of_descriptors_is_named(folder):
    """The kernel truncates messages that it cannot deliver; that is not counted as a hostile peer."""
    [(text, more)] = ranks.run(1, starved, str(folder))
    assert "rank 1's descriptors were cut: the limit is" in text and "ulimit -n" in text and more == 0


# The directory


@pytest.mark.parametrize(
    "name,mode,words",
    [
        ("missing", None, "No such file or directory"),
        ("open", 0o777, r"other users than uid \d+ can change what is in it \(uid \d+, mode 777\)"),
        ("group", 0o770, r"can change what is in it \(uid \d+, mode 770\): use a directory of your own"),
        ("l" * 90, 0o700, r"is too long for a socket's path: at most \d+ bytes"),
        ("relative", 0o700, "the absolute path of a directory is needed"),
        ("file", None, "Not a directory"),
    ],
)
def test_a_bad_directory_is_refused_by_name(name, mode, words, tmp_path_factory, monkeypatch):
    short = tmp_path_factory.mktemp("d")
    path = short / name
    if name == "file":
        path.touch()
    elif mode is not None:
        path.mkdir()
        path.chmod(mode)
    monkeypatch.chdir(short)
    monkeypatch.setenv(descriptors.VARIABLE, name if name == "relative" else str(path))
    with nothing_left(), pytest.raises(InvalidArgument, match=f"^TRICOMM_SOCKET_DIR=.*{words}"):
        DescriptorSocket().bind()


def test_the_longest_path_works_and_the_next_does_not(tmp_path_factory, monkeypatch):
    short = str(tmp_path_factory.mktemp("p"))
    most = descriptors._SUN_PATH_BYTES - len(descriptors._path("", bytes(8)))
    for extra in (0, 1):
        path = short + "/" + "x" * (most - len(short) - 1 + extra)
        os.mkdir(path)
        monkeypatch.setenv(descriptors.VARIABLE, path)
        if extra:
            with pytest.raises(InvalidArgument, match=f"at most {most} bytes"):
                descriptors.base()
        else:
            with Meeting(2) as meeting:
                assert succeed(2, meeting.join) == [expected(2, 0), expected(2, 1)]


def test_a_directory_with_the_sticky_bit_is_accepted(tmp_path_factory, monkeypatch):
    shared = tmp_path_factory.mktemp("t")
    shared.chmod(0o1777)
    monkeypatch.setenv(descriptors.VARIABLE, str(shared))
    assert descriptors.base() == str(shared)


def test_without_the_variable_the_directory_is_dev_shm_or_tmp(monkeypatch):
    monkeypatch.delenv(descriptors.VARIABLE, raising=False)
    assert descriptors.base() == "/dev/shm"
    monkeypatch.setattr(descriptors, "_BASES", ("/nowhere", "/tmp"))
    assert descriptors.base() == "/tmp"
    monkeypatch.setattr(descriptors, "_BASES", ("/nowhere",))
    with pytest.raises(ResourceError, match="none of /nowhere can be written; TRICOMM_SOCKET_DIR"):
        descriptors.base()


def bind_and_die(rank, world_size, tell, parent):
    os.environ[descriptors.VARIABLE] = parent
    passing = DescriptorSocket()
    passing.bind()
    tell(passing.name)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_removes_the_files_of_a_killed_one(folder):
    with ranks.start(1, bind_and_die, str(folder)) as group:
        name = group.message(0)
        assert group.results()[0].code == -signal.SIGKILL
    assert descriptors.died(name) and len(list(folder.iterdir())) == 1
    for foreign in ("tricomm-mine", "tricomm-" + "g" * 16):
        (folder / foreign).mkdir()
    with Meeting(2) as meeting:
        assert not descriptors.died(name)
        assert succeed(2, meeting.join) == [expected(2, 0), expected(2, 1)]
    for foreign in ("tricomm-mine", "tricomm-" + "g" * 16):
        (folder / foreign).rmdir()  # not ours, so it is kept


def test_a_foreign_file_in_its_directory_does_not_disturb(folder):
    """As NFS leaves one when an open file is removed."""
    passing = DescriptorSocket()
    passing.bind()
    [made] = os.listdir(folder)
    foreign = folder / made / ".nfs0000"
    foreign.touch()
    passing.close()
    assert os.listdir(folder / made) == [foreign.name]
    foreign.unlink()
    foreign.parent.rmdir()


@pytest.mark.parametrize("locked", [True, False])
def test_a_directory_in_use_is_not_removed(locked, folder, monkeypatch):
    """Its lock says that it is in use; without locks it would be removed."""
    if not locked:
        monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    with Meeting(1) as meeting:
        descriptors._remove_orphans.cache_clear()
        descriptors._remove_orphans(str(folder), os.getpid())
        assert os.path.exists(meeting.paths[0]) == locked


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(folder, monkeypatch):
    usual, taken = fcntl.flock, []

    def faster(fd, how):
        if len(taken) < 2:
            taken.append(fd)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has it")
        usual(fd, how)

    monkeypatch.setattr(fcntl, "flock", faster)
    with nothing_left():
        with Meeting(2) as meeting:
            assert succeed(2, meeting.join) == [expected(2, 0), expected(2, 1)]
        del meeting
