"""Behaviour that only hardware can show: contexts, threads, freed memory, graphs that outlive their group, neighbours.

Each test decides a row of devtools/notes/hardware.md. Run with `-m gpu`; those of two GPUs are skipped with one.
"""

import os
import signal
import threading
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.gpu.gpu_limits import within
from tricomm.kernels import layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
OPTIONS = tricomm.Options(timeout=60.0, arena_bytes=4 << 20, share_device=True)


def join(rank, world_size, url, device="cuda:0"):
    return tricomm.init(url, rank, world_size, device, options=OPTIONS)


def of(rank, device="cuda:0"):
    return torch.full((1000,), float(rank + 1), device=device)


def captured(comm, x):
    """A graph of one call, and the stream that it was captured on."""
    comm.all_reduce(x)
    comm.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        comm.all_reduce(x)
    return stream, graph


@ranks.each(2, [3.0] * 20, timeout=280)
def test_groups_share_no_words(rank, world_size, tell, url):
    """A new group's control page may lie where an old one's was."""
    values = []
    for turn in range(20):
        with join(rank, world_size, f"{url}{turn}") as comm:
            x = of(rank)
            comm.all_reduce(x)
            comm.synchronize()
            values.append(x[0].item())
    return values


def test_groups_of_streams_share_no_words():
    for turn in range(20):
        comms = tricomm.local(2, "cuda:0", options=OPTIONS)
        xs = [of(rank) for rank in range(2)]
        torch.cuda.synchronize()
        order = (0, 1) if turn % 2 else (1, 0)
        for rank in order:
            with torch.cuda.stream(comms[rank].stream):
                comms[rank].all_reduce(xs[rank])
        torch.cuda.synchronize()
        for rank in order:
            comms[rank].close()
        assert [x[0].item() for x in xs] == [3.0, 3.0]


def from_everywhere(rank, world_size, tell, url, other):
    """A call in a new thread, in one that has used another device, and inside `torch.cuda.device(other)`."""
    device, seen = f"cuda:{0 if other is None else rank % 2}", []
    with join(rank, world_size, url, device) as comm:
        x = of(rank, device)
        comm.all_reduce(x)
        comm.synchronize()

        def call():
            x = of(rank, device)
            torch.cuda.synchronize(device)
            before = torch.cuda.current_device()
            work = comm.all_reduce(x, async_op=True)
            work.wait(timeout=30.0)
            comm.synchronize()
            seen.append((x[0].item(), torch.cuda.current_device() - before))

        def bare():  # nothing of torch's before it: a thread without a context
            comm.all_reduce(x)
            comm.synchronize()

        def abroad():
            torch.cuda.set_device(other)
            torch.ones(1, device="cuda")
            call()

        for action in (call, bare) if other is None else (call, bare, abroad):
            thread = threading.Thread(target=action)
            thread.start()
            thread.join(60)
        if other is not None:
            with torch.cuda.device(other):
                call()
        call()
        return seen, x[0].item()


def test_a_call_from_any_thread(url):
    assert ranks.run(2, from_everywhere, url, None, timeout=200) == [([(3.0, 0)] * 2, 6.0)] * 2


@two_gpus
@pytest.mark.parametrize("other", [0, 1])
def test_a_call_from_any_thread_and_any_device(url, other):
    assert ranks.run(2, from_everywhere, url, other, timeout=200) == [([(3.0, 0)] * 4, 6.0)] * 2


def replays_after_close(rank, world_size, tell, url):
    """The replay computes nothing, ends soon, and harms no other process."""
    comm = join(rank, world_size, url)
    x = of(rank)
    stream, graph = captured(comm, x)
    comm.close()
    began = time.monotonic()
    with torch.cuda.stream(stream):
        graph.replay()
        stream.synchronize()
    return time.monotonic() - began, torch.ones(4, device="cuda").sum().item()


def test_a_graph_that_outlives_its_group_is_harmless(url):
    for seconds, total in ranks.run(2, replays_after_close, url, timeout=120):
        assert seconds < within(2.0) and total == 4.0


def overlaps(rank, world_size, tell, url):
    """Rank 0's replay waits for rank 1, and a call on another stream overtakes it."""
    with join(rank, world_size, url) as comm:
        x = of(rank)
        stream, graph = captured(comm, x)
        comm.barrier()
        began = time.monotonic()
        try:
            if rank == 0:
                with torch.cuda.stream(stream):
                    graph.replay()
                time.sleep(0.5)
                comm.all_reduce(of(rank))
                comm.synchronize()
            while time.monotonic() < began + 30.0:
                comm.check()
                time.sleep(0.01)
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return "nothing", "", 30.0


def test_a_call_that_overtakes_a_replay_is_named_at_once(url):
    for kind, text, seconds in ranks.run(2, overlaps, url, timeout=120):
        assert kind == "GroupAborted" and "two launches of this communicator overlapped" in text, text
        assert seconds < within(3.0)


def test_memory_is_allocated_while_another_rank_waits():
    """`cudaMalloc` would have to wait for the kernel, and the kernel waits for the rank that allocates."""
    comms = tricomm.local(2, "cuda:0", options=OPTIONS)
    xs = [of(rank) for rank in range(2)]
    torch.cuda.synchronize()
    try:
        for comm, x in zip(comms, xs, strict=True):
            with torch.cuda.stream(comm.stream):
                comm.all_reduce(x)  # loaded and compiled
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # waits for the device, so before the kernel that waits
        with torch.cuda.stream(comms[0].stream):
            comms[0].all_reduce(xs[0])
        fresh = torch.empty(256 << 20, dtype=torch.uint8, device="cuda:0")  # not in the allocator's cache
        with torch.cuda.stream(comms[1].stream):
            comms[1].all_reduce(xs[1])
            comms[1].synchronize()
        torch.cuda.synchronize()
        assert fresh.numel() == 256 << 20 and [x[0].item() for x in xs] == [6.0, 6.0]
    finally:
        for comm in comms:
            comm.close()


def outlives(rank, world_size, tell, url):
    """One-shot kernels push into the memory of a rank that has died."""
    comm = join(rank, world_size, url)
    x = of(rank)
    comm.all_reduce(x)
    comm.barrier()
    tell(os.getpid())
    if rank == 1:
        time.sleep(60)
    try:
        while True:
            comm.all_reduce(x)
    except tricomm.TricommError as error:
        result = type(error).__name__, time.monotonic()
    comm.close()
    x = of(rank)  # an Xid would have taken the context along
    y = torch.ones(1 << 20, device="cuda").sum().item()
    torch.cuda.synchronize()
    return (*result, x[0].item(), y)


def test_the_memory_of_a_dead_peer_crashes_no_survivor(url):
    with ranks.start(2, outlives, url, timeout=120) as started:
        pids = started.messages()
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        kind, caught, one, total = started.results([0])[0].value
    assert kind == "PeerDied" and (one, total) == (1.0, float(1 << 20))
    assert caught - killed < within(2.0), "the driver keeps a dead process's pidfd back until its context is gone"


@ranks.each(2, True, timeout=120)
def test_host_writes_have_arrived_when_a_call_has_run(rank, world_size, tell, url):
    """No call runs: the words by which the host sees a kernel come and go are equal to the last epoch."""
    with join(rank, world_size, url) as comm:
        for _ in range(100):
            comm.all_reduce(of(rank))
        comm.synchronize()
        words = comm._group.words
        return bool((words[layout.ENDED : layout.CONTROL_WORDS] == words[layout.STARTED] + 1).all())
