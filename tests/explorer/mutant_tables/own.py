"""The table of mutants, second part: one for each protection of this library's own protocol."""

import torch

from tests.explorer import bodies
from tests.explorer.mutant_tables.names import (
    AGL,
    ARRIVAL,
    CHUNKS,
    DEADLOCK,
    MAILBOX,
    PLAIN,
    PRIMITIVES,
    PUSH,
    RACE,
    TL,
    TWO_SHOT,
    WRONG,
    B,
    L,
    S,
    T,
)
from tests.explorer.mutation import Edit, Mutant

PACKING = "kernels/device/packing.py"
GATHER = "kernels/collectives/all_gather_one_shot.py"
ONE_SHOT = "kernels/collectives/all_reduce_one_shot.py"

_BEFORE_CLEAR = 2**30 - 1
_BEFORE_WRAP = 2**32 - 2
_OLD = "(flags != flag)"
_LATE = "late |= tl.where(lane < lefts[n], low_old | high_old, 0)"
_MEET = "    status = synchronize(chunk, 0, SPEC)\n"
_PUSH = "    push_to_all(x_ptr, numel, chunk, SPEC)\n"
_ROTATES = "(chunk.epoch & 1) * SPEC.WORLD_SIZE + source\n    if SPEC.WIDE:"
_SAME = "ahead._replace(epoch=ahead.epoch * 0)"
_AHEAD = "PUSH(tensors, ahead, SPEC)\n"
_MET = "status = synchronize(ahead, 0, SPEC)\n"
_ONE_BACK = "nth(unknown(whole, SPEC), number - 1, chunk_words)"
_TWO_BACK = "nth(unknown(whole, SPEC), number - 2, chunk_words)"
_SHARD = "buffer = simple_buffer(chunk, peer_ahead(chunk.group, STEP, SPEC.WORLD_SIZE), chunk.me, SPEC)"
_TO = "\n            buffer"
_CLEAR = "    clear_idle(group, epoch, PARTS, SPEC)\n"
_OPEN = """\
    if SPEC.LL:
        if clears(epoch):
            send_headers(group, epoch, call, 0, True, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
        else:
            send_headers(group, epoch, call, 0, False, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
"""
_PUT = """\
        tl.store(pointers, low, mask=mask)
        tl.store(pointers + 1, high, mask=mask)
"""
_TORN = """\
        half = pointers.to(tl.pointer_type(tl.int32))
        tl.store(half, low.to(tl.int32), mask=mask)
        tl.store(half + 1, (low >> 32).to(tl.int32), mask=mask)
        tl.store(half + 2, high.to(tl.int32), mask=mask)
        tl.store(half + 3, (high >> 32).to(tl.int32), mask=mask)
"""
_MOVE_ON = "        later = advance(epoch, chunks) + lane * 0\n"
_KEPT = "    lacks = tl.where(block == 0, tl.num_programs(0), MAX_BLOCKS)\n"

_BEHIND_CLEARING = "        tl.debug_barrier()\n"
_REST = "(not takes), status, SPEC)\n    more"
OUTSIDE = frozenset({"out_of_bounds"})

OWN = (
    Mutant(
        "M01", "LL: the flag of one word stands for the tile", "only one whole word is written at once",
        (Edit(ARRIVAL, _LATE, _LATE.replace("lefts[n]", "1")),),
        (L,), frozenset({"wrong_result", "leftover"}), schedules=20, body=bodies.in_turn,
    ),
    Mutant(
        "M02", "LL: the first half of the words is polled", "a payload word is two LL words",
        (Edit(ARRIVAL, _LATE, _LATE.replace("lefts[n]", "lefts[n] // 2")),),
        (L,), frozenset({"wrong_result", "leftover"}), schedules=20, body=bodies.in_turn,
    ),
    Mutant(
        "M03", "LL: any flag will do", "a word of the epoch before the last is taken for new",
        (Edit(ARRIVAL, _OLD, "(flags == 0)"),),
        (L,), frozenset({"race", "wrong_result", "leftover"}), schedules=20,
    ),
    Mutant(
        "M04", "LL: no wait for headers", "the fingerprint is not read, and the header is there for the next call",
        (Edit(PUSH, "pointers, lefts, SOURCES, True,", "pointers, lefts, SOURCES, False,"),),
        (L,), frozenset({"leftover"}),
    ),
    Mutant(
        "M05", "LL: mailboxes do not rotate", "a word is overwritten before it is polled: vllm#8404",
        (Edit(MAILBOX, _ROTATES, _ROTATES.replace("(chunk.epoch & 1) * SPEC.WORLD_SIZE + ", "")),),
        (L,), RACE, "rotate the mailboxes",
    ),
    Mutant(
        "M06", "fingerprint ignored", "ranks that make different calls get numbers instead of CollectiveMismatch",
        (Edit(ARRIVAL, "wrong = said.to(tl.int32) != call.to(tl.int32)", "wrong = source < 0"),),
        (L,), frozenset({"rank_mismatch"}), body=bodies.differing, clean=frozenset({"exception"}),
    ),
    Mutant(
        "M07", "cleared after the header", "a peer's next words are cleared away (mailboxes.py)",
        (Edit(PUSH, _CLEAR + _OPEN, _OPEN + _CLEAR),),
        (L,), frozenset({"race", "deadlock"}), first_epoch=_BEFORE_CLEAR, sizes=(1, 1, 200), blocks=2, tile=128,
    ),
    Mutant(
        "M08", "never cleared", "words of 2^32 epochs ago are taken for new",
        (Edit(MAILBOX, "return ((epoch & (CLEAR_EVERY - 1)) <= 1) & (epoch > 1)", "return epoch < 0"),),
        (L,), frozenset({"wrong_result", "race"}), first_epoch=_BEFORE_CLEAR, sizes=(1, 1, 200), blocks=2, tile=128,
        body=bodies.prefilled, schedules=20,
    ),
    Mutant(
        "M09", "header after clearing relaxed", "a zero still lands on a word that a peer has pushed since",
        (Edit(PUSH, "send_headers(group, epoch, call, 0, True,", "send_headers(group, epoch, call, 0, False,"),),
        (L,), RACE, "release the header that follows a clearing", first_epoch=_BEFORE_CLEAR + 2, sizes=(1, 9), tile=128,
    ),
    Mutant(
        "M43", "no block barrier after a clearing", "the header releases what its own threads have cleared, no more",
        (Edit(MAILBOX, f"{_BEHIND_CLEARING}\n\n@triton.jit\ndef clear_runs", "\n\n@triton.jit\ndef clear_runs"),),
        (L,), RACE, "release the header that follows a clearing", first_epoch=_BEFORE_CLEAR + 2, sizes=(1, 9), tile=128,
    ),
    Mutant(
        "M10", "clears the mailbox in use", "what peers push in this very epoch is cleared away",
        (Edit(MAILBOX, "idle = (epoch & 1) ^ 1", "idle = epoch & 1"),),
        (L,), frozenset({"race", "deadlock"}), first_epoch=_BEFORE_CLEAR,
    ),
    Mutant(
        "M11", "epoch advanced by two", "parity must alternate: the same mailbox call after call",
        (Edit(PRIMITIVES, _MOVE_ON, _MOVE_ON.replace("chunks", "2 * chunks")),),
        (S,), RACE, "two buffers used in turn",
    ),
    Mutant(
        "M12", "epoch advanced by one, whatever the chunks", "the next call takes this one's epochs again",
        (Edit(PRIMITIVES, _MOVE_ON, _MOVE_ON.replace("chunks", "1")),),
        (L,), frozenset({"race", "exception"}), sizes=(300, 300), tile=128,
    ),
    Mutant(
        "M13", "all chunks in one epoch", "a chunk of a long message is an epoch",
        (Edit(CHUNKS, "advance(whole.epoch, number)", "whole.epoch"),),
        (S,), RACE, sizes=(1100,), tile=512,
    ),
    Mutant(
        "M14", "words of blocks that a launch lacks keep their epoch", "a launch with more blocks reads two epochs",
        (Edit(PRIMITIVES, _KEPT, "    lacks = MAX_BLOCKS\n"),),
        (S,), frozenset({"leftover"}), blocks=2,
    ),
    Mutant(
        "M15", "the first block moves all epochs on", "others of its launch have not read theirs yet",
        (Edit(PRIMITIVES, _KEPT, _KEPT.replace("tl.num_programs(0)", "0")),),
        (B,), RACE, blocks=2,
    ),
    Mutant(
        "M16", "the call's number stays", "the next launch takes this one for a second stream: pytorch#189228",
        (Edit(PRIMITIVES, "EPOCHS + lane, later, mask=kept)", "EPOCHS + lane, later | (1 << 62), mask=kept)"),),
        (B,), frozenset({"exception", "leftover"}),
    ),
    Mutant(
        "M17", "wraps to 1 instead of 2", "2^32 - 1 and 1 have the same parity",
        (Edit(PRIMITIVES, "later - (LIMIT - 2)", "later - (LIMIT - 1)"),),
        (S,), RACE, "two buffers used in turn", first_epoch=_BEFORE_WRAP,
    ),
    Mutant(
        "M18", "two-shot: one header for both phases", "the second barrier finds the first one's flag",
        (Edit(CHUNKS, "synchronize(behind, 1, SPEC)", "synchronize(behind, 0, SPEC)"),),
        (T,), RACE, "no flag tells rank",
    ),
    Mutant(
        "M19", "two-shot: result pushed to the first half", "writer and reader disagree about the place",
        (Edit(TWO_SHOT, "me, SPEC) + half,)", "me, SPEC),)"),),
        (T,), frozenset({"uninitialised", "race"}),
    ),
    Mutant(
        "M20", "two-shot: a shard ends at a whole word", "the last word of a tensor may have one element only",
        (Edit(TWO_SHOT, "limit = end_of(here + ours, numel, 64 // x_ptr", "limit = (here + ours) * (64 // x_ptr"),),
        (T,), OUTSIDE, sizes=(7, 1, 9), dtype=torch.int32, body=bodies.in_turn,
    ),
    Mutant(
        "M21", "tail read one element too far", "off by one in a mask",
        (Edit(PACKING, "part = tl.load(raw_pointer(x_ptr, BITS) + at, mask=at < numel, other=0)",
              "part = tl.load(raw_pointer(x_ptr, BITS) + at, mask=at <= numel, other=0)"),),
        (S,), OUTSIDE,
    ),
    Mutant(
        "M22", "reduced from the own rank on", "ranks hold different bits: vLLM keeps one order for this reason",
        (Edit(ONE_SHOT, "import peer_of\n", "import peer_ahead\n"),
         Edit(ONE_SHOT, "peer_of(chunk.group, r, WORLD_SIZE), 0,", "peer_ahead(chunk.group, r, WORLD_SIZE), 0,")),
        (S,), frozenset({"rank_mismatch"}), world_size=3, body=bodies.floats,
    ),
    Mutant(
        "M23", "every block waits for block 0's header", "block b reads what block b of a peer wrote",
        (Edit(PRIMITIVES, "pointer = table_of(group) + HEADERS // 8 + row * MAX_BLOCKS + tl.program_id(0)",
              "pointer = table_of(group) + HEADERS // 8 + row * MAX_BLOCKS"),),
        (S,), RACE, blocks=2,
    ),
    Mutant(
        "M24", "two-shot: a rank without a shard does not meet", "every block sends headers, with payload or without",
        (Edit(CHUNKS, f"            {_MET}        elif",
              f"            if ahead.count > ahead.me * tl.cdiv(ahead.count, 2 * SPEC.WORLD_SIZE) * 2:\n"
              f"                {_MET}        elif"),),
        (T,), DEADLOCK,
    ),
    Mutant(
        "M25", "LL: flag and payload in two stores", "a flag may arrive before its payload; mixed sizes: vllm#2760",
        (Edit(PRIMITIVES, _PUT, _TORN),),
        (L,), RACE,
    ),
    Mutant(
        "M26", "two-shot LL: own shard not pushed to oneself", "a rank polls its own buffer, too",
        (Edit(TWO_SHOT, f"tl.static_range(SPEC.WORLD_SIZE):{_TO}", f"tl.static_range(1, SPEC.WORLD_SIZE):{_TO}"),),
        (TL,), DEADLOCK,
    ),
    Mutant(
        "M27", "two-shot LL: both phases in one half", "a word of the second phase is taken for one of the first",
        (
            Edit(TWO_SHOT, "me, half + first, SPEC)", "me, first, SPEC)"),
            Edit(TWO_SHOT, "ll_buffer(chunk, table_of(group), source, half + first, SPEC)",
                 "ll_buffer(chunk, table_of(group), source, first, SPEC)"),
        ),
        (TL,), RACE,
    ),
    Mutant(
        "M28", "two-shot does not rotate, one-shot does", "flags of consecutive calls that differ overlap: vllm#25892",
        (
            Edit(CHUNKS, f"PASS_ON(tensors, {_ONE_BACK},", f"PASS_ON(tensors, {_ONE_BACK}._replace(epoch=start * 0),"),
            Edit(CHUNKS, f"2, SPEC)\n            {_AHEAD}", f"2, SPEC)\n            {_AHEAD.replace('ahead', _SAME)}"),
            Edit(CHUNKS, f"{_TWO_BACK}, SPEC)", f"{_TWO_BACK}._replace(epoch=number * 0), SPEC)"),
        ),
        (T, S), RACE, sizes=(9, 9, 9, 9), body=bodies.in_turn,
    ),
    Mutant(
        "M29", "barrier forgets the last rank", "an unread flag is there for the next call",
        (Edit(PRIMITIVES, "    mask = (source < WORLD_SIZE) & (source != me)",
              "    mask = (source < WORLD_SIZE - 1) & (source != me)"),),
        (B,), frozenset({"leftover"}),
    ),
    Mutant(
        "M30", "nothing staged", "peers read memory that was never written",
        (Edit(ONE_SHOT, "    stage(tensors[0], tensors[2], chunk, SPEC)\n", "    pass\n"),),
        (S,), frozenset({"uninitialised"}),
    ),
    Mutant(
        "M31", "LL: the last word of a tile is not sent", "off by one in a mask",
        (Edit(PRIMITIVES, "flag, lane < count, PTX)", "flag, lane < count - 1, PTX)"),),
        (L,), DEADLOCK,
    ),
    Mutant(
        "M32", "LL: the flag loses its top bit", "a counter of 31 bits where 32 are meant",
        (Edit(PRIMITIVES, "low = (words & LOW) | (flag << 32)", "low = (words & LOW) | ((flag & 0x7FFFFFFF) << 32)"),),
        (L,), DEADLOCK, first_epoch=2**31 - 2,
    ),
    Mutant(
        "M34", "two-shot: shard pushed to the peer's own buffer", "two ranks write to one buffer",
        (Edit(PLAIN, _SHARD, _SHARD.replace("chunk.me,", "(chunk.me + STEP) % SPEC.WORLD_SIZE,")),),
        (T,), frozenset({"race", "uninitialised"}),
    ),
    Mutant(
        "M35", "LL: polls with a plain load", "a load that is not volatile may be split, kept, or never repeated",
        (Edit(ARRIVAL, "tl.load(at, volatile=True)", "tl.load(at)"),),
        (L,), RACE,
    ),
    Mutant(
        "M36", "LL gather: the second chunk over the first", "an offset that only a long message needs",
        (Edit(PUSH, "store_planes(y_ptr + r * numel, chunk.base + first,", "store_planes(y_ptr + r * numel, first,"),),
        (AGL,), WRONG, sizes=(300,), tile=128,
    ),
    Mutant(
        "M40", "LL: a block without words does not look at headers", "the next call finds it still there",
        (Edit(PUSH, f"(first >= chunk.count) | {_REST}", _REST),),
        (L,), frozenset({"leftover", "race"}), blocks=2, sizes=(1, 1, 12),
    ),
    Mutant(
        "M41", "two-shot LL: words are polled without headers", "the header is there for the next call",
        (Edit(TWO_SHOT, "lefts, SPEC.WORLD_SIZE, True, SPEC)", "lefts, SPEC.WORLD_SIZE, False, SPEC)"),),
        (TL,), frozenset({"leftover", "race"}),
    ),
    Mutant(
        "M42", "LL: headers are polled without acquire", "the next call pushes plain data over what a peer still reads",
        (Edit(ARRIVAL, "tl.where(mask, acquire(at, mask, SPEC.PTX), 0)", "tl.load(at, mask, other=0, volatile=True)"),),
        (S, L, T), frozenset({"race"}), sizes=(36, 4, 40), body=bodies.in_turn,
    ),
    Mutant(
        "M37", "LL: polls the upper halves only", "the lower one is stored first, and may come last",
        (Edit(ARRIVAL, _LATE, _LATE.replace("low_old | high_old", "high_old")),),
        (L,), frozenset({"wrong_result"}), schedules=20, body=bodies.in_turn,
    ),
)  # fmt: skip
