"""A call whose allocation fails before it has sent anything is refused, and the group still works."""

import signal

import pytest
import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import attempt
from tricomm import arguments
from tricomm.errors import GroupAborted, ResourceError

HUGE = 1 << 42  # elements: more bytes than an address space has pages for


def huge(*shape):
    return torch.ones(()).expand(*shape, HUGE)


CALLS = {
    "all_reduce of gaps": lambda comm: comm.all_reduce(huge(2), out=torch.ones(())),
    "all_gather": lambda comm: comm.all_gather(huge()),
    "reduce_scatter": lambda comm: comm.reduce_scatter(huge(2)),
    "all_to_all": lambda comm: comm.all_to_all(huge(2)),
    "gather": lambda comm: comm.gather(huge(), comm.rank),
    "gather of gaps": lambda comm: comm.gather(huge(), 1 - comm.rank),
    "scatter": lambda comm: comm.scatter(huge(2), comm.rank),
    "all_to_all_v": lambda comm: comm.all_to_all_v(huge(2), [1, 1], [1, 1]),
    "impossible rows": lambda comm: comm.all_to_all_v(
        torch.ones(2, 1 << 20), [2, 0] if comm.rank == 0 else [0, 2], [2, 1 << 40] if comm.rank == 0 else [1 << 40, 2]
    ),
    "a list": lambda comm: comm.all_gather([torch.ones(3), huge()]),
    "send": lambda comm: comm.send(huge(), 1 - comm.rank),
    "recv": lambda comm: comm.recv(torch.ones(1, 2).expand(1 << 41, 2).t(), 1 - comm.rank),
}


def refused(rank, world_size, tell, url):
    told = {}
    with tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(timeout=60.0)) as comm:
        for name, call in CALLS.items():
            if rank == 0:  # try again: the other rank waits
                told[name] = attempt(lambda call=call: call(comm))[:2]
            x = comm.all_reduce(torch.full((5,), rank + 1.0))
            assert torch.equal(x, torch.full((5,), 3.0))
    return told


def test_a_call_whose_allocation_fails_is_refused_on_that_rank_and_the_group_still_works(url):
    told, _ = ranks.run(2, refused, url, timeout=120)
    assert set(told) == set(CALLS)
    by_shape = {"all_reduce of gaps": "out has shape", "all_to_all_v": "elements for one rank", "recv": "share memory"}
    for name, (kind, text) in told.items():
        assert kind == ("InvalidArgument" if name in by_shape else "ResourceError"), (name, text)
        assert by_shape.get(name, "nothing was sent") in text, (name, text)


def test_an_exception_of_a_signal_handler_is_not_taken_for_a_lack_of_memory():
    def handler(number, frame):
        raise RuntimeError("mine")

    def make():
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="mine"):
            arguments.allocated("all_gather", make)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ResourceError, match="all_gather: torch cannot allocate"):
        arguments.allocated("all_gather", torch.empty, HUGE)


def test_an_error_other_than_of_an_allocation_still_aborts_the_group(url, monkeypatch):
    with tricomm.init(url, 0, 1, "cpu", options=tricomm.Options(arena_bytes=1 << 18)) as comm:
        monkeypatch.setattr(comm._internal.planner, "plan", lambda *request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            comm.all_gather(torch.ones(3))
        with pytest.raises(GroupAborted):
            comm.all_gather(torch.ones(3))
