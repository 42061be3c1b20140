"""Other libraries' collectives in the same run, on the same ranks: NCCL, Gloo, torch's symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import Communicator
from tricomm.perf.bench import contenders
from tricomm.perf.bench.ground import Call, Contender, Ground, Make
from tricomm.perf.evidence.stage import Skip

_SYMM_MEM = ("one_shot", "two_shot", "multimem")


class Others:
    """What libraries need beside a communicator. torch's groups are made at the first call, by all ranks together."""

    def __init__(self, comm: Communicator, store: Store) -> None:
        self._comm, self._store = comm, store
        self._ground: Ground | None = None

    def offered(self, library: str, collective: str) -> dict[str, Make]:
        """Contenders of `library` by name; one that says why where there is none."""
        if library == "gloo":
            if not self._comm.simulated:
                return _none("gloo: tensors are on a GPU; NCCL is what to compare with there")
            return {"gloo": contenders.gloo}
        if self._comm.simulated:
            return _none(f"{library}: these ranks run on a CPU; gloo is what to compare with there")
        if library == "nccl":
            return {"nccl": contenders.nccl}
        if collective != "all_reduce":
            return _none("symm_mem: its all_reduce alone is compared")
        return {f"symm_mem_{op}": _symm_mem(op) for op in _SYMM_MEM}

    def make(self, how: Make, collective: str, dtype: torch.dtype, count: int) -> Contender:
        """Ready to be called, with rank 0 for a root. Raises `Skip` where this box has it not."""
        return how(Call(self._meet(), collective, dtype, count))

    def close(self) -> None:
        """Take torch's groups away, where there are any."""
        if self._ground is not None:
            dist.destroy_process_group()

    def _meet(self) -> Ground:
        if self._ground is None:
            comm = self._comm
            store = PrefixStore("tricomm-others", self._store)
            dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
            one_gpu = not comm.simulated and torch.cuda.device_count() < comm.world_size
            self._ground = Ground(comm, dist.group.WORLD, one_gpu)
        return self._ground


def _none(why: str) -> dict[str, Make]:
    def refused(call: Call) -> Contender:
        raise Skip(why)

    return {"none": refused}


def _symm_mem(op: str) -> Make:
    return lambda call: contenders.symm_mem(call, op)
