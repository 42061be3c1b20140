"""Groups that share members, each with its own arena: any collectives and messages, in turns, between processes."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
import torch

from tests import ranks
from tests.core.bodies.common_bodies import communicator
from tests.core.bodies.exact import anything, outcome
from tricomm.kernels.collectives import registry
from tricomm.options import Tuning

GROUPS = ([0, 1], [1, 2], [2, 0], [2, 1, 0])

PLAIN = [k for k in registry.KERNELS if not k.needs_cube and k.collective != "barrier"]


def any_calls(rank, world_size, tell, url, seed, calls):
    """Make calls drawn equally on all ranks; return this rank's wrong ones and the number of calls."""
    draw, wrong, made = random.Random(seed), [], 0
    with ExitStack() as stack:
        comm = stack.enter_context(communicator(rank, world_size, url, _tuning=Tuning(blocks=2, tile=32)))
        groups = [comm.split(members) for members in GROUPS]
        for group in filter(None, groups):
            stack.callback(group.close)
        for number in range(calls):
            chosen = draw.randrange(len(groups) + 1)
            members = GROUPS[chosen] if chosen < len(groups) else [0, 1, 2]
            group = groups[chosen] if chosen < len(groups) else comm
            case = anything(draw, draw.choice(PLAIN), most=300)
            source, to, count = *draw.sample(range(len(members)), 2), draw.choice([1, 37, 500])
            if group is None:
                continue
            made += 1
            wrong += [] if outcome(group, case, number) else [case]
            if group.rank == source:
                group.send(torch.arange(count) + number, to, number)
            elif group.rank == to:
                y = torch.full((count,), -1)
                result = group.recv(y, None if number % 2 else source, number)
                wrong += [] if result == source and torch.equal(y, torch.arange(count) + number) else [(number, "recv")]
        comm.barrier()
    return wrong, made


@pytest.mark.parametrize("seed", [0, *[pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20)]])
def test_any_calls_on_overlapping_groups(tmp_path, seed):
    result = ranks.run(3, any_calls, f"file://{tmp_path}/store", seed, 40, timeout=200)
    assert [wrong for wrong, _ in result] == [[]] * 3
    assert all(made >= 20 for _, made in result)
