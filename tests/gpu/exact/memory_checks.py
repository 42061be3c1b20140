"""Memory other than the usual arena: users' tensors, memory that is suspended and resumed, multicast memory (NVLS)."""

from collections.abc import Callable

import torch

from tests.gpu.exact import checks
from tricomm import Communicator, InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import check_data, timing

_COUNT = 4096  # fp32 elements
_SUSPENSIONS = 3
_SWITCHED = ("float32", "bfloat16", "float16", "int32")
_UNMOVABLE = "cuda_ipc"  # memory of this kind cannot be mapped again at its addresses


def registered(comm: Communicator) -> list[str]:
    """all_reduce of a registered tensor in place, and all_gather from it."""
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
    return errors


def suspend_and_resume(comm: Communicator) -> list[str]:
    """Suspend and resume, several times: the device gets the memory, and an earlier graph and a handle still work."""
    if comm.kind == _UNMOVABLE:
        try:
            comm.suspend()
        except InvalidArgument:
            return []
        return [f"rank {comm.rank}: suspend was not refused over {_UNMOVABLE}"]
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
            errors += _returned(comm)
            comm.resume()
    handle.close()
    return errors


def multicast(comm: Communicator, few: bool = False) -> list[str] | None:
    """Every kernel that needs multicast memory, with the types that NVLS adds; None if the group has none.

    Sums of small whole numbers are exact in any order of the additions.
    """
    handle = comm.symmetric((2,), torch.float32)
    present = bool(handle.multicast)
    handle.close()
    if not present:
        return None
    errors = list[str]()
    for kernel in (*registry.MULTICAST, *registry.MULTICAST_ZERO_COPY):
        for name in _SWITCHED:
            wanted = [c for c in checks.calls(kernel, comm.world_size, name, few) if c.op in ("sum", "none")]
            errors += [f"{kernel.name}: {t}" for t in checks.wrong(comm, kernel, getattr(torch, name), wanted)]
    return errors


def _replayed(comm: Communicator, call: Callable[[], object]) -> Callable[[], object]:
    call()
    comm.synchronize()
    return call if comm.device.type == "cpu" else timing.capture(call)


def _returned(comm: Communicator) -> list[str]:
    """Suspend, and compare the device's free memory; ranks that share a GPU return more than one rank's memory."""
    if comm.device.type == "cpu":
        comm.suspend()
        return []
    before = torch.cuda.mem_get_info(comm.device)[0]
    comm.suspend()
    gained, own = torch.cuda.mem_get_info(comm.device)[0] - before, comm._internal.group.layout.nbytes
    return [] if gained >= own else [f"rank {comm.rank}: suspend freed {gained} bytes of {own}"]


def _values(comm: Communicator, number: int, rank: int | None = None) -> torch.Tensor:
    rank = comm.rank if rank is None else rank
    return check_data.values("all_reduce", "sum", comm.world_size, rank, number, _COUNT).float()


def _total(comm: Communicator, number: int) -> torch.Tensor:
    return check_data.expected("all_reduce", "sum", comm.world_size, number, _COUNT)


def _wrong(comm: Communicator, what: str, result: torch.Tensor, exact: torch.Tensor) -> list[str]:
    bad = check_data.wrong(result, exact)
    return [f"rank {comm.rank}, {what}: {bad} elements are wrong"] if bad else []
