"""A communicator's calls over compiled kernels: chosen, packed and launched as on a GPU, and equal to torch."""

import time
from dataclasses import replace

import pytest
import torch

from tests.core.bodies.exact import Made, outcome
from tests.explorer.compiled.small_kernels import scaled
from tests.kernels import fake_launch
from tricomm import simulate
from tricomm.errors import CollectiveMismatch, GroupAborted, InvalidArgument, PeerDied
from tricomm.explorer.compiled.compiled_runtime import checked_options
from tricomm.explorer.ptx.global_memory import BadAddress
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import cuda_launcher
from tricomm.kernels.launch.cuda_launcher import make_launcher

SIZE, COUNT = 2, 300


def ran(fn, world_size=SIZE, **more):
    return simulate(fn, world_size, compiled="sm_90", **more)


def inputs(rank, rows=1, call=0):
    return (torch.arange(rows * COUNT) % 97 - 40 + 7 * rank + call).float()


def test_every_collective_is_exact():
    collectives = dict.fromkeys(k.collective for k in registry.KERNELS if k.collective != "barrier")
    cases = [Made(name, None, None, "float32", "sum", COUNT, 0, "fresh") for name in collectives]
    splits = [[100, 200], [50, 60]]  # [from][to]

    def body(comm):
        rank, other = comm.rank, 1 - comm.rank
        assert comm.simulated and comm.gpu is not None
        choice = comm.explain("all_reduce", COUNT * SIZE * 4)
        assert "sm_90" in str(comm._internal.group.fingerprint) and (choice.block, choice.warps) == (32, 1)
        assert [case for number, case in enumerate(cases) if not outcome(comm, case, number)] == []
        parts = [list(inputs(r)[: sum(rows)].split(rows)) for r, rows in enumerate(splits)]
        rows = comm.all_to_all_v(torch.cat(parts[rank]), splits[rank], [row[rank] for row in splits])
        assert torch.equal(rows, torch.cat([part[rank] for part in parts]))
        x, y = inputs(rank), torch.full((COUNT,), 9.0)
        if rank == 0:
            comm.send(x, other)
        else:
            assert comm.recv(y) == other and torch.equal(y, inputs(other))
        handle = comm.symmetric((COUNT,), torch.float32)
        handle.local.copy_(x)
        comm.barrier()
        assert torch.equal(comm.all_reduce(handle, out=torch.empty(COUNT)), x + inputs(other))
        comm.barrier()
        return "fine"

    assert ran(body) == ["fine"] * SIZE


def test_a_call_returns_before_its_kernel_has_run_and_reading_the_result_waits():
    def body(comm):
        x = inputs(comm.rank)
        seen = x.numpy()  # the memory itself, which no stream orders
        before = seen.copy()
        work = comm.all_reduce(x, async_op=True)
        assert (seen == before).all()
        while not work.is_completed():
            pass
        comm.synchronize()
        assert work.is_completed()
        return seen.copy(), x

    for seen, x in ran(body):
        expected = sum(inputs(rank) for rank in range(SIZE))
        assert torch.equal(x, expected) and (seen == expected.numpy()).all()


def test_a_replayed_call_reads_the_current_values_of_its_tensors():
    def body(comm):
        x = inputs(comm.rank)
        comm.all_reduce(x.clone())
        graph, made = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            y = x * 2
            comm.all_reduce(y)
        for call in range(3):
            x.copy_(inputs(comm.rank, call=call))
            graph.replay()
            made.append(y.clone())
        comm.close()  # a group with a captured graph aborts its kernels when it is closed, which is no fault
        return made

    for made in ran(body):
        for call, y in enumerate(made):
            assert torch.equal(y, 2 * sum(inputs(rank, call=call) for rank in range(SIZE)))


def test_a_graph_is_replayed_after_its_communicator_was_suspended():
    def body(comm):
        x, made = inputs(comm.rank), []
        comm.all_reduce(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            comm.all_reduce(y)
            with pytest.raises(InvalidArgument, match="captures a CUDA graph"):
                comm.suspend()
        for call in range(2):
            x.copy_(inputs(comm.rank, call=call))
            graph.replay()
            comm.suspend()
            with pytest.raises(InvalidArgument, match="suspended"):
                comm.all_reduce(x)
            comm.resume()
            graph.replay()
            made.append(y.clone())
            comm.all_reduce(x)
            made.append(2 * x)
        return made

    for made in ran(body):
        for call, y in enumerate(made):
            assert torch.equal(y, 2 * sum(inputs(rank, call=call // 2) for rank in range(SIZE)))


def test_a_replay_during_an_eager_call_is_noticed():
    """The two kernels of one rank overlap, or two ranks run different ones first. Of one block each: of many blocks one
    always meets a peer's other kernel."""

    def body(comm):
        x, y = inputs(comm.rank)[:32].clone(), inputs(comm.rank)[:32].clone()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        comm.all_reduce(x)
        comm.synchronize()
        with torch.cuda.graph(graph):
            comm.all_reduce(y)
        with torch.cuda.stream(side):
            graph.replay()
        comm.all_reduce(x)  # nothing orders it after the replay
        comm.synchronize()

    noticed = set()
    for seed in range(8):
        with pytest.raises((GroupAborted, CollectiveMismatch)) as error:
            ran(body, seed=seed)
        noticed.add("overlapped" if "two launches of this communicator overlapped" in str(error.value) else "mismatch")
    assert noticed == {"overlapped", "mismatch"}


def test_a_users_kernel_runs_with_tritons_specialisation():
    def body(comm):
        x, pair = torch.zeros(64), torch.arange(65, dtype=torch.float32)
        comm.launch(scaled, 1, x, (pair, pair[1:], 5), 48, 2.5, True, 1, 1 << 40, N=64, num_warps=2)
        return x

    (x,) = ran(body, 1)
    assert torch.equal(x[:48], torch.arange(48) * 2.5 + 1 + 2.0**41) and not x[48:].any()


def test_a_wrong_hint_of_alignment_shows():
    kernel = next(k for k in registry.KERNELS if k.name == "all_reduce_one_shot_ll")
    constexprs = {**fake_launch.CONSTEXPRS, "WORLD_SIZE": 1, "ALIGNED": True, **kernel.fixed}

    def body(comm):
        group = layout.group_argument(comm.group_table, comm.group_table, 1)
        launch = make_launcher(kernel.function, 1, constexprs, 32, True, (), group, comm.gpu.driver)
        x = torch.zeros(4097)
        assert x.data_ptr() % 16 == 0
        with comm.gpu.driver.holding((x, comm.group_table)):
            launch(x[1:], x[1:], 4096, 1 << 32)
        comm.synchronize()

    with pytest.raises(BadAddress, match="align|divide|multiple"):
        ran(body, 1)


@pytest.mark.parametrize("synchronized", [True, False])
def test_calls_that_do_not_match_are_named(synchronized):
    def body(comm):
        comm.all_reduce(torch.zeros(COUNT + comm.rank))
        if synchronized:
            comm.synchronize()

    with pytest.raises(CollectiveMismatch, match="count=301"):
        ran(body)


def test_a_rank_that_ends_in_an_error_is_dead_for_its_peers():
    seen = []

    def body(comm):
        x = inputs(comm.rank)
        comm.all_reduce(x)
        comm.synchronize()
        if comm.rank == 1:
            raise KeyError("mine")
        try:
            comm.all_reduce(x)
            comm.synchronize()
        except PeerDied as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):
        ran(body)
    assert "rank 1" in seen[0]


def test_a_compile_may_take_longer_than_other_host_code(monkeypatch):
    compile_kernel = cuda_launcher.compile_kernel

    def slow(*args):
        time.sleep(1.5)
        return compile_kernel(*args)

    monkeypatch.setattr(cuda_launcher, "compile_kernel", slow)
    monkeypatch.setattr(cuda_launcher, "_compiled", {})
    monkeypatch.setattr(cuda_launcher, "_loaded", {})
    options = replace(checked_options(1, None), stall_timeout=0.5)
    assert ran(lambda comm: comm.all_reduce(torch.ones(4)).sum().item(), 1, options=options) == [4.0]
    with pytest.raises(InvalidArgument, match="has not come back to tricomm for 0.5 s"):
        ran(lambda comm: time.sleep(1.5), 1, options=options)
