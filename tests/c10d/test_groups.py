"""Groups of every kind."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tricomm
from tests import forked, ranks
from tests.c10d.bodies.groups import ROUTES, default_group, of, refused, same
from tests.store.store_ranks import free_port


def _sum(group=None, value=1.0):
    x = torch.full((3,), float(value))
    dist.all_reduce(x, group=group)
    return x[0].item()


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(4, [], timeout=200)
def test_many_groups(rank, world_size, tell, url, route):
    """Overlapping, nested, single and foreign groups, used in different orders, destroyed one by one."""
    wrong = []
    with default_group(rank, world_size, url, route):
        pairs = {(a, b): dist.new_group([a, b]) for a in range(world_size) for b in range(a + 1, world_size)}
        own = [dist.new_group([r]) for r in range(world_size)][rank]
        foreign = dist.new_group(backend="gloo")
        mixed = dist.new_group(backend="cpu:tricomm")
        for (a, b), group in reversed(pairs.items()):
            if rank in (a, b):
                wrong += [] if _sum(group, rank) == a + b else [("pair", a, b)]
                x = of(rank, (2,))
                dist.broadcast(x, src=b, group=group)  # global rank
                wrong += [] if same(x, of(b, (2,))) else [("broadcast", a, b)]
        wrong += [] if _sum(own, 5) == 5 else ["own"]
        wrong += [] if _sum(foreign) == world_size and _sum(mixed) == world_size else ["foreign"]
        wrong += [] if dist.get_backend(mixed) in ("cpu:tricomm", "tricomm") else [dist.get_backend(mixed)]
        mine = [g for pair, g in pairs.items() if rank in pair]
        for group in mine:
            dist.destroy_process_group(group)
        refused(lambda: mine[0].allreduce([torch.ones(1)]), "destroyed", kind=tricomm.GroupAborted)
        refused(lambda: dist.destroy_process_group(mine[0]), "Invalid", kind=ValueError)
        mine[0].shutdown()
        wrong += [] if _sum() == world_size else ["after destroy"]
        sub, groups = dist.new_subgroups(2)
        wrong += [] if _sum(sub, rank) == 4 * (rank // 2) + 1 and len(groups) == world_size // 2 else ["subgroups"]
        rows, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        wrong += [] if _sum(rows, rank) == 2 * (rank % 2) + 2 else ["enumeration"]
    return wrong


def mesh(rank, world_size, tell, url, route):
    from torch.distributed.device_mesh import init_device_mesh

    with default_group(rank, world_size, url, route):
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
        return _sum(mesh["dp"].get_group(), rank), _sum(mesh["tp"].get_group(), rank)


@pytest.mark.parametrize("route", ROUTES)
def test_device_mesh(route, url):
    assert ranks.run(4, mesh, url, route) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [])
def test_wrap(rank, world_size, tell, url, route):
    """`wrap` of a gloo group: c10d accepts the wrapper wherever it accepts a group, and the gloo group stays usable."""
    wrong = []
    with default_group(rank, world_size, url, route, backend="gloo") as world:
        w = tricomm.wrap()
        wrong += [] if tricomm.wrap(world) is w and tricomm.wrap(w) is w else ["not the same"]
        before = sum(tricomm.stats()[route].values())
        wrong += [] if _sum(w) == world_size and _sum() == world_size else ["sum"]
        wrong += [] if sum(tricomm.stats()[route].values()) == before + 1 else ["route"]
        sub = dist.new_group([1, 0])
        ws = tricomm.wrap(sub)
        x = of(rank, (3,))
        dist.broadcast(x, src=1, group=ws)
        wrong += [] if same(x, of(1, (3,))) else ["sub"]
        wrong += [] if dist.get_process_group_ranks(ws) == dist.get_process_group_ranks(sub) else ["ranks"]
        name = world.group_name
        y = torch.ops.tricomm.all_reduce(torch.ones(2), "sum", w.group_name)
        wrong += [] if y[0] == world_size and w.group_name != name == world.group_name else ["name"]
        z = functional.all_reduce(torch.ones(2), "sum", w)
        wrong += [] if z[0] == world_size else ["functional"]
        dist.destroy_process_group(w)
        refused(lambda: w.allreduce([torch.ones(1)]), "destroyed", kind=tricomm.GroupAborted)
        wrong += [] if _sum() == world_size and _sum(ws) == world_size else ["after"]
        again = tricomm.wrap(world)
        wrong += [] if again is not w and _sum(again) == world_size else ["again"]
        refused(lambda: tricomm.wrap(3), "process group")
    return wrong


def answers(rank, world_size, tell, url, backend):
    """The getters that torch's own code and its users call on a group and on its backend for the CPU."""
    with default_group(rank, world_size, url, "gloo", backend, timeout=50.0) as group:
        cpu = torch.device("cpu")
        own, x = group._get_backend(cpu), torch.ones(4)
        before = group._get_sequence_number_for_group()
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.ones(8), x)
        dist.all_reduce_coalesced([x, x.clone()])
        dist.barrier()
        store = group.get_group_store()
        if rank == 0:
            store.set("key", "value")
        group._set_sequence_number_for_group()
        own.eager_connect_single_device(cpu)
        numbers = [one._get_sequence_number_for_group() - before for one in (group, own)]
        names = group._get_backend_name(), own.name(), own.options.backend
        assert names == (backend,) * 3, names
        return {
            "numbers": numbers,
            "store": store.get("key"),
            "timeout": own.options._timeout,
            "size": group.size(),
            "rank": (group.rank(), own.rank()),
            "name": group.group_name,
            "desc": group.group_desc,
            "flags": (own.supports_coalescing, own.supports_time_estimate),
            "rendezvous": getattr(group, "use_pg_for_symm_mem_rendezvous", False),  # not in torch 2.11
            "hooks": group._has_hooks(),
            "device": group.bound_device_id,
            "alloc": own.supports_tensor_alloc(cpu),
        }


def test_a_group_answers_as_gloo_does(url):
    said = ranks.run(2, answers, url, "tricomm")
    assert said == ranks.run(2, answers, f"{url}2", "gloo") and said[0]["numbers"] == [4, 4]


@ranks.each(2, (True, True))
def test_each_device_has_its_own_backend(rank, world_size, tell, url):
    """With a backend per device, torch finds the right one for each."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    from tricomm.c10d.capabilities import exchange_capabilities
    from tricomm.c10d.fallback_backends import Backends
    from tricomm.c10d.process_group import TricommGroup

    with default_group(rank, world_size, url) as world:
        config = world._config
        store = dist.PrefixStore("other", config.store)
        other = ProcessGroupGloo(store, rank, world_size, config.timeout)
        backends = Backends({"cuda": other}, world._backends.transport, owned=False)
        group = TricommGroup(config, exchange_capabilities(store, rank, world_size, 60), backends)
        cpu, cuda = (group._get_backend(torch.device(d)) for d in ("cpu", "cuda"))
        group._dispatcher.close()
        return cpu is group, cuda is other


def torchrun(tmp_path, job, *options):
    """Run the text `job` on two ranks."""
    script = tmp_path / "job.py"
    script.write_text(job)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), *options]
    env = {**os.environ, "PYTHONPATH": forked.python_path(), "OMP_NUM_THREADS": "1"}
    return forked.script(*command, str(script), timeout=200, env=env)


SUM = """
import os, sys, torch, torch.distributed as dist, tricomm
dist.init_process_group("tricomm")
for turn in range(3):
    x = torch.ones(2)
    dist.all_reduce(x)
    if turn == 1 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] in sys.argv[1:]:
        os._exit(3)
print(f"sum {x[0].item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_a_job_that_torchrun_restarts_meets_again_over_the_same_store(tmp_path):
    job = SUM.replace("sys.argv[1:]", "['0', '1']")
    done = torchrun(tmp_path, job, "--max-restarts", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2  # of the third attempt alone
    assert torchrun(tmp_path, job, "--max-restarts", "1").returncode != 0


@pytest.mark.parametrize("route", ROUTES)
@ranks.each(2, [])
def test_suspend_and_resume_memory(rank, world_size, tell, url, route):
    """The group's memory goes and comes back; meanwhile calls of the kernels are refused, and Gloo's go on."""
    wrong = []
    with default_group(rank, world_size, url, route) as group:
        tricomm.suspend()  # nothing is there yet
        tricomm.resume()
        for turn in range(2):
            for value in (1.0, 2.0):
                wrong += [] if _sum(value=value + turn) == world_size * (value + turn) else [(turn, value)]
            tricomm.suspend(group)
            if route == "kernels":
                refused(_sum, "suspended")
                refused(lambda: dist.all_gather_object([None] * world_size, rank), "suspended")
                refused(tricomm.suspend, "suspended")
                refused(lambda: group._dispatcher._communicator(torch.device("cpu", 1)), "first call on cpu:1")
                work = dist.all_reduce(torch.ones(2), async_op=True)
                refused(work.wait, "suspended")
            else:
                wrong += [] if _sum() == world_size else ["gloo"]
            tricomm.resume(group)
        if route == "kernels":
            refused(tricomm.resume, "not suspended")
        wrong += [] if _sum(value=rank) == sum(range(world_size)) else ["after"]
    return wrong
