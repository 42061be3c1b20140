"""One multicast address for all ranks' blocks, for `multimem` instructions, which a switch executes (NVLink SHARP).

    rank 0: cuMulticastCreate ── handle, see passing.py ──▶ all: import, cuMulticastAddDevice
    all devices added ─▶ cuMulticastBindMem of the own block ─▶ all bound ─▶ cuMemMap of the object ─▶ words through it

Not every machine has multicast, and one that has it may refuse it (confidential computing, MIG). So each step either
succeeds on all ranks, or all ranks undo the steps before it and get the reason. The stages follow the order that CUDA
requires: no rank may bind before every device is added, nor use the address before every rank has bound its memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tricomm import env
from tricomm.deadline import Deadline
from tricomm.errors import ResourceError
from tricomm.store.arenas.cuda_arena import GpuSite
from tricomm.store.arenas.passing import passing
from tricomm.store.collective_stages import CollectiveStages
from tricomm.store.control import ControlPage
from tricomm.store.cuda.cuda_driver import Cleanup
from tricomm.store.cuda.mapped_memory import MappedMemory

_T = TypeVar("_T")
WORD = 4
_RECORD = struct.Struct("<QQ?")  # bytes of the block, granularity, whether this process has tested a multicast address
_NAME = "multicast"

# Plain copies may not touch a multicast address, so the probe is two kernels of one thread.
PROBE = b"""
.version 8.1
.target sm_90
.address_size 64
.visible .entry store(.param .u64 to, .param .u64 value)
{ .reg .b64 a, v; .reg .b32 w; ld.param.u64 a, [to]; ld.param.u64 v, [value]; cvt.u32.u64 w, v;
  multimem.st.relaxed.sys.global.u32 [a], w; ret; }
.visible .entry sum(.param .u64 from, .param .u64 to)
{ .reg .b64 a, b; .reg .b32 w; ld.param.u64 a, [from]; ld.param.u64 b, [to];
  multimem.ld_reduce.relaxed.sys.global.add.u32 w, [a]; st.global.u32 [b], w; ret; }
\0"""


class Multicast:
    """The multicast address of all ranks' blocks, mapped here; `memory` is this rank's block.

    If `share` is called again after `give_back`, the address is the same. With a `lender`, which has released its
    memory, the address is the lender's.
    """

    def __init__(
        self, control: ControlPage, site: GpuSite, memory: MappedMemory, sharing: str, lender: Multicast | None = None
    ) -> None:
        self._control, self._site, self._own, self._sharing = control, site, memory, sharing
        self._driver, self._ordinal = site.driver, site.ordinal
        lent = lender._mapped if lender is not None else None
        self._mapped: MappedMemory = lent or MappedMemory(site.driver, memory.nbytes)
        self._passing = passing(sharing, control, _NAME)
        self._modules: list[int] = []  # at most one
        self._bound = False

    def share(self, probe: int, deadline: Deadline) -> int:
        """Returns the address; called by all ranks together. It is tested on 8 bytes per rank from offset `probe` on,
        but only once in a process: if the test faults, the process loses its CUDA context, and no later group should
        risk that.

        Raises the same error on all ranks; then `give_back` undoes what was done.
        """
        mapped, stages = self._mapped, CollectiveStages(self._control, _NAME, deadline)

        def stage(what: str, action: Callable[[], None]) -> None:
            stages(what, partial(self._in_context, action))

        answers = stages.gather("look for a switch", partial(self._in_context, self._look))
        *records, works = zip(*(_RECORD.unpack(record) for record in answers), strict=True)
        tokens = stages.gather("make an object", partial(self._in_context, self._make))
        stage("pass it on", lambda: self._passing.take(self._driver, tokens, self._load, deadline))
        stage("add the device", lambda: self._driver.multicast_add(mapped.handles[0], self._ordinal))
        stage("bind memory", lambda: self._bind(*records))
        stage("map it", lambda: mapped.put(self._ordinal, records[1][0]))
        if not all(works):
            self._try(stage, probe)
            self._driver.switched.add(self._ordinal)
        return mapped.address

    def _in_context(self, action: Callable[[], _T]) -> _T:
        with self._site.current():
            return action()

    def _look(self) -> bytes:
        if not env.multicast():
            raise ResourceError("TRICOMM_MULTICAST=0 or NCCL_NVLS_ENABLE=0")
        refusal = self._driver.multicast_refusal(self._ordinal)
        if refusal is not None:
            raise ResourceError(refusal)
        nbytes = self._own.nbytes
        granularity = self._driver.multicast_granularity(self._control.world_size, nbytes, self._sharing)
        if nbytes % granularity:
            raise ResourceError(f"a block of {nbytes} bytes is no multiple of the multicast granularity {granularity}")
        return _RECORD.pack(nbytes, granularity, self._ordinal in self._driver.switched)

    def _make(self) -> bytes:
        """Rank 0 creates the multicast object and passes it to the other ranks."""
        if self._control.rank:
            return self._passing.offer(self._driver, None)
        size = self._own.nbytes
        self._mapped.handles.append(self._driver.multicast_create(self._control.world_size, size, self._sharing))
        return self._passing.offer(self._driver, self._mapped.handles[0])

    def _load(self, rank: int, fetch: Callable[[], int]) -> None:
        if rank == 0:
            self._mapped.handles.append(fetch())

    def _bind(self, sizes: tuple[int, ...], granularities: tuple[int, ...]) -> None:
        different = sorted(set(zip(sizes, granularities, strict=True)))
        if len(different) > 1:
            raise ResourceError(f"the ranks' blocks have sizes and multicast granularities {different}")
        self._driver.multicast_bind(self._mapped.handles[0], self._own.handles[0], self._own.nbytes)
        self._bound = True

    def _try(self, stage: Callable[[str, Callable[[], None]], None], probe: int) -> None:
        """Test the address: each rank stores a word to all ranks, and loads a sum over all ranks."""
        driver, rank, world_size = self._driver, self._control.rank, self._control.world_size
        shared, own = self._mapped.address + probe, self._own.address + probe
        sums = own + WORD * world_size

        def run(name: str, *values: int) -> None:
            try:
                driver.launch(self._modules[0], name, values)
                driver.synchronize()
            except ResourceError as error:
                raise ResourceError(
                    f"{error}; set TRICOMM_MULTICAST=0 on all ranks to do without the switch"
                ) from error

        def seen() -> None:
            words = struct.unpack(f"<{world_size}I", driver.read(own, WORD * world_size))
            missing = [r for r, word in enumerate(words) if word != _probe_word(r)]
            if missing:
                raise ResourceError(f"what rank(s) {missing} stored to the multicast address did not arrive")

        def added() -> None:
            run("sum", shared, sums)
            (total,) = struct.unpack("<I", driver.read(sums, WORD))
            if total != world_size * _probe_word(0) & 0xFFFFFFFF:
                raise ResourceError(f"the switch added {world_size} words of {_probe_word(0):#x} and gave {total:#x}")

        stage("load the probe", lambda: self._modules.append(driver.load_module(PROBE)))
        stage("store through the switch", lambda: run("store", shared + WORD * rank, _probe_word(rank)))
        stage("see what was stored", seen)
        stage("add through the switch", added)
        stage("clear", lambda: self._clear(own, WORD * (world_size + 1)))

    def _clear(self, address: int, nbytes: int) -> None:
        self._driver.memset(address, 0, nbytes)
        self._driver.synchronize()
        self._driver.unload_module(self._modules[0])
        self._modules.clear()

    def give_back(self, undo: Cleanup) -> None:
        """Unbind this rank's memory and release the object, but keep its address. May be repeated."""
        self._passing.abandon()
        if self._modules and undo.attempt(self._driver.unload_module, *self._modules):
            self._modules.clear()
        if self._bound:
            bound = (self._mapped.handles[0], self._ordinal, self._own.nbytes)
            self._bound = not undo.attempt(self._driver.multicast_unbind, *bound)
        self._mapped.empty(undo)

    def release(self, undo: Cleanup) -> None:
        """Undo everything; each step is tried."""
        self.give_back(undo)
        self._mapped.release(undo)


def _probe_word(rank: int) -> int:
    return 0x4D430000 + 257 * (rank + 1)
