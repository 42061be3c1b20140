"""Two levels over a fake GPU of each rank, with a fake NCCL across, captured in a graph and replayed."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

from tests.core.bodies import fake_nccl
from tests.core.levels.level_bodies import SMALL
from tests.fake_cuda import OnFakeGpu, World
from tricomm import Communicator, Options
from tricomm.core import nccl
from tricomm.core.bootstrap import NoArena, Shared
from tricomm.core.entry_guard import set_up
from tricomm.core.group import Group
from tricomm.core.levels.opening import Whole, open_levels
from tricomm.core.levels.two_level import Inside
from tricomm.kernels import layout
from tricomm.policy.backend_choice import GroupFacts
from tricomm.policy.levels import Parts
from tricomm.store.arena import open_arena
from tricomm.store.handshake import handshake
from tricomm.store.store_control import open_store_control

CPU = torch.device("cpu")


def nccl_on_a_stream(patch, world):
    """NCCL's calls are the stream's, as the kernels': a capture takes them up, and a replay makes them."""
    package = ModuleType("nccl")
    package.core = fake_nccl
    patch.setitem(sys.modules, "nccl", package)
    patch.setitem(sys.modules, "nccl.core", fake_nccl)
    real = nccl.Nccl.all_reduce

    def all_reduce(self, x, op="sum", out=None):
        graph = world.current_stream(0).capture
        if graph is None:
            real(self, x, op, out)
        else:
            graph.append(lambda: real(self, x, op, out))

    patch.setattr(nccl.Nccl, "all_reduce", all_reduce)


def captured(rank, world_size, tell, url, forms):
    """By form: what a replay gives for two inputs, and what the streams were asked for while it was captured."""
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        world.install(patch)
        runtime = OnFakeGpu(world, 0)
        store = FileStore(url.removeprefix("file://"), world_size)
        fake_nccl.STORE = PrefixStore("fake nccl", store)
        nccl_on_a_stream(patch, world)
        options = Options(arena_bytes=SMALL, timeout=60.0)
        parts, node = Parts((0, 0, 1, 1)), rank // 2
        control, _ = open_store_control(PrefixStore("whole", store), rank, world_size, 60.0, 1)
        facts = GroupFacts("cpu", world_size, 2, "the group spans 2 nodes", "nccl")
        plan = layout.plan(2, SMALL)
        comm = Communicator.__new__(Communicator)

        def inside(store, position, size, given):
            control = handshake(store, position, size, 60.0, given.agreed(plan, "cpu"))
            arena = open_arena(control, plan.nbytes, CPU, 60.0)
            made = Communicator.over(control, arena, plan, CPU, 60.0, given, runtime)
            return Inside(made._group, made._collectives, made._launcher, made._monitor, made.close)

        def make(undo):
            shared = Shared(control, NoArena(world_size), plan, None, facts, parts, "nccl")
            comm._assemble(undo, Group(shared, CPU, 60.0, options, runtime), store)
            whole = Whole(comm._group, comm._faults, comm._monitor, comm._launcher, store)
            comm._planner.use_levels(open_levels(undo, whole, parts, "nccl", inside, 60.0))

        set_up(make)
        observed = {}
        for form in forms:
            x, how = torch.full((64,), float(rank)), {"algorithm": "two_level", "protocol": form}
            comm.all_reduce(x.clone(), **how)  # kernels are compiled and loaded
            out = torch.zeros(64)
            while comm._monitor.busy():  # the fake refuses to be asked for an event during a capture, as CUDA does
                time.sleep(0.01)
            with world.capture(world.new_stream("cuda:0")) as graph:
                comm.all_reduce(x, out=out, **how)
            untouched = out.sum().item()
            results = []
            for number in (1.0, 10.0):
                x.fill_(number * (rank + 1))
                for step in graph:
                    step()
                results.append(out.unique().tolist())
            observed[form] = untouched, results, len(graph)
        time.sleep(0.2)
        comm.close()
        world.verify()
        return node, observed
