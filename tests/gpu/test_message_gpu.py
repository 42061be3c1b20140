"""Ends and captures of messages on one real GPU, ranks as processes. Run with `-m gpu`."""

import os
import signal

import pytest
import torch

import tricomm
from tests import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def join(rank, world_size, url, **options):
    chosen = tricomm.Options(timeout=60.0, share_device=True, **options)
    return tricomm.init(url, rank, world_size, "cuda:0", options=chosen)


@ranks.each(2, True, timeout=60)
def test_a_message_arrives_after_its_sender_has_left(rank, world_size, tell, url):
    """Rank 1 leaves before rank 0 has taken what it sent: it waits for that."""
    with join(rank, world_size, url) as comm:
        x = torch.arange(1000, device="cuda")
        if rank == 1:
            comm.send(x + 7, 0)
            return True
        torch.cuda._sleep(2_000_000_000)  # the recv is queued long before it runs
        y = torch.zeros_like(x)
        source = comm.recv(y)
        return source == 1 and torch.equal(y, x + 7)


def orphaned(rank, world_size, tell, url):
    with join(rank, world_size, url) as comm:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.recv(torch.zeros(5, device="cuda"), 1, tag=3)
            comm.synchronize()
        except tricomm.PeerDied as error:
            return str(error)
        return ""


def test_a_dead_sender_is_named(url):
    with ranks.start(2, orphaned, url) as running:
        waiting, _ = running.results()
    assert "rank 1" in waiting.value and "tag 3" in waiting.value, waiting
