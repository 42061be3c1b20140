"""The table of mutants, first part: K01 to K33, which stand for bugs that other libraries have had.

Where the original was about CAS pads and this protocol has epochs and rotating mailboxes, the same mistake is made
here; where it can only be made with pads, a kernel of `pad_kernels` makes it.
"""

from tests.explorer import bodies
from tests.explorer.mutant_tables.cube import CUBES
from tests.explorer.mutant_tables.message import MESSAGES
from tests.explorer.mutant_tables.multicast import SWITCHED
from tests.explorer.mutant_tables.names import (
    AGS,
    CHUNKS,
    DEADLOCK,
    MAILBOX,
    PLAIN,
    PRIMITIVES,
    RACE,
    SCOPE,
    TWO_SHOT,
    WRONG,
    B,
    S,
    T,
)
from tests.explorer.mutant_tables.overlap import OVERLAPS
from tests.explorer.mutant_tables.own import OWN
from tests.explorer.mutant_tables.push import PUSHES
from tests.explorer.mutant_tables.quantised import QUANTISED
from tests.explorer.mutant_tables.wide import WIDE
from tests.explorer.mutation import Edit, Mutant

BARRIER = "kernels/collectives/barrier.py"
GROUP = "tricomm/core/group.py"
PADS = "tests/explorer/pad_kernels.py"

_SEND = "    send_headers(group, epoch, call, PHASE, True, WORLD_SIZE, LANES, PTX)\n"
_LAST = "is_pure=False, pack=1)\n    tl.debug_barrier()\n    return status\n"  # of a barrier
_OPENED = "            open_epoch(ahead, 1, SPEC)\n"
_STAGE = "            PUSH(tensors, ahead, SPEC)\n"
_MEET = "            status = synchronize(ahead, 0, SPEC)\n"
_NEXT = "        number += 1\n"
_FIRST = "            status = synchronize(ahead, 0, SPEC)\n        elif"
_SECOND = "status = synchronize(behind, 1, SPEC)"
_STRIDE = "own, tl.num_programs(0) * SPEC.TILE)"
_SECOND_HALF = "simple_buffer(chunk, peer_ahead(group, step, WORLD_SIZE), me, SPEC) + half"
_TAKEN = "buffers = buffers + (simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half"
_TAKEN_LAST = "buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half\n        words"
_ROTATES = "(chunk.epoch & 1) * SPEC.WORLD_SIZE + source\n    offset = simple_base(group)"
_RESULTS = "store_tiles(results, first, total, ours, WORLD_SIZE - 1, SPEC.BLOCK)\n        "
_GRID_WAIT = """\
    blocks = tl.num_programs(0)
    all_here = (tl.atomic_add(table_of(group) + 60, 1, sem="acq_rel", scope="gpu") // blocks + 1) * blocks
    while tl.atomic_add(table_of(group) + 60, 0, sem="acquire", scope="gpu") < all_here:
        pause(9)
"""
_MEETING = "agree_on_devices(control, facts, options.max_blocks, timeout)"
_ZEROED = """
        words = self.layout.nbytes // 8 - layout.HEADERS // 8
        self.arena.tensor(self.rank, layout.HEADERS, (words,), torch.int64).zero_()"""


REAL = (
    Mutant(
        "K01", "no release on arrive", "start barrier fully relaxed, torn reads: vllm#57059",
        (Edit(PRIMITIVES, _SEND, _SEND.replace("True", "False")),),
        (S,), RACE, "make it sem='release'",
    ),
    Mutant(
        "K02", "no acquire on wait", "start barrier fully relaxed, torn reads: vllm#57059",
        (Edit(PRIMITIVES, 'sem="acquire", scope="sys")', 'sem="relaxed", scope="sys")'),),
        (S,), RACE, "make it sem='acquire'",
    ),
    Mutant(
        "K03", "arrives at scope gpu instead of sys", "start barrier fully relaxed, torn reads: vllm#57059",
        (
            Edit(PRIMITIVES, 'tl.atomic_store(pointer, value, mask=mask, sem="release", scope="sys")',
                 'tl.atomic_store(pointer, value, mask=mask, sem="release", scope="gpu")'),
            Edit(PRIMITIVES, 'tl.atomic_xchg(pointer, value, mask=mask, sem="release", scope="sys")',
                 'tl.atomic_xchg(pointer, value, mask=mask, sem="release", scope="gpu")'),
        ),
        (S,), SCOPE, "say scope='sys'",
    ),
    Mutant(
        "K04", "staged after the signal", "data stored after the flag that announces them; kin of vllm#2760",
        (Edit(CHUNKS, _OPENED + _STAGE, _OPENED), Edit(CHUNKS, _MEET + _NEXT, _MEET + _STAGE + _NEXT)),
        (S,), RACE,
    ),
    Mutant(
        "K05", "no leading barrier", "peers' stages are read before their ranks signal that they are full",
        (Edit(CHUNKS, _MEET + _NEXT, f"            status = 0\n{_NEXT}"),),
        (S,), RACE, "no flag tells rank",
    ),
    Mutant(
        "K06", "pads: one stage, no trailing barrier", "the stage is filled under a reader: ROCm/aiter#3514, #4082",
        (Edit(PADS,
              '    tl.store(y_ptr + at, total)\n    meet(pads, rank, channel, WORLD_SIZE, "acq_rel", "acq_rel")\n',
              "    tl.store(y_ptr + at, total)\n"),),
        (), RACE, "a trailing barrier would", body=bodies.streams,
    ),
    Mutant(
        "K07", "pads: trailing barrier relaxed", "missing release and acquire: vllm#2760",
        (Edit(PADS, '"acq_rel", "acq_rel"', '"relaxed", "relaxed"'),),
        (), RACE, "released after the read", body=bodies.streams,
    ),
    Mutant(
        "K08", "pads: not set back", "a second signal finds the first: two counter sets needed, vllm#8558",
        (Edit(PADS, "tl.atomic_cas(pad, 1, 0, sem=TAKE", "tl.atomic_cas(pad, 1, 1, sem=TAKE"),),
        (), frozenset({"deadlock", "race"}), body=bodies.streams,
    ),
    Mutant(
        "K09", "polls with a volatile load", "flags that order nothing, \"not morally strong\": vllm#2760",
        (Edit(PRIMITIVES, 'seen = tl.atomic_add(pointer, tl.zeros(pointer.shape, tl.int64), mask=mask, sem="acquire", '
              'scope="sys")', "seen = tl.load(pointer, mask=mask, other=0, volatile=True)"),),
        (S,), RACE, "make it sem='acquire'",
    ),
    Mutant(
        "K10", "empty blocks of rank 0 leave early", "a barrier that not everybody takes part in",
        (Edit(CHUNKS, _MEET + _NEXT,
              f"            if (ahead.me != 0) | (ahead.own < ahead.count):\n    {_MEET}{_NEXT}"),),
        (AGS,), DEADLOCK, blocks=2,
    ),
    Mutant(
        "K11", "rank 0's grid is smaller", "grids that differ between ranks: FlashInfer `_grid_change_worker`",
        (
            Edit(CHUNKS, _STRIDE, "own, (tl.num_programs(0) - (rank_of(group) == 0)) * SPEC.TILE)"),
            Edit(CHUNKS, "(number <= chunks) & (status == 0):",
                 "(number <= chunks) & (status == 0) & (whole.own < whole.stride):"),
        ),
        (S,), DEADLOCK, blocks=2,
    ),
    Mutant(
        "K12", "one header for all blocks", "flags of consecutive calls overlap when shapes change: vllm#25892",
        (
            Edit(PRIMITIVES, "8 * (row * MAX_BLOCKS + tl.program_id(0))", "8 * (row * MAX_BLOCKS)"),
            Edit(PRIMITIVES, "pointer = table_of(group) + HEADERS // 8 + row * MAX_BLOCKS + tl.program_id(0)",
                 "pointer = table_of(group) + HEADERS // 8 + row * MAX_BLOCKS"),
        ),
        (S,), RACE, blocks=2,
    ),
    Mutant(
        "K13", "all ranks signal the same slot", "one slot for several writers; one writer per word is the rule",
        (Edit(PRIMITIVES, "row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE + rank_of(group)\n",
              "row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE\n"),),
        (S,), DEADLOCK,
    ),
    Mutant(
        "K14", "waits for one peer too few", "off by one in the count of arrivals",
        (Edit(PRIMITIVES, "    mask = (source < WORLD_SIZE) & (source != me)",
              "    mask = (source < WORLD_SIZE - 1) & (source != me)"),),
        (S,), RACE, "no flag tells rank",
    ),
    Mutant(
        "K15", "all blocks read the first one's epoch", "it may have ended, and moved its epoch on, before they begin",
        (Edit(PRIMITIVES, "return tl.load(words + tl.program_id(0), volatile", "return tl.load(words, volatile"),),
        (S,), RACE, blocks=2,
    ),
    Mutant(
        "K16", "one stage instead of two", "epochs without a second buffer: vllm#8404, ROCm/aiter#3514",
        (Edit(MAILBOX, _ROTATES, _ROTATES.replace("(chunk.epoch & 1) * SPEC.WORLD_SIZE + ", "")),),
        (S,), RACE, "two buffers used in turn",
    ),
    Mutant(
        "K17", "parity flips every second call", "two counter sets needed, and used in turn: vllm#8558",
        (Edit(MAILBOX, _ROTATES, _ROTATES.replace("epoch & 1", "epoch >> 1 & 1")),),
        (S,), RACE, "two buffers used in turn",
    ),
    Mutant(
        "K18", "signed < on a counter that wraps", "a stale flag counts as new from 2^31 on",
        (Edit(PRIMITIVES, "late = mask & (((seen >> 32) & LOW) != sequence)",
              "late = mask & ((seen >> 32).to(tl.int32) < sequence.to(tl.int32))"),),
        (S,), RACE, sizes=(9, 9, 9), first_epoch=2**31 - 2,
    ),
    Mutant(
        "K19", "rank 1 reads the other half", "two ranks that choose the buffer in different ways: vllm#8404",
        (Edit(PLAIN, "simple_buffer(chunk, head, 0, SPEC)",
              "simple_buffer(chunk._replace(epoch=chunk.epoch + (chunk.me == 1)), head, 0, SPEC)"),),
        (AGS,), frozenset({"race", "uninitialised"}),
    ),
    Mutant(
        "K20", "headers do not rotate", "equality, and a fast peer overtakes: two counter sets, vllm#8558, #8404",
        (
            Edit(PRIMITIVES, "row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE + rank_of(group)\n",
                 "row = PHASE * WORLD_SIZE + rank_of(group)\n"),
            Edit(PRIMITIVES, "row = (PHASE * 2 + (epoch & 1)) * WORLD_SIZE + tl.where(mask, source, 0)",
                 "row = PHASE * WORLD_SIZE + tl.where(mask, source, 0)"),
        ),
        (B,), DEADLOCK, strategy="pct",
    ),
    Mutant(
        "K21", "two-shot without the first barrier", "shards are reduced before they have come",
        (Edit(CHUNKS, _FIRST, "            status = 0\n        elif"),),
        (T,), RACE, "no flag tells rank",
    ),
    Mutant(
        "K22", "two-shot without the second barrier", "results are copied before they have come",
        (Edit(CHUNKS, _SECOND, "status = 0"),),
        (T,), RACE, "no flag tells rank",
    ),
    Mutant(
        "K23", "two-shot, results over shards", "no barrier between reads and new writes: ROCm/aiter#3514, #4082",
        (
            Edit(TWO_SHOT, _SECOND_HALF, _SECOND_HALF.removesuffix(" + half")),
            Edit(PLAIN, _TAKEN, _TAKEN.removesuffix(" + half")),
            Edit(PLAIN, _TAKEN_LAST, _TAKEN_LAST.replace(" + half", "")),
        ),
        (T,), RACE,
    ),
    Mutant(
        "K24", "two-shot, second barrier relaxed", "missing release: vllm#2760",
        (Edit(PRIMITIVES, _SEND, _SEND.replace("True", "PHASE == 0")),),
        (T,), RACE, "make it sem='release'",
    ),
    Mutant(
        "K25", "two-shot, waits at scope gpu", "Triton's default scope: vllm#57059",
        (Edit(PRIMITIVES, 'sem="acquire", scope="sys")', 'sem="acquire", scope="gpu")'),),
        (T,), SCOPE, "say scope='sys'",
    ),
    Mutant(
        "K26", "two-shot, own shard stored at the wrong place", "the reduced chunk lands elsewhere",
        (Edit(TWO_SHOT, f"{_RESULTS}store_words(y_ptr, here +", f"{_RESULTS}store_words(y_ptr, chunk.base +"),),
        (T,), WRONG,
    ),
    Mutant(
        "K27", "grid-wide wait, grid larger than the device", "a block waits for one that has no place to run",
        (Edit(PRIMITIVES, "    return tl.load(words + tl", f"{_GRID_WAIT}    return tl.load(words + tl"),),
        (S,), DEADLOCK, world_size=1, blocks=2, residency=1,
    ),
    Mutant(
        "K28", "grid not capped at what is resident", "blocks enter in another order on every GPU, and wait by number",
        (Edit(GROUP, _MEETING, _MEETING.replace("options.max_blocks", "None")),),
        (S,), DEADLOCK, blocks=0, max_blocks=1, residency=1, body=bodies.two_blocks_by_table,
        processes="no: a process runs its blocks one after another, always in the same order",
    ),
    Mutant(
        "K29", "memory zeroed after the exchange", "barrier zeroed after handles were exchanged: apache/tvm#16797",
        (Edit(GROUP, f"{_MEETING}\n", f"{_MEETING}{_ZEROED}\n"),),
        (B,), RACE,
    ),
    Mutant(
        "K30", "pads shared by two groups", "one group takes the other's signal: pytorch#192581",
        (Edit(PADS, "pads = comm.symmetric((2,), torch.int32)", "pads = pads or comm.symmetric((2,), torch.int32)"),),
        (), frozenset({"race", "deadlock"}), world_size=3, body=bodies.groups,
    ),
    Mutant(
        "K31", "pads shared by two streams", "several streams: pytorch#189228",
        (Edit(PADS, "row = channel * WORLD_SIZE", "row = channel * 0"),),
        (), frozenset({"race", "deadlock"}), blocks=2, body=bodies.streams,
    ),
    Mutant(
        "K32", "barrier that returns at once", "silent no-op barrier: pytorch#191858",
        (Edit(BARRIER, "status = primitives.barrier(group, start, call, 0, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)",
              "status = 0"),),
        (B,), RACE, "no flag tells rank", body=bodies.around_barrier,
    ),
    Mutant(
        "K33a", "no block barrier before the release", "other lanes' stores are not ordered: triton#7125, #10816",
        (Edit(PRIMITIVES, f"    tl.debug_barrier()\n{_SEND}", _SEND),),
        (S,), RACE, "put tl.debug_barrier() before the release",
    ),
    Mutant(
        "K33b", "no block barrier after the acquire", "other lanes' loads are not ordered: triton#7125, #10816",
        (Edit(PRIMITIVES, _LAST, _LAST.replace("    tl.debug_barrier()\n", "")),),
        (S,), RACE, "put tl.debug_barrier() after the acquire",
    ),
)  # fmt: skip

MUTANTS = {
    mutant.name: mutant for mutant in (*REAL, *OWN, *PUSHES, *OVERLAPS, *CUBES, *MESSAGES, *WIDE, *SWITCHED, *QUANTISED)
}
