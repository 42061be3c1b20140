"""Handwritten PTX under the clocks of the model, on a GPU whose latencies are round numbers."""

import struct

import numpy as np

from tricomm.explorer.ptx.global_memory import GlobalMemory
from tricomm.explorer.ptx.text.parser import parse
from tricomm.explorer.ptx.units import grid
from tricomm.explorer.timing.instruction_costs import KernelCosts
from tricomm.explorer.timing.timed_links import RankQueues
from tricomm.explorer.timing.timed_ranks import OwnedMemory, TimedRanks
from tricomm.perf.cost_model.machines import Latencies, MachineSpec

# A cycle is a microsecond, and nothing waits for bytes.
TIMES = Latencies(1.0, l1=10, shared=5, l2=100, memory=1000, l2_bytes=1 << 20, boundary=0, port=1e18, host=7000)
LINKS = MachineSpec("round", "sm_90", 1e15, 1e15, 1e15, 1e15, hop=1100, barrier=1500, launch=0)
ONE_WAY, FENCE, BARRIER, INVALIDATE = 1000, 300, 20, 30
_HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 own, .param .u64 peer) .reqntid {threads}, 1, 1
{{
 .reg .b64 %a<9>; .reg .b32 %r<9>; .reg .pred %p<4>;
 ld.param.u64 %a0, [own]; ld.param.u64 %a1, [peer];
"""


def _aligned() -> np.ndarray:
    raw = np.zeros(1024 + 64, "u8")
    return raw[-raw.ctypes.data % 512 // 8 :][:1024]


def timed(body: str, ranks: int = 1, threads: int = 32, cold: bool = False, machine=LINKS) -> TimedRanks:
    """`body` on one block of each rank; its own 1024 words are at %a0, the next rank's at %a1, word n holds where
    word 64 n begins."""
    code = parse(_HEAD.format(threads=threads) + body + "\n ret;\n}\n")
    memory, places, words = GlobalMemory(), [], [_aligned() for _ in range(ranks)]
    bases = [each.ctypes.data for each in words]
    for rank, each in enumerate(words):
        each[:16] = bases[rank] + 512 * np.arange(16)
        each[512:] = 0
        memory.add(bases[rank], each.nbytes, f"rank {rank}")
        places.append(OwnedMemory(bases[rank], each.nbytes, rank, cold))
    loaded = grid.LoadedKernel(code, memory, timed=True)
    blocks = []
    for rank in range(ranks):
        parameters = struct.pack("=2Q", bases[rank], bases[(rank + 1) % ranks])
        blocks += grid.launch(loaded, (1, 1, 1), (threads, 1, 1), 0, parameters)
    result = TimedRanks(KernelCosts(code, TIMES), [RankQueues(machine, TIMES, 1) for _ in blocks], places)
    result.run(blocks)
    result.words = words
    return result
