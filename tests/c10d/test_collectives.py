"""Every collective of the c10d surface on both CPU routes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.c10d.bodies import alias_bodies
from tests.c10d.bodies.groups import ROUTES, default_group, of, poisoned, same, wanted
from tests.core.bodies.common_bodies import attempt
from tests.soak.fuzz_calls import KINDS, REDUCTIONS, Turn, messages
from tricomm.c10d import message_collectives
from tricomm.c10d.call_records import CallContext
from tricomm.errors import CollectiveMismatch

LARGE = message_collectives._SCATTER_BYTES
both_routes = pytest.mark.parametrize("route", ROUTES)
# Interpreted calls are slow, so only every third pair is run, which covers each type and each operation.
REST = pytest.param("kernels", 1, marks=pytest.mark.soak)
PAIRS = pytest.mark.parametrize(("route", "step"), [("gloo", 1), ("kernels", 3), REST])


def of_every_type(rank, world_size, tell, url, route, step):
    """The fuzz's calls with every `step`th pair of type and operation; those that reduce nothing, once a type."""
    wrong, seen = [], set()
    with default_group(rank, world_size, url, route) as group:
        for number, pair in enumerate(REDUCTIONS[::step]):
            for place, (kind, reduces) in enumerate(KINDS.items()):
                alone = kind is messages and world_size == 1
                if (reduces or pair[0] not in seen) and not alone:
                    turn = Turn(group, list(range(world_size)), rank, (number, place), 0, pair)
                    made = kind(turn)
                    made.start(False)
                    wrong += [(kind.__name__, str(pair))] * (not all(same(got, want) for got, want in made.pairs))
            seen.add(pair[0])
    return wrong


@pytest.mark.parametrize("world_size", [1, 3, *[pytest.param(n, marks=pytest.mark.soak) for n in (2, 4)]])
@PAIRS
def test_every_call_of_every_type_and_operation(world_size, route, step, url):
    assert ranks.run(world_size, of_every_type, url, route, step, timeout=200) == [[]] * world_size


@both_routes
@ranks.each(3, [], timeout=200)
def test_premultiplied_sums(rank, world_size, tell, url, route):
    """PREMUL_SUM in every call that reduces. Inputs, and outputs of refused calls, keep their values."""
    wrong, factor = [], 4.0
    with default_group(rank, world_size, url, route) as group:

        def check(what, result, want):
            if not same(result, want):
                wrong.append(f"{what}: {result.tolist()} and not {want.tolist()}")

        op = dist._make_nccl_premul_sum(factor)
        for call, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.bfloat16)):
            parts = [of(r, (2 * world_size,), dtype, call) for r in range(world_size)]
            total = wanted([factor * part for part in parts], "SUM", dtype)
            mine = slice(2 * rank, 2 * rank + 2)
            x, spread = parts[rank].clone(), torch.zeros(2 * world_size, 2, dtype=dtype)
            dist.all_reduce(x, op)
            check("all_reduce", x, total)
            spread[:, 0] = parts[rank]
            dist.all_reduce(spread[:, 0], op)
            check("all_reduce with gaps", spread[:, 0], total)
            x = parts[rank].clone()
            dist.reduce(x, 1, op)
            check("reduce", x, total if rank == 1 else parts[rank])
            y = poisoned((2,), dtype)
            dist.reduce_scatter(y, list(parts[rank].clone().chunk(world_size)), op)
            check("reduce_scatter", y, total[mine])
            y, x = poisoned((2,), dtype), parts[rank].clone()
            dist.reduce_scatter_tensor(y, x, op)
            check("reduce_scatter_tensor", y, total[mine])
            check("its input", x, parts[rank])
            several = [parts[rank].clone(), parts[rank][:3].clone()]
            opts = dist.AllreduceCoalescedOptions()
            opts.reduceOp = op
            group.allreduce_coalesced(several, opts).wait()
            check("all_reduce_coalesced", torch.cat(several), torch.cat([total, total[:3]]))
            ys = [poisoned((2,), dtype), poisoned((1,), dtype)]
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = op
            group.reduce_scatter_tensor_coalesced(
                ys, [parts[rank].clone(), parts[rank][:world_size].clone()], opts
            ).wait()
            check("reduce_scatter_tensor_coalesced", torch.cat(ys), torch.cat([total[mine], total[rank : rank + 1]]))
        x = torch.ones(3)
        works = [dist.all_reduce(x, o, async_op=True) for o in (dist.ReduceOp.SUM, dist._make_nccl_premul_sum(0.5))]
        for work in works:
            work.wait()
        check("calls in their order", x, torch.full((3,), 0.5 * world_size**2))
        several = [x.fill_(1.0), x]
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = dist._make_nccl_premul_sum(torch.tensor([[2.0]]))
        group.allreduce_coalesced(several, opts).wait()
        check("one tensor twice", x, torch.full((3,), 2.0 * world_size))  # each from the inputs
        x = torch.full((2 + rank % 2,), 3.0)
        try:
            dist.all_reduce(x, op)
            wrong.append("ranks with other counts")
        except CollectiveMismatch:
            check("after a mismatch", x, torch.full_like(x, 3.0))
    return wrong


@both_routes
@ranks.each(3, [], timeout=200)
def test_one_element_or_none_is_contiguous_with_any_stride(rank, world_size, tell, url, route):
    """One element, or none, is contiguous with any stride."""
    wrong = []
    with default_group(rank, world_size, url, route):
        dist.all_reduce(torch.ones(3, 4)[:0, 1])
        dist.all_gather([torch.ones(3, 4)[:0, 1] for _ in range(world_size)], torch.ones(3, 4)[:0, 1])
        total = torch.tensor([sum(range(1, world_size + 1))])
        for dtype in (torch.float32, torch.int16, torch.bool, torch.uint64, torch.complex64):
            x = torch.full((3, 4), rank + 1).to(dtype)
            dist.all_reduce(x[:1, 1])
            wrong += [] if same(x[:1, 1], total.to(dtype)) else [f"all_reduce of {dtype}"]
            rows = [poisoned((3, 2), dtype)[:1, 0] for _ in range(world_size)]
            dist.all_gather(rows, torch.full((3, 4), rank + 1).to(dtype)[:1, 1])
            if not same(torch.cat(rows), torch.arange(1, world_size + 1).to(dtype)):
                wrong.append(f"all_gather of {dtype}")
        z = torch.tensor([1 + (2 + rank) * 1j])
        dist.all_reduce(z.conj().imag)
        want = 1 + sum(2 + r for r in range(world_size)) * 1j
        wrong += [] if same(z, torch.tensor([want])) else [f"the negative of a half: {z}"]
    return wrong


@both_routes
@ranks.each(3, [], timeout=200)
def test_tensors_that_are_not_contiguous(rank, world_size, tell, url, route):
    """Tensors that are not contiguous, that require grad, that are views; in and out of no_grad."""
    wrong = []
    parts = [of(r, (6, 4)) for r in range(world_size)]
    total = sum(parts)
    with default_group(rank, world_size, url, route):
        x = parts[rank].clone().t()
        dist.all_reduce(x)
        wrong += [] if same(x, total.t()) else ["transposed"]
        base = parts[rank].clone()
        dist.all_reduce(base[:, 1])
        want = parts[rank].clone()
        want[:, 1] = total[:, 1]
        wrong += [] if same(base, want) else ["column"]
        base = parts[rank].clone()
        dist.broadcast(base[::2], 1)
        want = parts[rank].clone()
        want[::2] = parts[1][::2]
        wrong += [] if same(base, want) else ["rows"]
        leaf = parts[rank].clone().requires_grad_()
        dist.all_reduce(leaf)
        wrong += [] if same(leaf.detach(), total) and leaf.requires_grad else ["leaf"]
        with torch.no_grad():
            x = parts[rank].clone()
            dist.all_reduce(x)
            wrong += [] if same(x, total) else ["no_grad"]
        outs = [poisoned((4, 6)).t() for _ in range(world_size)]
        dist.all_gather(outs, parts[rank])
        wrong += [] if all(map(same, outs, parts)) else ["all_gather"]
        sparse = torch.eye(4)[rank].to_sparse()
        dist.all_reduce(sparse)
        wrong += [] if same(sparse.to_dense(), torch.eye(4)[:world_size].sum(0)) else ["sparse"]
    return wrong


@both_routes
@ranks.each(3, [], timeout=200)
def test_coalesced_calls(rank, world_size, tell, url, route):
    """Calls that `tests.soak.fuzz_calls` does not make: coalesced calls of other kinds, barriers."""
    wrong = []
    mine = [of(rank, (n,), call=n) for n in (3, 7, 1)]
    with default_group(rank, world_size, url, route) as world:
        xs = [x.clone() for x in mine]
        with dist._coalescing_manager(device=torch.device("cpu")):
            for x in xs:
                dist.broadcast(x, 0)
        wrong += [] if all(same(x, of(0, x.shape, call=len(x))) for x in xs) else ["manager broadcast"]
        outs = [poisoned((world_size * len(x),)) for x in mine]
        with dist._coalescing_manager():
            for out, x in zip(outs, mine, strict=True):
                dist.all_gather_into_tensor(out, x)
        want = [torch.cat([of(r, x.shape, call=len(x)) for r in range(world_size)]) for x in mine]
        wrong += [] if all(map(same, outs, want)) else ["manager all_gather"]
        outs = [poisoned((1,)) for _ in range(2)]
        wide = [[of(r, (world_size,), call=c) for r in range(world_size)] for c in range(2)]
        with dist._coalescing_manager():
            for out, parts in zip(outs, wide, strict=True):
                dist.reduce_scatter_tensor(out, parts[rank])
        right = all(same(o, sum(p)[rank : rank + 1]) for o, p in zip(outs, wide, strict=True))
        wrong += [] if right else ["manager reduce_scatter"]
        lists = [[poisoned(x.shape) for x in mine] for _ in range(world_size)]
        world.allgather_coalesced(lists, mine).wait()
        ok = all(same(row[i], of(r, x.shape, call=len(x))) for r, row in enumerate(lists) for i, x in enumerate(mine))
        wrong += [] if ok else ["allgather_coalesced"]
        dist.barrier(async_op=True).wait()
        world.monitored_barrier()
    return wrong


@both_routes
@ranks.each(2, [], timeout=200)
def test_autograd_does_not_see_a_call(rank, world_size, tell, url, route):
    """No call changes the version by which autograd sees that a tensor was written to: NCCL's do not."""
    wrong = []
    with default_group(rank, world_size, url, route):

        def check(name, call, *written):
            before = [x._version for x in written]
            call()
            if before != [x._version for x in written]:
                wrong.append(name)

        x, gaps, wide = torch.ones(2), torch.ones(2, 2)[:, 0], torch.ones(2 * world_size)
        outs = list(torch.zeros(world_size, 2).unbind())
        check("all_reduce", lambda: dist.all_reduce(x), x)
        check("all_reduce with gaps", lambda: dist.all_reduce(gaps), gaps)
        check("broadcast", lambda: dist.broadcast(x, 0), x)
        check("all_gather", lambda: dist.all_gather(outs, x), *outs)
        check("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(wide, x), wide)
        check("reduce_scatter", lambda: dist.reduce_scatter(x, list(wide.chunk(world_size))), x)
        check("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(x, wide), x)
        check("gather", lambda: dist.gather(x, outs if rank == 0 else None), *outs)
        check("scatter", lambda: dist.scatter(x, outs if rank == 0 else None), x)
        check("all_to_all", lambda: dist.all_to_all(outs, list(wide.chunk(world_size))), *outs)
        check("all_to_all_single", lambda: dist.all_to_all_single(wide.clone(), wide), wide)
        check("message", lambda: dist.send(x, 1) if rank == 0 else dist.recv(x), x)
        saved = torch.ones(2, requires_grad=True)
        hidden = saved.relu()  # whose gradient needs what relu gave
        dist.all_reduce(hidden)
        hidden.sum().backward()
        wrong += [] if saved.grad.tolist() == [1.0, 1.0] else ["gradient"]
    return wrong


@both_routes
def test_tensors_that_share_memory(route, url):
    assert ranks.run(2, alias_bodies.overlapping, url, route) == [[], []]


# Broadcasts in shares: large ones over messages, of three ranks or more


def exact(rank, world_size, tell, url, swap_rows=False):
    """The broadcasts of every root and of odd sizes that gave something wrong, and whether any went in shares.

    `swap_rows`: rank 1 receives the shares of two ranks into each other's place.
    """
    wrong, in_shares = [], []
    real, exchange = message_collectives._scatter_and_gather, CallContext.exchange

    def counted(*given):
        in_shares.append(True)
        real(*given)

    def swapped(context, sends, receives):
        places = reversed(receives) if rank == 1 else receives
        exchange(context, sends, [(r, at) for (r, _), (_, at) in zip(receives, places, strict=True)])

    message_collectives._scatter_and_gather = counted
    with default_group(rank, world_size, url):
        if swap_rows:
            CallContext.exchange = swapped
            return list(_each_root(rank, world_size, LARGE + LARGE // 2, torch.uint8)), bool(in_shares)
        sizes = [(LARGE + 3, torch.uint8), (LARGE // 4 - 1, torch.float32)]
        for size, dtype in sizes:
            wrong += _each_root(rank, world_size, size, dtype)
        message_collectives._SCATTER_BYTES = 48
        for size in (0, 1, 11, 12, 13, 47, 48, 49, 60, 997):
            for dtype in (torch.uint8, torch.float32, torch.complex64):
                wrong += _each_root(rank, world_size, size, dtype)
    return wrong, bool(in_shares)


def _each_root(rank, world_size, size, dtype):
    for root in range(world_size):
        call = size + root
        x = of(root, (size,), dtype, call=call) if rank == root else poisoned((size,), dtype)
        dist.broadcast(x, root)
        if not same(x, of(root, (size,), dtype, call=call)):
            yield size, str(dtype), root


def dies(rank, world_size, tell, url, lost, exchange):
    """Rank `lost` dies at its data exchange of that number, in a broadcast of rank 0. Returns the first error of the
    others, in that call or in the next one, and its seconds."""
    real, made = CallContext.exchange_memory, []

    def dying(context, sends, receives):
        made.append(True)
        if rank == lost and len(made) == exchange:
            os.kill(os.getpid(), signal.SIGKILL)
        real(context, sends, receives)

    with default_group(rank, world_size, url):
        dist.barrier()
        CallContext.exchange_memory = dying
        began = time.monotonic()
        x = torch.zeros(LARGE)
        said = attempt(lambda: (dist.broadcast(x, 0), dist.barrier()))
        return said[0], said[1], time.monotonic() - began


def mismatches(rank, world_size, tell, url, checked):
    """Broadcasts that differ between ranks: send each one's error, and whether the group's next broadcast is right."""
    os.environ["TRICOMM_CHECK"] = str(int(checked))
    said = []
    with default_group(rank, world_size, url, timeout=10.0):
        cases = [
            lambda: dist.broadcast(torch.zeros(LARGE + 8 * (rank == 2), dtype=torch.uint8), 0),
            lambda: dist.broadcast(torch.zeros(LARGE - 8 * (rank == 1), dtype=torch.uint8), 0),  # in one part there
            lambda: dist.broadcast(torch.zeros(LARGE), 1 if rank == 1 else 0),
        ]
        for case in cases if checked else cases[:1]:
            said.append(attempt(case)[:2])
            if checked:
                x = of(0, (LARGE,), call=7) if rank == 0 else poisoned((LARGE,))
                dist.broadcast(x, 0)
                assert same(x, of(0, (LARGE,), call=7))
    return said


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_broadcast_in_shares_is_exact_from_every_root(world_size, url):
    assert ranks.run(world_size, exact, url) == [([], world_size > 2)] * world_size


def test_shares_of_a_broadcast_in_the_wrong_order_are_seen(url):
    wrong = [found for found, _ in ranks.run(4, exact, url, True)]
    assert wrong[1] and wrong[0] == wrong[2] == wrong[3] == []


@pytest.mark.parametrize(("lost", "exchange"), [(0, 1), (2, 1), (2, 2)], ids=["root", "before", "between"])
def test_a_rank_that_dies_in_the_middle_of_a_broadcast_is_named(lost, exchange, url):
    with ranks.start(4, dies, url, lost, exchange) as started:
        outcomes = started.results()
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            kind, text, seconds = outcome.value
            assert kind == "PeerDied" and f"[{lost}]" in text and seconds < 2.0, outcome.value


def test_different_broadcasts_are_refused_and_the_group_still_works(url):
    for said in ranks.run(4, mismatches, url, True):
        assert [kind for kind, _ in said] == ["CollectiveMismatch"] * 3, said


def test_a_broadcast_of_another_size_is_named_without_records(url):
    said = [kind for ((kind, text),) in ranks.run(4, mismatches, url, False)]
    assert set(said[1:]) <= {"CollectiveMismatch", "GroupAborted"} and "CollectiveMismatch" in said, (
        said
    )  # the root, rank 0, has sent all
