"""A self-test of the explorer. It must report a known race, and nothing for a correct kernel."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tricomm.communicator import Communicator
from tricomm.errors import ResourceError
from tricomm.explorer.compiled.compiled_runtime import checked_options
from tricomm.explorer.execution import Ranks
from tricomm.explorer.report.findings import Execution, Subject
from tricomm.explorer.schedule.strategies import Given
from tricomm.kernels import layout
from tricomm.options import Options


@triton.jit
def _pass_on(data, flags, out_ptr, rank, FLAG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Rank 0 passes a number to rank 1, with or without a flag."""
    for r in tl.static_range(WORLD_SIZE):
        if (r == 1) & (rank == 0):
            tl.store(data[r], 7)
            tl.debug_barrier()
            tl.atomic_xchg(flags[r], 1, sem="release", scope="sys")
        elif (r == 1) & (rank == 1):
            if FLAG:
                while tl.atomic_cas(flags[r], 1, 0, sem="acquire", scope="sys") != 1:
                    pass
                tl.debug_barrier()
            else:
                tl.store(data[r], 8)
            tl.store(out_ptr, tl.load(data[r]))


def _kinds(flag: bool, compiled: str | None) -> set[str]:
    def fn(comm: Communicator) -> None:
        data, flags = comm.symmetric((1,), torch.int32), comm.symmetric((1,), torch.int32)
        out = torch.zeros(1, dtype=torch.int32)
        comm.launch(
            _pass_on, 1, data.peers, flags.peers, out, comm.rank, FLAG=flag, WORLD_SIZE=2, enable_fp_fusion=False
        )

    options = Options(arena_bytes=layout.MIN_ARENA) if compiled is None else checked_options(2, None)
    subject = Subject(fn, 2, options, compiled=compiled)
    outcome = Ranks(subject, Execution(), Given(()), detect=True).execute()
    for error in outcome.errors.values():
        raise error
    return {f.kind for f in outcome.findings}


@functools.cache
def require(compiled: str | None = None) -> None:
    """Raise `ResourceError` if the detector misses accesses: Triton's interpreter does not call a hook, or the compiled
    code for that architecture has changed."""
    racy, clean = _kinds(False, compiled), _kinds(True, compiled)
    if "race" not in racy or clean:
        raise ResourceError(
            f"the explorer's self-test failed on Triton {triton.__version__}: a known race gave {sorted(racy)}, a "
            f"clean kernel gave {sorted(clean)}; its reports cannot be trusted here"
        )
