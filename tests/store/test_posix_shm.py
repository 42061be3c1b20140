"""Memory that processes share on the CPU: correct, zeroed, private to the user, and freed afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import ranks
from tests.open_files import open_files
from tests.soak.growth import orphans
from tests.store.store_ranks import holdings, in_threads, more_than, nothing_left, pages, succeed
from tricomm.errors import GroupAborted, InvalidArgument, PeerDied, RendezvousError, ResourceError, TricommError
from tricomm.store import segments
from tricomm.store.arenas import posix_shm
from tricomm.store.arenas.open_arena import open_arena
from tricomm.store.arenas.posix_shm import open_posix_shm
from tricomm.store.handshake import handshake
from tricomm.store.rendezvous import open_store
from tricomm.store.segments import Segment

CPU = torch.device("cpu")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def attach(segment: Segment, readonly=False, **other):
    """Attach to a segment as another process does, perhaps with another `fd` or `nbytes`."""
    held = [os.dup(other.get("fd", segment.fd))]
    try:
        return Segment.attach(held, other.get("nbytes", segment.nbytes), readonly)
    finally:
        assert held == []


# Segments


def test_a_segment_is_zeroed_private_sealed_and_shared():
    with nothing_left():
        one = Segment.create("tricomm-test", 10_000)
        result = os.fstat(one.fd)
        assert bytes(one.buffer) == bytes(10_000) == bytes(result.st_size)
        assert stat.S_IMODE(result.st_mode) == 0o600 and result.st_uid == os.geteuid()
        assert result.st_blocks * 512 >= 10_000  # its space is allocated, so that no write can fail later
        assert fcntl.fcntl(one.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        assert not os.get_inheritable(one.fd) and one.address % 4096 == 0
        two, three = attach(one), attach(one, readonly=True)
        assert two.fd == -1
        two.buffer[9_999] = 7
        assert one.buffer[9_999] == three.buffer[9_999] == 7 and three.buffer.readonly
        with pytest.raises(TypeError):
            three.buffer[0] = 1
        for segment in (one, two, three):
            segment.close()
            segment.close()
            assert segment.fd == -1
            with pytest.raises(GroupAborted, match="closed"):
                _ = segment.buffer


def test_only_its_maker_writes_to_a_segment_that_is_not_shared():
    one = Segment.create("tricomm-test", 8192, shared=False)
    one.buffer[0] = 7
    two = attach(one, readonly=True)
    assert two.buffer[0] == 7
    with pytest.raises(ResourceError, match="Operation not permitted"):
        attach(one)
    with pytest.raises(PermissionError):
        os.write(one.fd, b"x")
    one.close()
    two.close()


def test_views_outlive_close_and_the_mapping_ends_with_them():
    with nothing_left():
        one = Segment.create("tricomm-test", 8192)
        array = np.frombuffer(one.buffer, np.int64)
        tensor = torch.frombuffer(one.buffer, dtype=torch.int64, count=4, offset=8)
        one.close()
        array[1] = 5
        assert tensor[0] == 5 and len(holdings()["maps"]) == 1
        del array
        assert tensor[0] == 5
        del tensor


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, 1 << 47])
def test_invalid_sizes(nbytes):
    with pytest.raises(InvalidArgument, match="allowed are 1 to"):
        Segment.create("tricomm-test", nbytes)


@pytest.mark.parametrize(
    "change,words",
    [({"nbytes": 4096}, "has 8192 bytes, expected 4096"), ({"nbytes": 16384}, "has 8192 bytes, expected 16384")],
    ids=lambda v: str(v),
)
def test_attach_refuses_memory_that_differs_from_its_record(change, words):
    with nothing_left():
        one = Segment.create("tricomm-test", 8192)
        with pytest.raises(ResourceError, match=words):
            attach(one, **change)
        one.close()


def test_attach_refuses_foreign_memory(tmp_path, monkeypatch):
    one = Segment.create("tricomm-test", 8192)
    unsealed = os.memfd_create("tricomm-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    with pytest.raises(ResourceError, match="not sealed"):
        attach(one, fd=unsealed)
    with open(tmp_path / "file", "wb") as file:
        file.truncate(8192)
        file.flush()
        with pytest.raises(ResourceError, match="not shared memory"):
            attach(one, fd=file.fileno())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ResourceError, match="belongs to uid 0|belongs to uid .*, this process runs as 12345"):
        attach(one)
    os.close(unsealed)
    one.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_no_space(monkeypatch, number):
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with nothing_left():
        with pytest.raises(ResourceError, match=r"12288 bytes needed, \d+ bytes free; .*--shm-size"):
            Segment.create("tricomm-test", 12288)


def test_more_than_the_machine_has_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(segments, "available_memory", lambda: 8191)
    with nothing_left():
        with pytest.raises(ResourceError, match="8192 bytes needed, 8191 bytes free"):
            Segment.create("tricomm-test", 8192)
    assert segments.available_memory() < 1 << 46


def limited(rank: int, world_size: int, tell, limit: int, value: int) -> tuple[str, bool]:
    before = holdings()
    if limit == resource.RLIMIT_AS:  # on top of the process's memory, so that Python itself still runs
        value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    try:
        Segment.create("tricomm-test", 1 << 30 if limit == resource.RLIMIT_AS else 1 << 20)
    except ResourceError as error:
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
        return str(error), more_than(before) == {}
    return "no error", False


@pytest.mark.parametrize(
    "limit,value,words",
    [
        (resource.RLIMIT_NOFILE, 3, "ulimit -n"),
        (resource.RLIMIT_FSIZE, 4096, "ulimit -f"),
        (resource.RLIMIT_AS, 1 << 28, "ulimit -v"),
    ],
    ids=["nofile", "fsize", "as"],
)
def test_limits_of_the_process(limit, value, words):
    [(text, clean)] = ranks.run(1, limited, limit, value)
    assert "shared memory refused" in text and words in text and clean


# Arenas


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_reaches_every_block(world_size):
    with nothing_left():
        with pages(world_size) as group:
            arenas = succeed(world_size, lambda r: open_arena(group[r], 3 << 12, CPU, 10))
            for r, arena in enumerate(arenas):
                assert arena.kind == "posix_shm" and arena.nbytes == 3 << 12 and len(arena.bases) == world_size
                assert not arena.tensor(r, 0, (3 << 12,), torch.uint8).any()
                assert arena.tensor(r, 64, (2,), torch.int32).data_ptr() == arena.bases[r] + 64
            for r, arena in enumerate(arenas):
                for q in range(world_size):
                    arena.tensor(q, 8 * r, (1,), torch.int64).fill_(100 * r + q)
            for arena in arenas:
                for q in range(world_size):
                    want = [100 * r + q for r in range(world_size)]
                    assert arena.tensor(q, 0, (world_size,), torch.int64).tolist() == want
            for arena in arenas:
                arena.close()
                arena.close()
                with pytest.raises(GroupAborted, match="closed"):
                    arena.tensor(0, 0, (1,), torch.uint8)


def test_bounds_of_views():
    with pages(1) as (page,):
        arena = open_posix_shm(page, 4096, 5)
        assert arena.tensor(0, 4088, (1,), torch.float64).shape == (1,)
        assert arena.tensor(0, 0, (), torch.bfloat16).shape == ()
        assert arena.tensor(0, 4096, (0, 3), torch.int64).shape == (0, 3)
        for rank, offset, shape, dtype in [
            (1, 0, (1,), torch.uint8),
            (-1, 0, (1,), torch.uint8),
            (0, 4089, (1,), torch.float64),
            (0, -8, (1,), torch.float64),
            (0, 4, (1,), torch.float64),
            (0, 0, (4097,), torch.uint8),
            (0, 0, (2**40, 2**40), torch.uint8),
            (0, 0, (-1,), torch.uint8),
        ]:
            with pytest.raises(InvalidArgument):
                arena.tensor(rank, offset, shape, dtype)
        arena.close()


def test_a_tensor_outlives_its_arena():
    with nothing_left():
        with pages(1) as (page,):
            arena = open_posix_shm(page, 4096, 5)
            tensor = arena.tensor(0, 0, (8,), torch.int64)
            arena.close()
            tensor.fill_(3)
            assert tensor.sum() == 24
            del tensor


def test_another_device():
    with pages(1) as (page,):
        with pytest.raises(InvalidArgument, match="meta"):
            open_arena(page, 4096, torch.device("meta"), 5)


def fails_on(group, patch):
    """Open an arena while a step fails on one rank; return the outcomes, and check that all can try again."""
    with nothing_left():
        outcomes = in_threads(3, lambda r: patch(r) or open_posix_shm(group[r], 4096, 5))
        assert all(isinstance(o, TricommError) for o in outcomes), outcomes
        kinds, texts = {type(o) for o in outcomes}, {str(o) for o in outcomes}
        assert len(kinds) == 1 and len(texts) == 1
        del outcomes
    return kinds.pop(), texts.pop()


def here(monkeypatch, name, original):
    """Replace a step for one rank only: the ranks are threads."""
    import threading

    threads = {}
    monkeypatch.setattr(*name, lambda *a, **k: original(threads.get(threading.get_ident()), *a, **k))
    return lambda r: threads.__setitem__(threading.get_ident(), r) or None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_memory_refused_on_one_rank(monkeypatch, rank):
    fallocate = os.posix_fallocate

    def refuse(who, *args):
        if who == rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fallocate(*args)

    with pages(3) as group:
        kind, text = fails_on(group, here(monkeypatch, (os, "posix_fallocate"), refuse))
        assert kind is ResourceError
        assert text.startswith(f"posix_shm: allocate memory: rank {rank}: shared memory refused (No space left")
        monkeypatch.undo()
        for arena in succeed(3, lambda r: open_posix_shm(group[r], 4096, 5)):
            arena.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_peer_that_cannot_be_mapped(monkeypatch, rank):
    usual = segments.Segment._map

    def refuse(who, segment, fd, readonly):
        ours = "tricomm" in os.readlink(f"/proc/self/fd/{fd}")
        if who == rank and ours and segment.nbytes == 4096 and mapped.get(who):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        mapped[who] = True
        return usual(segment, fd, readonly)

    mapped: dict[object, bool] = {}
    with pages(3) as group:
        kind, text = fails_on(group, here(monkeypatch, (segments.Segment, "_map"), refuse))
        assert kind is ResourceError and f"map peers' memory: rank {rank}: rank " in text
        assert "Cannot allocate memory" in text


def test_sizes_that_differ():
    with pages(2) as group, nothing_left():
        outcomes = in_threads(2, lambda r: open_posix_shm(group[r], 4096 * (r + 1), 5))
        assert [type(o) for o in outcomes] == [RendezvousError] * 2
        assert "rank 1 shares 8192 bytes, this rank shares 4096" in str(outcomes[0])
        del outcomes


def hostile(rank, nbytes, offset=0):
    return posix_shm._FORMAT.pack(rank, nbytes, 4096, offset, bytes(8))


HOSTILE = {
    "empty": b"",
    "noise": b"x" * 40,
    "another rank's": hostile(0, 4096),
    "another size": hostile(1, 8192),
    "beyond its file": hostile(1, 4096, offset=1),
}


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
def test_hostile_records(record):
    with pytest.raises(RendezvousError, match="rank 1's memory record|rank 1 shares (8192|4096) bytes"):
        posix_shm._parsed(record, 1, 4096)


def share(rank: int, world_size: int, tell, url: str, die: bool):
    before = holdings()
    store, rank, world_size = open_store(url, rank, world_size, 20)
    page = handshake(store, rank, world_size, 20, 1)
    if die and rank == 1:
        Segment.attach = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        arena = open_posix_shm(page, 1 << 20, 20)
    except TricommError as error:
        text = type(error).__name__, str(error), time.monotonic() - began
        page.close()
        return text, holdings()["maps"] == before["maps"]
    arena.tensor((rank + 1) % world_size, 8 * rank, (1,), torch.int64).fill_(rank + 1)
    page.exchange(b"", "written", 20)
    result = arena.tensor(rank, 0, (world_size,), torch.int64).tolist()
    names = [name for name in open_files().values() if "tricomm" in name]
    page.exchange(b"", "read", 20)
    arena.close()
    page.close()
    del page
    return result, names, holdings()["maps"] == before["maps"]


def test_processes(tmp_path):
    results = ranks.run(3, share, f"file://{tmp_path}/store", False)
    assert results == [([0, 0, 3], [], True), ([1, 0, 0], [], True), ([0, 2, 0], [], True)]


def test_a_rank_is_killed_while_sharing(tmp_path):
    before = set(os.listdir("/dev/shm"))
    with ranks.start(3, share, f"file://{tmp_path}/store", True) as group:
        outcomes = group.results()
    assert outcomes[1].code == -signal.SIGKILL
    for rank in (0, 2):
        (name, text, seconds), clean = outcomes[rank].value
        assert name == PeerDied.__name__ and "rank 1 (pid" in text and "posix_shm: map peers' memory" in text
        assert seconds < 2.0 + ranks.BUSY and clean
    assert [name for name in orphans(before) if not name.startswith("soak-")] == []  # may be left by other tests
