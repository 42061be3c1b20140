"""Memory beside the usual arena: users' own tensors, memory given back and taken again, memory behind a switch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tricomm import Communicator, InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import check_data, timing
from tricomm.perf.evidence import checks

_COUNT = 4096  # fp32 elements
_SUSPENSIONS = 3
_SWITCHED = ("float32", "bfloat16", "float16", "int32")
_UNMOVABLE = "cuda_ipc"  # memory of this kind cannot come back at its addresses
Made = tuple[int, list[str]]  # calls, errors


def registered(comm: Communicator) -> Made:
    """all_reduce of a registered tensor where it lies, and all_gather from it."""
    x = torch.empty(_COUNT, device=comm.device)
    if x.device.type == "cpu":
        x = x.share_memory_()
    handle = comm.register(x)
    x.copy_(_values(comm, 0))
    gathered = comm.all_gather(handle)
    comm.synchronize()
    every = torch.cat([_values(comm, 0, rank) for rank in range(comm.world_size)])
    errors = _wrong(comm, "all_gather of a registered tensor", gathered, every)
    comm.all_reduce(handle)
    comm.synchronize()
    errors += _wrong(comm, "all_reduce of a registered tensor", x, _total(comm, 0))
    handle.close()
    return 2, errors


def suspend_and_resume(comm: Communicator) -> Made:
    """Suspend and resume, several times: the device gets the memory back, and a graph of before and a handle work."""
    if comm.kind == _UNMOVABLE:
        try:
            comm.suspend()
        except InvalidArgument:
            return 1, []
        return 1, [f"rank {comm.rank}: suspend was not refused over {_UNMOVABLE}"]
    x, out = torch.zeros(_COUNT, device=comm.device), torch.zeros(_COUNT, device=comm.device)
    handle = comm.symmetric((_COUNT,), torch.float32)
    replay, errors = _replayed(comm, lambda: comm.all_reduce(x, out=out)), list[str]()
    for number in range(_SUSPENSIONS + 1):
        x.copy_(_values(comm, number))
        check_data.poison(out)
        handle.local.copy_(_values(comm, number + 1))
        replay()
        comm.all_reduce(handle)
        comm.synchronize()
        errors += _wrong(comm, f"a graph after {number} suspensions", out, _total(comm, number))
        errors += _wrong(comm, f"a handle after {number} suspensions", handle.local, _total(comm, number + 1))
        if number < _SUSPENSIONS:
            errors += _given_back(comm)
            comm.resume()
    handle.close()
    return 2 * (_SUSPENSIONS + 1), errors


def through_the_switch(comm: Communicator, dry_run: bool) -> Made:
    """Every kernel that needs multicast memory, by types that a switch adds; nothing if the group has none.

    Sums of small whole numbers are exact, in whatever order the switch adds.
    """
    handle = comm.symmetric((2,), torch.float32)
    present = bool(handle.multicast)
    handle.close()
    made, errors = 0, list[str]()
    for kernel in (*registry.MULTICAST, *registry.MULTICAST_ZERO_COPY) if present else ():
        for name in _SWITCHED:
            wanted = [c for c in checks.calls(kernel, comm.world_size, name, dry_run) if c.op in ("sum", "none")]
            errors += [f"{kernel.name}: {t}" for t in checks.wrong(comm, kernel, getattr(torch, name), wanted)]
            made += len(wanted)
    return made, errors


def _replayed(comm: Communicator, call: Callable[[], object]) -> Callable[[], object]:
    call()
    comm.synchronize()
    return call if comm.device.type == "cpu" else timing.capture(call)


def _given_back(comm: Communicator) -> list[str]:
    """Suspend; ranks that share a GPU give back more than one rank's memory."""
    if comm.device.type == "cpu":
        comm.suspend()
        return []
    before = torch.cuda.mem_get_info(comm.device)[0]
    comm.suspend()
    gained, own = torch.cuda.mem_get_info(comm.device)[0] - before, comm.arena_layout.nbytes
    return [] if gained >= own else [f"rank {comm.rank}: suspend gave {gained} bytes back of {own}"]


def _values(comm: Communicator, number: int, rank: int | None = None) -> torch.Tensor:
    return check_data.values(
        "all_reduce", "sum", comm.world_size, comm.rank if rank is None else rank, number, _COUNT
    ).float()


def _total(comm: Communicator, number: int) -> torch.Tensor:
    return check_data.expected("all_reduce", "sum", comm.world_size, number, _COUNT)


def _wrong(comm: Communicator, what: str, result: torch.Tensor, exact: torch.Tensor) -> list[str]:
    bad = check_data.wrong(result, exact)
    return [f"rank {comm.rank}, {what}: {bad} elements are wrong"] if bad else []
