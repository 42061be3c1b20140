"""Handshakes over every kind of store, again and again, in several groups."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from tests import ranks
from tests.store.store_ranks import LAYOUT, free_port, holdings, more_than, nothing_left, succeed, try_handshake
from tricomm.store.control import RankState
from tricomm.store.handshake import handshake
from tricomm.store.rendezvous import open_store


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_threads_over_a_hash_store(world_size):
    store = HashStore()
    with nothing_left():
        pages = succeed(world_size, lambda r: handshake(store, r, world_size, 10, LAYOUT))
        assert len({p.group for p in pages}) == 1
        assert not [name for name in holdings()["fds"] if "tricomm" in name]  # no other process can attach from now on
        assert all(p.page(r).state == RankState.READY for p in pages for r in range(world_size))
        for page in pages:
            page.close()
        del pages, page


def by_url(rank, world_size, tell, url, environment):
    os.environ.update({k: v.format(rank=rank) for k, v in environment.items()})
    store, mine, world = open_store(url.format(rank=rank), None, None, 20)
    return mine, world, try_handshake(store, mine, world, 20)[0]


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
        assert agent.check(["/worker/attempt_2/tricomm/handshake/left/0"])


def again_and_again(rank, world_size, tell, url, times):
    store, rank, world_size = open_store(url, rank, world_size, 20)
    assert try_handshake(store, rank, world_size, 20)[0] == "ok"
    before, groups = holdings(sockets=False), set()
    for _ in range(times):
        page = handshake(store, rank, world_size, 20, LAYOUT)
        groups.add(page.group)
        assert page.exchange(page.nonce, "work", 20) == [page.nonce] * world_size
        page.close()
    del page
    assert more_than(before, sockets=False) == {}
    return groups


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_again_and_again_over_one_store(scheme, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    times = 200 if scheme == "tcp" else 50
    one, two = ranks.run(2, again_and_again, url, times)
    assert one == two and len(one) == times
