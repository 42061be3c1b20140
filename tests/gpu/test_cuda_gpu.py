"""Sharing GPU memory between real processes. Run with `-m gpu` on a machine with a GPU; one is enough."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tricomm import errors
from tricomm.store.cuda.cuda_arena import CudaArena
from tricomm.store.cuda.cuda_ipc import open_cuda_ipc
from tricomm.store.host_words import HostWords
from tricomm.store.local_arena import LocalGroup, host_page_address, raw_view

NBYTES = 3 << 20
SECONDS = 120.0


class QueueControl:
    """The control page's part that is needed here, over one queue per rank."""

    def __init__(self, rank: int, queues: list[Any]) -> None:
        self.rank, self.world_size = rank, len(queues)
        self._queues, self._early = queues, list[tuple[int, str, bytes]]()
        self.page = mmap.mmap(-1, 4096)
        self.host_words = HostWords(self.page, host_page_address(self.page))

    def alive(self, rank: int) -> bool:
        return True

    def exchange(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        deadline = time.monotonic() + timeout
        for inbox in self._queues:
            inbox.put((self.rank, what, payload))
        got: dict[int, bytes] = {}
        while len(got) < self.world_size:
            sender, stage, data = self._next(what, got, deadline)
            got[sender] = data
        return [got[rank] for rank in range(self.world_size)]

    def _next(self, what: str, got: dict[int, bytes], deadline: float) -> tuple[int, str, bytes]:
        for index, message in enumerate(self._early):
            if message[1] == what and message[0] not in got:
                return self._early.pop(index)
        while True:
            try:
                message = self._queues[self.rank].get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise errors.CollectiveTimeout(f"only rank(s) {sorted(got)} reached {what}") from None
            if message[1] == what and message[0] not in got:
                return message
            self._early.append(message)

    def agree(self, error: BaseException | None, what: str, timeout: float) -> None:
        mine = b"" if error is None else f"{type(error).__name__} {error}".encode()
        for rank, data in enumerate(self.exchange(mine, what, timeout)):
            if data:
                name, _, text = data.decode().partition(" ")
                raise getattr(errors, name)(f"{what}: rank {rank}: {text}")


def _child(
    body: Callable[[QueueControl, str], None], rank: int, queues: list[Any], visible: str | None, results: Any
) -> None:
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        body(QueueControl(rank, queues), "cuda:0")
        results.put((rank, "done"))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def run_processes(body: Callable[[QueueControl, str], None], visible: list[str | None]) -> None:
    spawn = multiprocessing.get_context("spawn")
    queues, results = [spawn.Queue() for _ in visible], spawn.Queue()
    children = [
        spawn.Process(target=_child, args=(body, rank, queues, visible[rank], results)) for rank in range(len(visible))
    ]
    for child in children:
        child.start()
    try:
        outcomes = dict(results.get(timeout=SECONDS) for _ in children)
    finally:
        for child in children:
            child.join(10)
            child.kill()
            child.join()
    for rank, outcome in sorted(outcomes.items()):
        assert outcome == "done", f"rank {rank}: {outcome}"


def _write_and_read(control: QueueControl, device: str) -> None:
    torch.cuda.set_device(device)
    arena = open_cuda_ipc(control, NBYTES, torch.device(device), 60.0)
    assert not arena.tensor(control.rank, 0, (NBYTES,), torch.uint8).any(), "the block starts zeroed"
    for dtype, offset in ((torch.float32, 0), (torch.bfloat16, 1 << 20), (torch.float8_e4m3fn, 2 << 20)):
        _write_to_all(control, arena, dtype, offset)
    _touch_control_words(control, arena)
    control.agree(None, "done", 60.0)
    arena.close()
    arena.close()
    control.host_words.close()
    control.host_words.close()
    _allocations_still_work(device)


def _write_to_all(control: QueueControl, arena: CudaArena, dtype: torch.dtype, offset: int) -> None:
    for target in range(control.world_size):
        view = arena.tensor(target, offset + 512 * control.rank, (128,), dtype)
        assert view.data_ptr() == arena.bases[target] + offset + 512 * control.rank, "a view, not a copy"
        view.copy_(torch.full((128,), 1.0 + control.rank, device=view.device).to(dtype))
    torch.cuda.synchronize()
    control.agree(None, f"written {dtype}", 60.0)
    for writer in range(control.world_size):
        result = arena.tensor(control.rank, offset + 512 * writer, (128,), dtype).float().cpu()
        assert torch.equal(result, torch.full((128,), 1.0 + writer)), f"rank {writer} wrote {dtype}"


def _touch_control_words(control: QueueControl, arena: CudaArena) -> None:
    words = raw_view(arena.control_address, (1024,), torch.int32, arena.device)
    control.page[4:8] = (77).to_bytes(4, "little")
    assert words[1].item() == 77, "the GPU reads what the host wrote"
    words[2] = 88
    torch.cuda.synchronize()
    assert int.from_bytes(control.page[8:12], "little") == 88, "the host reads what the GPU wrote"


def _allocations_still_work(device: str) -> None:
    assert torch.ones(1000, device=device).sum().item() == 1000


def _open_and_close_often(control: QueueControl, device: str) -> None:
    torch.cuda.set_device(device)
    torch.ones(1, device=device)
    free = []
    for _ in range(20):
        open_cuda_ipc(control, 64 << 20, torch.device(device), 60.0).close()
        control.agree(None, "round", 60.0)
        free.append(torch.cuda.mem_get_info()[0])
        control.agree(None, "measured", 60.0)
    assert free[-1] >= free[2] - (64 << 20), f"memory leaks: {free}"


def _no_gpu(control: QueueControl, device: str) -> None:
    with pytest.raises(errors.ResourceError, match=r"rank 0: .*pip install tricomm\[cuda\]"):
        open_cuda_ipc(control, NBYTES, torch.device(device), 60.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_all_ranks_learn_what_is_missing() -> None:
    run_processes(_no_gpu, ["", ""])


@pytest.mark.gpu
@pytest.mark.parametrize("body", [_write_and_read, _open_and_close_often])
def test_processes_on_one_gpu(body: Callable[[QueueControl, str], None]) -> None:
    run_processes(body, [None, None])


@pytest.mark.gpu
@pytest.mark.parametrize("visible", [["0,1", "1,0"], ["0", "1"]], ids=["all visible", "peer invisible"])
def test_processes_on_two_gpus(visible: list[str | None]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    run_processes(_write_and_read, visible)


@pytest.mark.gpu
def test_a_query_does_not_wait_for_a_launch_on_a_full_queue() -> None:
    """The watch asks an event: if that waited behind another thread's launch, nobody would end what that waits for."""
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


@pytest.mark.gpu
def test_ranks_of_one_process_on_one_gpu() -> None:
    memory = [mmap.mmap(-1, 4096) for _ in range(2)]
    pages = [HostWords(page, host_page_address(page)) for page in memory]
    arenas = LocalGroup(2, torch.device("cuda:0"), pages).open(NBYTES)
    assert arenas[0].stream is not None and arenas[0].stream != arenas[1].stream
    for arena in arenas:
        with torch.cuda.stream(arena.stream):
            arena.tensor(1 - arena.rank, 0, (1000,), torch.float32).fill_(float(arena.rank))
    torch.cuda.synchronize()
    for arena in arenas:
        assert torch.equal(
            arena.tensor(arena.rank, 0, (1000,), torch.float32).cpu(), torch.full((1000,), 1.0 - arena.rank)
        )
    for arena in arenas:
        arena.close()
        arena.close()
    for page in pages:
        page.close()
