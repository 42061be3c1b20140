"""all_to_all_v on one real GPU: other lengths in every call, two streams, a captured graph. Run with `-m gpu`."""

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.test_uneven import PROTOCOLS, lengths, sent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@ranks.each(2, [], timeout=200)
def test_on_a_gpu_lengths_change_on_two_streams_and_stay_in_a_graph(rank, world_size, tell, url):
    wrong = []
    with tricomm.init(url, rank, world_size, "cuda:0", options=tricomm.Options(timeout=60.0)) as comm:

        def call(number, x, y):
            """Call `number` on the current stream, into the front of `y`; returns the expected result."""
            rows = lengths(world_size, number)
            into, takes = rows[rank], [row[rank] for row in rows]
            parts = [sent(rank, to, number, n, 3, torch.int32) for to, n in enumerate(into)]
            x[: sum(into)].copy_(torch.cat(parts))
            comm.all_to_all_v(x[: sum(into)], into, takes, y[: sum(takes)], protocol=PROTOCOLS[number % 2])
            return torch.cat([sent(r, rank, number, n, 3, torch.int32) for r, n in enumerate(takes)])

        def look(what, y, want):
            comm.synchronize()
            if not torch.equal(y[: len(want)].cpu(), want):
                wrong.append(what)

        xs, ys = (torch.full((2, 1024, 4), -99, dtype=torch.int32, device="cuda")[..., :3] for _ in range(2))
        xs, ys = xs.contiguous(), ys.contiguous()
        for number in range(2):
            call(number, xs[0], ys[0])  # compiled before the capture
        comm.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for number in range(2, 50):
            with torch.cuda.stream(streams[number % 2]):
                look(number, ys[number % 2], call(number, xs[number % 2], ys[number % 2]))
        rows = lengths(world_size, 60)
        into, takes = rows[rank], [row[rank] for row in rows]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            comm.all_to_all_v(xs[0][: sum(into)], into, takes, ys[0][: sum(takes)], protocol="ll")
        with torch.cuda.stream(streams[0]):
            for number in range(61, 71):
                look(number, ys[1], call(number, xs[1], ys[1]))  # other lengths between the replays
                parts = [sent(rank, to, number, n, 3, torch.int32) for to, n in enumerate(into)]
                xs[0][: sum(into)].copy_(torch.cat(parts))
                graph.replay()
                want = torch.cat([sent(r, rank, number, n, 3, torch.int32) for r, n in enumerate(takes)])
                look(f"graph {number}", ys[0], want)
    return wrong
