"""Consecutive calls of shipped kernels, with nothing between them on the stream."""

import re
from functools import partial
from unittest.mock import patch

import torch

import tricomm
from tests.explorer.compiled.ptx_mutants import changed, launched, options
from tests.explorer.mutation import _keep
from tricomm.core.fused.fused_call import FUSED
from tricomm.explorer import campaign
from tricomm.kernels.collectives import registry

SHORT = registry.find("all_reduce", "one_shot", "ll")
ELEMENTS = 40
_WAIT = re.compile(r"^\s*griddepcontrol\.wait\b.*\n", re.M)
_SIGNAL = re.compile(r"^\s*griddepcontrol\.launch_dependents\b.*\n", re.M)
_ACCESS = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:ld|st|atom|red)\.\S*global.*\n", re.M)


def call(comm, kernel, number):
    """A call over tensors that exist already: a function that makes it, the tensor that it reads, the one it writes."""
    kind, ranks = kernel.kind, comm.world_size
    how = {"algorithm": kernel.algorithm, "protocol": kernel.protocol}
    if kernel.collective == "barrier":
        x = torch.full((ELEMENTS,), number, dtype=torch.int32)
        return partial(comm.barrier, async_op=True), x, x
    if kernel.collective == FUSED:
        x, residual = (torch.full((2, 160), n + comm.rank, dtype=torch.bfloat16) for n in (number, 2))
        weight = torch.full((160,), 3, dtype=torch.bfloat16)
        return lambda: comm.all_reduce_rms_norm(x, residual, weight, residual_out=residual, **how), x, residual
    first = 1000 * comm.rank + 100_000 * number
    x = torch.arange(first, first + ELEMENTS * kind.rows_in(ranks), dtype=torch.int32)
    if kernel.pairwise:
        protocol = kernel.protocol
        return lambda: comm.recv(x, 0, protocol=protocol) if comm.rank else comm.send(x, 1, protocol=protocol), x, x
    if kernel.collective == "all_to_all_v":
        out, splits = torch.full_like(x, -1), [ELEMENTS] * ranks
        return lambda: comm.all_to_all_v(x, splits, splits, out, **how), x, out
    if kind.root:
        how[kind.root] = number % ranks
    given, out = x, x
    if kernel.zero_copy:
        given = comm.symmetric((len(x),), x.dtype)
        given.local.copy_(x)
        x = out = given.local
    if not kernel.in_place and kernel.collective not in ("broadcast", "reduce"):
        out = torch.full((ELEMENTS * kind.rows_out(ranks),), -1, dtype=torch.int32)
        if kind.root != "dst" or how["dst"] == comm.rank:
            how["out"] = out
    return lambda: getattr(comm, kernel.collective)(given, **how), x, out


def chain(kernel):
    """`fn(comm)`: an all-reduce of the input in place, the call, and an all-reduce of its result in place, twice."""

    def fn(comm):
        how = {"algorithm": SHORT.algorithm, "protocol": SHORT.protocol}
        calls = [call(comm, kernel, number) for number in (1, 2)]
        for make, x, out in calls:
            comm.all_reduce(x, **how)
            make()
            comm.all_reduce(out, **how)
        return [out for _, _, out in calls]

    return fn


def explored(kernel, schedules):
    world_size = 8 if kernel.needs_cube else 2
    with patch.object(campaign.Campaign, "_keep", _keep):
        return tricomm.check(chain(kernel), world_size, schedules, options=options(world_size), compiled="sm_90")


def without_wait(text):
    return _WAIT.sub("", text)


def without_signal(text):
    return _SIGNAL.sub("", text)


def signal_first(text):
    """The signal moved before the wait, so that a third kernel may begin while two of its stream run."""
    signal = _SIGNAL.search(text)[0]
    return _WAIT.sub(lambda wait: signal + wait[0], without_signal(text))


def accesses(text):
    """The accesses to global memory between the wait and the next branch."""
    wait = _WAIT.search(text)
    assert wait is not None
    straight = text[wait.end() :]
    return [m for m in _ACCESS.finditer(straight[: straight.index(" bra ")])]


def waiting_after(number):
    """The wait moved after access `number` of `accesses`."""

    def change(text):
        wait, straight = _WAIT.search(text), text[_WAIT.search(text).end() :]
        end = accesses(text)[number].end()
        return text[: wait.start()] + straight[:end] + wait[0] + straight[end:]

    return change


def kinds(kernel, change, schedules=4):
    """The kinds of findings in launches of `kernel` with its PTX after `change`; without "no_wait", which reports the
    missing wait itself."""
    with changed(f"{kernel.name} {change.__qualname__} {id(change)}", change, kernel.function.__name__):
        return {finding.kind for finding in explored(kernel, schedules).findings} - {"no_wait"}


def text_of(kernel):
    """The PTX that `explored` executes for `kernel`."""
    return launched(lambda: explored(kernel, 1))[kernel.function.__name__][0]
