"""One real GPU: ranks as processes, ranks as streams of one process, graphs. Run with `-m gpu`."""

import os
import signal
import time

import pytest
import torch

import tricomm
from tests import ranks
from tests.gpu.gpu_limits import within
from tests.kernels.arenas import expected, inputs, poisoned
from tests.marks import compiles
from tricomm.kernels.collectives import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REDUCTIONS = [(k.algorithm, k.protocol) for k in registry.of("all_reduce", 2) if compiles(k)]
CASES = [
    (1, torch.float32, "sum", 0),
    (1001, torch.bfloat16, "avg", 1),
    (4096, torch.float16, "max", 0),
    (517, torch.float64, "prod", 0),
    (300000, torch.bfloat16, "sum", 0),
    (3, torch.int64, "avg", 1),
    (1 << 20, torch.float32, "sum", 3),
]


def join(rank, world_size, url, **options):
    chosen = tricomm.Options(**{"timeout": 60.0, "share_device": True, **options})
    return tricomm.init(url, rank, world_size, "cuda:0", options=chosen)


def over(rank, world_size, tell, url, kind, algorithm, protocol):
    wrong = []
    kernel = registry.find("all_reduce", algorithm, protocol)
    with join(rank, world_size, url, arena_bytes=4 << 20) as comm:
        assert comm.kind == kind
        for seed, (count, dtype, op, offset) in enumerate(CASES):
            parts = inputs(kernel, count, dtype, world_size, seed)
            x = torch.zeros(count + offset, dtype=dtype, device="cuda")[offset:]
            x.copy_(parts[rank])
            out = poisoned(count, dtype).cuda()
            comm.all_reduce(x, op, out=out, algorithm=algorithm, protocol=protocol)
            comm.synchronize()
            if not torch.equal(out.cpu(), expected(kernel, parts, op)):
                wrong.append((count, str(dtype), op, offset))
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("algorithm", "protocol"), REDUCTIONS, ids=lambda v: v)
def test_processes_over_descriptors(world_size, algorithm, protocol, url):
    results = ranks.run(world_size, over, url, "cuda_vmm", algorithm, protocol, timeout=200)
    assert results == [[]] * world_size


def test_processes_over_cuda_ipc(url, monkeypatch):
    """Where descriptors of memory cannot be passed."""
    monkeypatch.setenv("TRICOMM_CUDA_VMM", "0")
    assert ranks.run(2, over, url, "cuda_ipc", "two_shot", "simple", timeout=200) == [[]] * 2


@pytest.mark.parametrize("task", ["fused", "memory"])
def test_tasks_of_the_evidence_kit(task):
    """Fused calls; users' own tensors, and memory that is suspended and resumed under a graph."""
    pytest.importorskip("msgspec")
    from tricomm.perf.evidence.stages import processes

    asked = {"tasks": [task], "kernel": task, "dry_run": False}
    assert processes.run(asked, 2)["kind"] == "cuda_vmm"


def replays(rank, world_size, tell, url, algorithm, protocol):
    """A captured graph, replayed and mixed with eager calls: the epoch lives on the device."""
    with join(rank, world_size, url) as comm:
        how = {"algorithm": algorithm, "protocol": protocol}
        x = torch.zeros(1000, device="cuda")
        comm.all_reduce(x, **how)  # compiled before capture
        comm.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_reduce(x, **how)
            comm.all_reduce(x, **how)
        wrong = 0
        with torch.cuda.stream(stream):
            for turn in range(50):
                x.fill_(float(rank + turn))
                graph.replay()
                y = torch.full((3,), float(rank), device="cuda")
                comm.all_reduce(y, **how)
                comm.synchronize()
                total = sum(r + turn for r in range(world_size)) * world_size
                wrong += int((x != total).sum()) + int((y != sum(range(world_size))).sum())
        return wrong


@pytest.mark.parametrize(("algorithm", "protocol"), REDUCTIONS, ids=lambda v: v)
def test_graph_replays_mixed_with_eager_calls(algorithm, protocol, url):
    assert ranks.run(2, replays, url, algorithm, protocol, timeout=200) == [0, 0]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize(("algorithm", "protocol"), REDUCTIONS, ids=lambda v: v)
def test_streams_of_one_process(world_size, algorithm, protocol):
    kernel = registry.find("all_reduce", algorithm, protocol)
    comms = tricomm.local(world_size, "cuda:0", options=tricomm.Options(timeout=60.0, arena_bytes=8 << 20))
    try:
        for seed, (count, dtype, op, offset) in enumerate(CASES):
            parts = inputs(kernel, count, dtype, world_size, seed)
            outs = [poisoned(count, dtype).cuda() for _ in comms]
            xs = [torch.zeros(count + offset, dtype=dtype, device="cuda")[offset:] for _ in comms]
            for x, part in zip(xs, parts, strict=True):
                x.copy_(part)
            torch.cuda.synchronize()
            for comm, x, out in zip(comms, xs, outs, strict=True):
                with torch.cuda.stream(comm.stream):
                    comm.all_reduce(x, op, out=out, algorithm=algorithm, protocol=protocol)
            for comm in comms:
                with torch.cuda.stream(comm.stream):
                    comm.synchronize()
            want = expected(kernel, parts, op)
            assert all(torch.equal(out.cpu(), want) for out in outs), (count, dtype, op)
    finally:
        for comm in comms:
            comm.close()


def endless(rank, world_size, tell, url):
    with join(rank, world_size, url) as comm:
        comm.barrier()
        tell(os.getpid())
        try:
            while True:
                comm.all_reduce(torch.ones(1000, device="cuda"))
                comm.synchronize()
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic()


def test_a_killed_rank_is_named_within_two_seconds(url):
    with ranks.start(2, endless, url, timeout=120) as started:
        pids = started.messages()
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        kind, text, caught = started.results()[0].value
    assert kind == "PeerDied" and "rank 1" in text
    assert caught - killed < within(2.0)


def two_streams(rank, world_size, tell, url):
    """Calls on two streams are ordered by events."""
    with join(rank, world_size, url) as comm:
        streams = [torch.cuda.Stream() for _ in range(2)]
        xs = [torch.full((1000,), float(rank + n), device="cuda") for n in range(10)]
        torch.cuda.synchronize()
        for n, x in enumerate(xs):
            with torch.cuda.stream(streams[n % 2]):
                comm.all_reduce(x)
        torch.cuda.synchronize()
        return [x[0].item() for x in xs]


def test_two_streams(url):
    assert ranks.run(2, two_streams, url) == [[float(1 + 2 * n) for n in range(10)]] * 2


def two_communicators(rank, world_size, tell, url):
    """Each rank launches them in another order: a graph and an eager call at the same time."""
    with join(rank, world_size, url, max_blocks=32) as comm, comm.split(range(world_size)) as second:
        streams = [torch.cuda.Stream() for _ in range(2)]
        xs = [torch.ones(1000, device="cuda") for _ in range(2)]
        for each, x in zip((comm, second), xs, strict=True):
            each.all_reduce(x)
        comm.synchronize()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[1]):
            second.all_reduce(xs[1])
        for number in (rank, 1 - rank) * 5:
            with torch.cuda.stream(streams[number]):
                graph.replay() if number else comm.all_reduce(xs[0])
        torch.cuda.synchronize()
        comm.check()
        second.check()
        return [x[0].item() for x in xs]


def test_two_communicators_in_another_order_on_each_rank(url):
    assert ranks.run(2, two_communicators, url, timeout=120) == [[2.0**6, 2.0**6]] * 2


def captures_too_early(rank, world_size, tell, url):
    """A call that has not run before is refused inside a capture; then it runs."""
    with join(rank, world_size, url) as comm:
        x, text = torch.full((1000,), 1.0, device="cuda"), ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)  # a graph needs something
            try:
                comm.all_reduce(x)
            except tricomm.InvalidArgument as error:
                text = str(error)
        comm.all_reduce(x)
        comm.synchronize()
        return text, x[0].item()


def test_a_capture_before_the_first_call_is_refused_and_the_group_goes_on(url):
    for text, value in ranks.run(2, captures_too_early, url, timeout=120):
        assert "run this call once before capture" in text and value == 2.0


def replays_apart(rank, world_size, tell, url, how):
    """Rank 0 replays once too often, or replays what rank 1 calls without a graph."""
    with join(rank, world_size, url, timeout=4.0) as comm:
        x = torch.ones(1000, device="cuda")
        comm.all_reduce(x)
        comm.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            comm.all_reduce(x)
        began = time.monotonic()
        try:
            if rank == 0 or how == "too often":
                with torch.cuda.stream(stream):
                    for _ in range(3 + (rank == 0)):
                        graph.replay()
            else:
                comm.all_reduce(x)
            with torch.cuda.stream(stream):
                comm.synchronize()
            if rank == 1:
                time.sleep(8.0)  # lives on, and calls nothing
        except tricomm.TricommError as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return "nothing", "", time.monotonic() - began


@pytest.mark.parametrize(("how", "kind"), [("too often", "CollectiveTimeout"), ("one rank only", "CollectiveMismatch")])
def test_replays_that_do_not_match_are_named(how, kind, url):
    (result, text, seconds), other = ranks.run(2, replays_apart, url, how, timeout=120)
    assert result == kind and "rank 1" in text, text
    assert seconds < within(6.0 if how == "too often" else 3.0)
    assert other[0] == (kind if how == "one rank only" else "nothing")
