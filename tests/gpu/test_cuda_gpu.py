"""Sharing GPU memory between real processes. Run with `-m gpu` on a machine with a GPU; one is enough."""

import os
import threading
import time

import pytest
import torch

import tricomm
from tests import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NBYTES = 64 << 20
OPTIONS = tricomm.Options(timeout=60.0, arena_bytes=NBYTES, share_device=True, nccl=False)


def write_and_read(rank, world_size, tell, url, visible):
    """Each rank writes to every other rank's memory and reads its own."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    wrong = []
    with tricomm.init(url, rank, world_size, "cuda:0", options=OPTIONS) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            handle = comm.symmetric((world_size, 128), dtype)
            comm.barrier()
            comm.synchronize()
            for peer in handle.peers:
                peer[rank].copy_(torch.full((128,), 1.0 + rank, device="cuda").to(dtype))
            torch.cuda.synchronize()
            comm.barrier()
            comm.synchronize()
            right = torch.arange(1.0, world_size + 1).repeat_interleave(128).view(world_size, 128)
            if not torch.equal(handle.local.float().cpu(), right):
                wrong.append(f"{dtype}: {handle.local[:, 0].tolist()}")
            comm.barrier()
    return wrong, torch.ones(1000, device="cuda").sum().item()


def open_and_close_often(rank, world_size, tell, url):
    """The free memory of the device after each of 20 groups."""
    torch.ones(1, device="cuda")
    free = []
    for turn in range(20):
        with tricomm.init(f"{url}{turn}", rank, world_size, "cuda:0", options=OPTIONS) as comm:
            comm.barrier()
        free.append(torch.cuda.mem_get_info()[0])
    return free


def test_processes_on_one_gpu(url):
    assert ranks.run(2, write_and_read, url, None, timeout=120) == [([], 1000.0)] * 2


def test_groups_that_end_leave_no_memory(url):
    for free in ranks.run(2, open_and_close_often, url, timeout=200):
        assert free[-1] >= free[2] - 2 * NBYTES, f"memory leaks: {free}"


@pytest.mark.parametrize("visible", [["0,1", "1,0"], ["0", "1"]], ids=["all visible", "peer invisible"])
def test_processes_on_two_gpus(visible, url):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    assert ranks.run(2, write_and_read, url, visible, timeout=120) == [([], 1000.0)] * 2


def test_a_query_does_not_wait_for_a_launch_on_a_full_queue() -> None:
    """The watch queries an event: if a launch in another thread blocked the query, a hang could not be aborted."""
    stream, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(1, device="cuda")
    event.record()
    torch.cuda.synchronize()

    def fill() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000_000)  # about 2 s
            for _ in range(5000):
                x.add_(1)

    thread, began, longest = threading.Thread(target=fill), time.monotonic(), 0.0
    thread.start()
    while thread.is_alive():
        before = time.monotonic()
        assert event.query()
        longest = max(longest, time.monotonic() - before)
        time.sleep(1e-3)
    blocked = time.monotonic() - began
    torch.cuda.synchronize()
    assert x.item() == 5000 and blocked > 1.0, f"the queue was never full: {blocked:.3f} s"
    assert longest < 0.5, f"a query took {longest:.3f} s of the {blocked:.3f} s that the launch was blocked"
