"""Ranks in different PID namespaces, as in containers that share a directory but no processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import communicator, leftovers
from tests.marks import some

_NEWNS, _NEWUSER, _NEWPID = 0x00020000, 0x10000000, 0x20000000
_PRIVATE = 0x4000 | 1 << 18  # MS_REC | MS_PRIVATE
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshare(own_users: bool) -> None:
    """New PID and mount namespaces, and perhaps users, for children that are forked from now on."""
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(_NEWNS | _NEWPID | (_NEWUSER if own_users else 0)))
    if own_users:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(libc.mount(b"none", b"/", None, _PRIVATE, None))


def permitted(own_users: bool) -> bool:
    child = os.fork()
    if child == 0:
        try:
            unshare(own_users)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def in_namespaces(rank, world_size, tell, url, own_users, killed):
    """Each rank as process 1 of a PID namespace; rank 1 is killed after its first calls, if `killed`."""
    unshare(own_users)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
            tell(work(rank, world_size, url, lambda: os.write(there, b"x"), killed))
        except BaseException as error:
            tell(repr(error))
        os._exit(0)
    os.close(there)
    if rank == 1 and killed and os.read(here, 1):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def work(rank, world_size, url, ready, killed):
    before, result = leftovers(), [os.getpid()]
    try:
        with communicator(rank, world_size, url) as comm:
            x = torch.full((1000,), rank + 1.0)
            comm.all_reduce(x)
            w = comm.symmetric((8,), torch.float32)
            w.peers[1 - rank][rank] = 10.0 + rank
            comm.barrier()
            result += [x.unique().tolist(), w.local[1 - rank].item(), comm.kind]
            del w
            if killed and rank == 1:
                ready()
                time.sleep(60)
            began = time.monotonic()
            comm.all_reduce(x)
    except tricomm.TricommError as error:
        result += [type(error).__name__, str(error), time.monotonic() - began]
    del comm
    return result, {name: more for name, now in leftovers().items() if (more := now - before[name])}


@pytest.mark.parametrize("own_users,killed", some([(True, True), (True, False), (False, True), (False, False)], 4))
def test_ranks_in_different_pid_namespaces(own_users, killed, tmp_path):
    if not permitted(own_users):
        pytest.skip("namespaces are not permitted here")
    with ranks.start(2, in_namespaces, f"file://{tmp_path}/store", own_users, killed, timeout=180) as group:
        told = [group.message(r) for r in range(1 if killed else 2)]
        codes = [outcome.value for outcome in group.results()]
    assert codes == [0, -signal.SIGKILL if killed else 0], told
    for rank, (result, left) in enumerate(told):
        assert result[:4] == [1, [3.0], 11.0 - rank, "posix_shm"] and left == {}
    if killed:
        name, text, seconds = told[0][0][4:]
        assert name == "PeerDied" and "rank 1 (pid 1) died" in text and seconds < 2.0 + ranks.BUSY
    else:
        assert len(told[0][0]) == 4
