"""The table of mutants, third part: pushes to some ranks only, a root, a barrier (`kernels/device/push.py`)."""

from tests.explorer import bodies
from tests.explorer.mutant_tables.names import (
    AL,
    AS,
    BL,
    BS,
    BT,
    CHUNKS,
    CL,
    CS,
    DEADLOCK,
    DL,
    DS,
    GL,
    PLAIN,
    RACE,
    RL,
    RS,
    UNEVEN,
    VL,
    VS,
    WRONG,
)
from tests.explorer.mutant_tables.names import PUSH as FILE
from tests.explorer.mutation import Edit, Mutant

TWO_SHOT = "kernels/collectives/broadcast_two_shot.py"
REDUCE = "kernels/collectives/reduce_one_shot.py"
SCATTER = "kernels/collectives/scatter_one_shot.py"
SPLITS = "kernels/device/counts.py"

_ALONE = """\
(not takes), status, SPEC)
        more = (status == 0) & (first < chunk.count) & takes
        while more:
            tiles, status = arrived(chunk, """
_TAKES_ONE, _TAKES_ALL = f"{_ALONE}source,", f"{_ALONE}0,"
_NO_WORDS = """\
(first >= chunk.count) | (not takes), status, SPEC)
    more = (status == 0) & (first < chunk.count) & takes"""
_SUM = "            total = reduce_planes(tiles, SPEC)\n"
_MET = "            status = synchronize(ahead, 0, SPEC)\n        number"
_SIGNAL_ONLY = """\
            if ahead.me == tensors[3]:
                tl.debug_barrier()
                send_headers(group, ahead.epoch, call, 0, True, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
            else:
                status = synchronize(ahead, 0, SPEC)
        number"""
_IMPORT = "from tricomm.kernels.primitives import advance, enter, finish, leave, read_epoch"
_TAKEN = "buffers = buffers + (simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half"
_TAKEN_LAST = "buffer = simple_buffer(chunk, table_of(chunk.group), source, SPEC) + half\n        words"
_BARRIER = "        status = barrier(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX, SPEC.SWITCH)\n"
_HEADERS = """\
        tl.debug_barrier()
        send_headers(group, epoch, call, PHASE, True, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
        status = wait_headers(group, epoch, call, PHASE, SPEC.WORLD_SIZE, SPEC.LANES, SPEC.PTX)
        tl.debug_barrier()
"""
_SECOND = "status = synchronize(behind, 1, SPEC)"
_BEFORE_CLEAR = 2**30 - 1

UNWRITTEN = frozenset({"uninitialised", "race"})


def _barrier(old: str, new: str) -> tuple[Edit, ...]:
    """`synchronize` under `simple`, spelled out and changed."""
    return (Edit(FILE, _BARRIER, _HEADERS.replace(old, new, 1)),)


PUSHES = (
    Mutant(
        "P01", "LL broadcast: the root does not wait", "a root runs ahead: words of the epoch before the last get lost",
        (Edit(FILE, _TAKES_ONE, _TAKES_ONE.replace("(not takes)", "False")),),
        (BL,), RACE, "rotate the mailboxes", sizes=(600,), tile=256,
    ),
    Mutant(
        "P02", "broadcast: the root signals and does not wait", "a root runs ahead of those that copy",
        (Edit(CHUNKS, _IMPORT, f"{_IMPORT}, send_headers"), Edit(CHUNKS, _MET, _SIGNAL_ONLY)),
        (BS,), RACE, "two buffers used in turn", sizes=(1100,), tile=512,
    ),
    Mutant(
        "P03", "LL gather: a rank that is not the root does not wait", "senders run ahead of the root",
        (Edit(FILE, _TAKES_ALL, _TAKES_ALL.replace("(not takes)", "False")),),
        (GL,), RACE, "rotate the mailboxes", sizes=(600,), tile=256,
    ),
    Mutant(
        "P04", "push: the barrier does not release", "pushed rows are not published",
        _barrier("True", "False"), (DS,), RACE, "make it sem='release'",
    ),
    Mutant(
        "P05", "push: no block barrier before the barrier", "other lanes' pushes are not ordered",
        _barrier("        tl.debug_barrier()\n        send", "        send"),
        (AS,), RACE, "put tl.debug_barrier() before the release",
    ),
    Mutant(
        "P06", "push: no block barrier after the barrier", "other lanes read before one has acquired",
        _barrier("SPEC.PTX)\n        tl.debug_barrier()\n", "SPEC.PTX)\n"),
        (CS,), RACE, "put tl.debug_barrier() after the acquire",
    ),
    Mutant(
        "P07", "push: received before the barrier", "nothing polls the push under `simple`",
        (Edit(FILE, _BARRIER, "        status = 0\n"),),
        (RS,), RACE, "no flag tells rank",
    ),
    Mutant(
        "P08", "push: one buffer too few is received", "off by one in the number of senders",
        (Edit(FILE, "simple_buffer(chunk, table_of(group), source + n, SPEC)",
              "simple_buffer(chunk, table_of(group), (source + n) % (SPEC.WORLD_SIZE - 1), SPEC)"),),
        (DS,), WRONG, world_size=3,
    ),
    Mutant(
        "P09", "push: received from the other parity", "sender and receiver disagree about the mailbox",
        (Edit(FILE, "simple_buffer(chunk, table_of(group), source + n, SPEC)",
              "simple_buffer(chunk._replace(epoch=chunk.epoch + 1), table_of(group), source + n, SPEC)"),),
        (DS,), UNWRITTEN,
    ),
    Mutant(
        "P10", "LL push: buffers taken for half as far apart", "the distance between buffers is in words of 8 bytes",
        (Edit(FILE, "n * (flagged_bytes(chunk.group, SPEC) // 8)", "n * (flagged_bytes(chunk.group, SPEC) // 16)"),),
        (RL,), DEADLOCK,
    ),
    Mutant(
        "P11", "LL push: into the receiver's buffer", "all senders write to one buffer",
        (Edit(FILE, "put_planes(ll_buffer(chunk, head, chunk.me,", "put_planes(ll_buffer(chunk, head, to,"),),
        (AL,), frozenset({"race", "deadlock"}),
    ),
    Mutant(
        "P12", "push: rows by step instead of by rank", "a schedule of peers is no list of rows",
        (Edit(FILE, "row = tensors[0] + to * tensors[2]", "row = tensors[0] + step % SPEC.WORLD_SIZE * tensors[2]"),),
        (AL,), WRONG,
    ),
    Mutant(
        "P13", "reduce: the root keeps its data to itself", "its own buffer is part of the sum",
        (Edit(REDUCE, "    push_row(", "    if chunk.me != root:\n        push_row("),),
        (RS,), UNWRITTEN,
    ),
    Mutant(
        "P14", "scatter: received from rank 0, whichever rank is the root", "a root that is a constant by mistake",
        (Edit(SCATTER, "receive_row(y_ptr, numel, root,", "receive_row(y_ptr, numel, 0,"),),
        (CL,), DEADLOCK,
    ),
    Mutant(
        "P15", "push: simple does not clear", "LL words of 2^32 epochs ago, where calls are `simple` at that time",
        (Edit(FILE, "    clear_idle(group,", "    if SPEC.LL:\n        clear_idle(group,"),),
        (DS, DS, DL, DL), frozenset({"wrong_result", "race"}), first_epoch=_BEFORE_CLEAR, sizes=(1, 1, 200, 200),
        blocks=2, tile=128, body=bodies.prefilled, schedules=20,
    ),
    Mutant(
        "P16", "two-shot broadcast without the second barrier", "shards are copied before they have come",
        (Edit(CHUNKS, _SECOND, "status = 0"),),
        (BT,), RACE, "no flag tells rank",
    ),
    Mutant(
        "P17", "two-shot broadcast: one header for both phases", "the second barrier finds the first one's flag",
        (Edit(CHUNKS, _SECOND, _SECOND.replace("1", "0")),),
        (BT,), RACE, "no flag tells rank", world_size=3,
    ),
    Mutant(
        "P18", "two-shot broadcast: both phases in one half", "what is passed on lands on shards that are still read",
        (
            Edit(TWO_SHOT, "me, SPEC) + half", "me, SPEC)"),
            Edit(PLAIN, _TAKEN, _TAKEN.removesuffix(" + half")),
            Edit(PLAIN, _TAKEN_LAST, _TAKEN_LAST.replace(" + half", "")),
        ),
        (BT,), RACE,
    ),
    Mutant(
        "P19", "two-shot broadcast: the root keeps its shard", "a rank pushes its shard to all in the second phase",
        (Edit(TWO_SHOT, "% SPEC.WORLD_SIZE != root:", "% SPEC.WORLD_SIZE != root and me != root:"),),
        (BT,), UNWRITTEN,
    ),
    Mutant(
        "P20", "uneven parts: begin one rank late", "the sum of the lengths before takes the own one in",
        (Edit(SPLITS, "tl.where(r < rank, counts[r], 0)", "tl.where(r <= rank, counts[r], 0)"),),
        (VS,), frozenset({"wrong_result", "out_of_bounds"}), world_size=3,
    ),
    Mutant(
        "P21", "uneven parts: lengths by step instead of by rank", "a schedule of peers is no list of lengths",
        (Edit(UNEVEN, "part(recv_counts, source, numel,", "part(recv_counts, step, numel,"),),
        (VL,), frozenset({"wrong_result", "deadlock"}), world_size=3,
    ),
    Mutant(
        "P22", "uneven parts: only its own parts count for chunks", "rows that need more chunks arrive in part",
        (Edit(SPLITS, "tl.maximum(ours, tl.max(tl.where(mask, theirs & LOW, 0), axis=0))", "ours"),),
        (VL,), WRONG, sizes=(257,), tile=256,
    ),
    Mutant(
        "P23", "LL: a block without words polls the first tile", "it is another block's, whose peers push over it",
        (
            Edit(FILE, _NO_WORDS, "False, status, SPEC)\n    more = status == 0"),
            Edit(FILE, f"if status == 0:\n{_SUM}", f"if (status == 0) & (first < chunk.count):\n{_SUM}"),
        ),
        (DL,), RACE, "rotate the mailboxes", sizes=(600,), tile=256, blocks=2,
    ),
)  # fmt: skip
