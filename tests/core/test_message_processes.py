"""Messages between processes: real concurrency, and ranks that die or leave."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests import ranks
from tests.core.bodies.common_bodies import communicator
from tricomm.options import Tuning


@pytest.mark.parametrize("protocol", ["ll", "simple", None])
@ranks.each(3, [], timeout=150)
def test_messages_round_a_ring(rank, world_size, tell, url, protocol):
    """Messages of several pieces round a ring, mixed with collectives; returns what was wrong."""
    wrong = []
    with communicator(rank, world_size, url, _tuning=Tuning(tile=32)) as comm:
        for turn, count in enumerate((1, 2500, 0, 37, 9001)):
            x = torch.arange(count, dtype=torch.int32) * 3 + rank * 1000 + turn
            y = torch.full((count,), -1, dtype=torch.int32)
            to, source = (rank + 1) % world_size, (rank - 1) % world_size
            if rank:
                comm.send(x, to, turn, protocol=protocol)
            result = comm.recv(y, None if turn % 2 else source, turn, protocol=protocol)
            if not rank:
                comm.send(x, to, turn, protocol=protocol)
            if result != source or not torch.equal(y, x + (source - rank) * 1000):
                wrong.append((turn, count))
            total = comm.all_reduce(torch.tensor([rank + turn]))
            wrong += [] if int(total) == sum(range(world_size)) + world_size * turn else [(turn, "sum")]
    return wrong


def left_early(rank, world_size, tell, url):
    with communicator(rank, world_size, url) as comm:
        if rank == 1:
            comm.send(torch.arange(7), 0, 5)
            return None
        if rank == 2:
            time.sleep(2.5)  # longer than a call waits for a rank that has left
            comm.send(torch.arange(7) + 1, 0, 6)
            return None
        time.sleep(0.5)
        results = []
        for source, tag in ((None, 6), (1, 5)):
            y = torch.zeros(7, dtype=torch.int64)
            results.append((comm.recv(y, source, tag), y.tolist()))
        return results


def test_a_message_sent_before_its_sender_left_still_arrives(url):
    result = ranks.run(3, left_early, url, timeout=60)
    assert result[0] == [(2, list(range(1, 8))), (1, list(range(7)))]


def waited_for(rank, world_size, tell, url, source, how):
    with communicator(rank, world_size, url) as comm:
        if rank == 1:
            time.sleep(0.3)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return None
        comm.recv(torch.zeros(3), source, 4)
    return None


@pytest.mark.parametrize("source", [1, None])
@pytest.mark.parametrize("how, words", [("killed", "died"), ("left", "closed the communicator")])
def test_a_dead_sender_is_named_within_two_seconds(url, source, how, words):
    with ranks.start(2, waited_for, url, source, how) as running:
        waiting, gone = running.results()
    assert gone.code == (-signal.SIGKILL if how == "killed" else None)
    assert waiting.error == "PeerDied" and words in waiting.text and "tag 4" in waiting.text, waiting
    assert waiting.seconds < 2.0 + 0.3 + ranks.BUSY  # two seconds from its death, which is 0.3 s after the meeting
