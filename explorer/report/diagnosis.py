"""Writes the text of a finding: the two unordered accesses, the ordering that is missing, and a way to establish it."""

from __future__ import annotations

from dataclasses import replace

from tricomm.explorer.memory_model.clocks import ANY, SEEN, STRICT, THREAD, Joined, Part, Thread
from tricomm.explorer.memory_model.shadow import Clash
from tricomm.explorer.report.findings import REORDERED, Finding, Record

WOULD_ORDER = "would order them"  # advice about a flag that was written and read between the two accesses
TOO_NARROW = f"{WOULD_ORDER} if its scope reached both ranks: say scope='sys' (.sys) at both ends"


def race(thread: Thread, clash: Clash, first: Record, second: Record) -> Finding:
    """A race: `second`, an access of `thread`, conflicts with `first`, which does not happen before it."""
    words = "an atomic or volatile access against a plain one", "atomics"
    return unordered(clash.written, first, second, words, _missing(thread, clash, first, second))


def unordered(
    wrote: bool,
    first: Record,
    second: Record,
    words: tuple[str, str],
    missing: tuple[str, str],
    threads: tuple[str, str] = ("", ""),
) -> Finding:
    """Two conflicting, unordered accesses. `wrote`: the first one is a write. `missing` is the kind of the finding and
    the advice.

    `words`: the terms to use for "a strong access and a weak one" and for "strong accesses". `threads`: the words for
    both threads, as in `uninitialised`.
    """
    kind, advice = missing
    name = "write-after-write" if wrote and second.kind != "load" else "read-after-write"
    name = name if wrote else "write-after-read"
    mixed = ""
    if (first.sem is None) != (second.sem is None):
        mixed = f", {words[0]}"
    elif first.sem is not None and first.itemsize != second.itemsize:
        mixed = f", {words[1]} of different sizes ({first.itemsize} and {second.itemsize} bytes)"
    both = f"{_said(first, threads[0])}; then {_said(second, threads[1])}"
    text = f"{name}{mixed} on {second.place}: {both}; nothing orders the two"
    return replace(_finding(kind, (first, second), text, advice), effect=REORDERED if WOULD_ORDER in advice else "")


def _missing(thread: Thread, clash: Clash, first: Record, second: Record) -> tuple[str, str]:
    slot, time = clash.slot, clash.time
    if first.sem is not None and second.sem is not None and first.itemsize == second.itemsize:
        return "scope", _wider(first, second)
    join = next((j for j in thread.joins if j.seen[slot] >= time), None)
    if join is None or time > thread.now[SEEN][slot]:
        return "race", flag_needed(clash.written, first, second)
    part = next((p for p in join.parts if p.slot == slot), join.parts[-1])
    flag = flag_of((part.site.short, part.sem, part.scope), (join.site.short, join.sem, join.scope))
    if time <= thread.now[THREAD][slot]:
        return "race", _block_barrier(thread, slot, time, flag, part, join)
    if time <= thread.now[ANY][slot]:
        return "scope", f"{flag} {TOO_NARROW}"
    return "race", f"{flag} {WOULD_ORDER}, but {_weak(part, join)}"


def flag_of(stored: tuple[str, str | None, str | None], read: tuple[str, str | None, str | None]) -> str:
    """The name of a flag: line, semantics and scope of its store and of its load."""
    (at, sem, scope), (where, read_sem, read_scope) = stored, read
    return f"the flag stored at {at} ({sem}, .{scope}) and read at {where} ({read_sem}, .{read_scope})"


def _block_barrier(thread: Thread, slot: int, time: int, flag: str, part: Part, join: Joined) -> str:
    if time <= max(thread.now[STRICT][slot], thread.pending[slot]):
        return (
            f"{flag} orders only the thread that read it; the block's other threads run on: put tl.debug_barrier() "
            f"after the acquire at {join.site.short}"
        )
    return (
        f"{flag} releases only what came before the last block barrier: put tl.debug_barrier() before the release at "
        f"{part.site.short}, so that it covers the whole block's accesses"
    )


def _weak(part: Part, join: Joined) -> str:
    wrong = []
    if part.sem not in ("release", "acq_rel"):
        wrong.append(f"the store at {part.site.short} is {part.sem}: make it sem='release', after a tl.debug_barrier()")
    if join.sem not in ("acquire", "acq_rel"):
        wrong.append(
            f"the load at {join.site.short} is {join.sem}: make it sem='acquire', with a tl.debug_barrier() after it"
        )
    return " and ".join(wrong) or "the release that it continues is not of this access"


def _wider(first: Record, second: Record) -> str:
    return (
        f"atomics meet only where the scopes of both include both: .{first.scope} and .{second.scope} do not; say "
        "scope='sys' for memory that other ranks touch"
    )


def flag_needed(written: bool, first: Record, second: Record) -> str:
    """Advice for an access `second` that is not ordered after `first`. `written`: the first access is a write."""
    a, b = f"rank {first.rank}", f"rank {second.rank}"
    if first.rank == second.rank:
        a, b = f"{a}, block {first.block},", f"{b}, block {second.block},"
    elif -1 in (first.block, second.block):  # host code
        return (
            f"no flag tells {b} that {a} has {'written' if written else 'read'}: put a barrier of both ranks between "
            "the two, such as the memory handle's barrier() or a collective of the group"
        )
    if written and second.kind == "load":
        return (
            f"no flag tells {b} that {a} has written: let {a} release one after its store (tl.debug_barrier(), then a "
            f"store with sem='release', scope='sys') and {b} acquire it before its load"
        )
    if written:
        return f"no flag tells {b} that {a} has finished with this memory: let {a} release one that {b} acquires first"
    return (
        f"no flag tells {b} that {a} has read: a trailing barrier would, or two buffers used in turn, so that {b} "
        "writes only after it has acquired a flag that was released after the read"
    )


def ll_overwritten(first: Record, second: Record, never: bool) -> Finding:
    state = "before it was read" if never else "while its reader may still be polling for it"
    text = f"LL word overwritten {state}, {second.place}: {_said(first)}; then {_said(second)}"
    advice = (
        "write an epoch's words only after the reader's header of the epoch between has been seen (wait_headers), and "
        "rotate the mailboxes by the epoch's parity"
    )
    return _finding("race", (first, second), text, advice)


def zero_may_come_late(first: Record, second: Record) -> Finding:
    """A finding: an LL word is written over a zero that may not have reached memory yet."""
    text = f"the zero of a clearing may still land on an LL word, {second.place}: {_said(first)}; then {_said(second)}"
    advice = "release the header that follows a clearing, and acquire it before the word is written"
    return _finding("race", (first, second), text, advice)


def zero_may_be_missed(first: Record, second: Record) -> Finding:
    """A finding: an LL word of a message is read at a place whose clearing this reader may not see yet."""
    text = (
        f"the old content of a cleared LL word may still be read, {second.place}: {_said(first)}; then {_said(second)}"
    )
    advice = "release the header that follows a clearing, and acquire it before the words are polled"
    return _finding("race", (first, second), text, advice)


def uninitialised(record: Record, thread: str = "") -> Finding:
    """A finding: a read of memory that was never written. `thread` is the words for its thread, such as ", thread 5",
    or empty if threads are not told apart."""
    text = f"{_said(record, thread)} from {record.place}, which was never written"
    advice = "write it first, or wait for the rank that does; if the zeros of new memory are meant, store them"
    return _finding("uninitialised", (record,), text, advice)


IN_BOUNDS = "mask the lanes that have no element, check the offsets, and close a handle after its last use"


def out_of_bounds(record: Record, text: str) -> Finding:
    return _finding("out_of_bounds", (record,), text, IN_BOUNDS)


def never_waits(rank: int, kernel: str, where: str) -> Finding:
    text = f"rank {rank}: {kernel} is a dependent launch, and no thread of it has executed griddepcontrol.wait"
    advice = (
        "call tl.extra.cuda.gdc_wait() in it, or launch it without launch_pdl=True: later dependent launches wait only "
        "for its end, which may come before that of earlier kernels"
    )
    return Finding("no_wait", (rank,), (where,), text, advice)


def leftover(record: Record, place: str) -> Finding:
    text = f"{_said(record)} to {place}, which is unread at the end"
    return _finding("leftover", (record,), text, "the next call may read it as its own: wait for every signal sent")


def epoch_not_at_rest(rank: int, block: int, word: int) -> Finding:
    text = f"rank {rank}'s epoch word of block {block} is {word:#x} at the end, not the epoch of its first block"
    return Finding("leftover", (rank,), (), text, "a launch has not ended as `leave` ends one")


def arrivals_left(rank: int, value: int) -> Finding:
    text = f"rank {rank}'s message arrivals word is {value} at the end, not 0"
    return Finding("leftover", (rank,), (), text, "a message has not ended as `end_message` ends one")


def epochs_differ(epochs: list[int]) -> Finding:
    text = f"the ranks' epochs differ at the end: {epochs}"
    advice = "every rank must advance by the same number of chunks"
    return Finding("leftover", tuple(range(len(epochs))), (), text, advice)


def _said(record: Record, thread: str = "") -> str:
    return f"{record.who}{thread}: {record.what} of {record.count} x {record.itemsize} bytes ({record.site.text})"


def _finding(kind: str, records: tuple[Record, ...], text: str, advice: str) -> Finding:
    return Finding(
        kind,
        tuple(r.rank for r in records),
        tuple(r.site.where for r in records),
        text,
        advice,
        accesses=tuple(r.as_json() for r in records),
    )
