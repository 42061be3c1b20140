"""send and recv with known results: all types, sizes from zero to many slots, tags out of order, any source."""

import torch

from tricomm import Communicator
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES
from tricomm.perf.bench import check_data

COUNTS = (1, 0, 517, 4097, 100_003, 1_000_001)
FEW = (1, 0, 37)
_PROTOCOLS = tuple(kernel.protocol for kernel in registry.MESSAGES if kernel.collective == "send")


def sweep(comm: Communicator, few: bool = False) -> list[str]:
    """Send from each even rank to the next one, and an answer back; return the errors as texts."""
    errors = []
    for name in ("bfloat16", "complex64") if few else DTYPES:
        for protocol in _PROTOCOLS:
            for number, count in enumerate(FEW if few else COUNTS):
                errors += _exchange(comm, getattr(torch, name), protocol, number, count)
    return errors


def _exchange(comm: Communicator, dtype: torch.dtype, protocol: str, number: int, count: int) -> list[str]:
    """Two messages to the odd rank, received in the other order, and one back, received from any source."""
    peer = comm.rank ^ 1
    if peer >= comm.world_size:
        return []
    word, data = _values(comm, comm.rank, number, 1, dtype), _values(comm, comm.rank, number, count, dtype)
    errors: list[str] = []
    if comm.rank % 2 == 0:
        comm.send(word, peer, 1, protocol=protocol)
        comm.send(data, peer, 2, protocol=protocol)
        back = _poisoned(comm, 1, dtype)
        source = comm.recv(back, None if comm.world_size == 2 else peer, 3, protocol=protocol)
        errors += [] if source == peer else [f"a message of rank {peer} was taken for rank {source}'s"]
        errors += _wrong(comm, back, _values(comm, peer, number, 1, dtype), protocol)
    else:
        for tag, size in ((2, count), (1, 1)):
            into = _poisoned(comm, size, dtype)
            comm.recv(into, peer, tag, protocol=protocol)
            errors += _wrong(comm, into, _values(comm, peer, number, size, dtype), protocol)
        comm.send(word, peer, 3, protocol=protocol)
    comm.synchronize()
    return errors


def _values(comm: Communicator, rank: int, number: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    with comm.device:
        return check_data.values("broadcast", "none", comm.world_size, rank, number, count, dtype).to(dtype)


def _poisoned(comm: Communicator, count: int, dtype: torch.dtype) -> torch.Tensor:
    into = torch.empty(count, dtype=dtype, device=comm.device)
    check_data.poison(into)
    return into


def _wrong(comm: Communicator, received: torch.Tensor, exact: torch.Tensor, protocol: str) -> list[str]:
    bad = check_data.wrong(received, exact.cpu())
    return [f"rank {comm.rank}, {received.numel()} of {received.dtype}, {protocol}: {bad} are wrong"] if bad else []
