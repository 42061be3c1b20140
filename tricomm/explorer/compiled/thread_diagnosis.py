"""From two accesses of threads that nothing orders to words: what they are, and which ordering is missing."""

from __future__ import annotations

from collections.abc import Sequence

from tricomm.explorer.compiled.events import Event
from tricomm.explorer.compiled.thread_clocks import SCOPES, includes
from tricomm.explorer.compiled.thread_epochs import UnorderedPair
from tricomm.explorer.report.findings import Finding

Pair = tuple[Event, Event]


def pair(pairs: dict[tuple[int, int], int], events: Sequence[Event], first: int, second: int) -> Pair | None:
    """A strong write by the block of event `first` after it, that the block of `second` had read before it."""
    one, other = events[first], events[second]
    for (write, team), read in pairs.items():
        if write >= first and team == other.team and read <= second and events[write].team == one.team:
            return events[write], events[read]
    return None


def race(first: Event, second: Event, clash: UnorderedPair, threads: tuple[str, str], flags: Pair | None) -> Finding:
    """`second` conflicts with `first`, which its thread does not know of."""
    written = second.kind != "load"
    name = "write-after-write" if clash.written and written else "read-after-write"
    name = name if clash.written else "write-after-read"
    mixed = ""
    if (first.sem is None) != (second.sem is None):
        mixed = ", a strong access against a weak one"
    elif first.sem is not None and first.itemsize != second.itemsize:
        mixed = f", strong accesses of different sizes ({first.itemsize} and {second.itemsize} bytes)"
    kind, advice = _missing(first, second, clash, flags)
    place = second.region.label(second.offset) if second.region is not None else "?"
    text = (
        f"{name}{mixed} on {place}: {said(first, threads[0])}; then {said(second, threads[1])}; nothing orders the two"
    )
    return finding(kind, (first, second), text, advice)


def said(event: Event, thread: str = "") -> str:
    """One access, for people."""
    record = event.record()
    return f"{record.who}{thread}: {record.what} of {event.count} x {event.itemsize} bytes ({event.site.text})"


def finding(kind: str, events: Sequence[Event], text: str, advice: str) -> Finding:
    return Finding(
        kind,
        tuple(e.rank for e in events),
        tuple(e.site.where for e in events),
        text,
        advice,
        accesses=tuple(e.record().as_json() for e in events),
    )


def _missing(first: Event, second: Event, clash: UnorderedPair, flags: Pair | None) -> tuple[str, str]:
    if first.sem is not None and second.sem is not None and first.itemsize == second.itemsize:
        return "scope", (
            f"strong accesses meet only if the scopes of both include both: .{first.scope} and .{second.scope} do "
            "not; say scope='sys' for memory that other ranks touch"
        )
    if first.team == second.team:
        return "race", (
            "two threads of one block: put tl.debug_barrier() between the two, or let one thread do both; lanes of a "
            "warp have no order either"
        )
    if flags is None:
        return "race", _flag_needed(first, second, clash)
    write, read = flags
    flag = (
        f"the flag stored at {write.site.short} ({write.sem}, .{write.scope}) and read at {read.site.short} "
        f"({read.sem}, .{read.scope})"
    )
    wrong = []
    if write.sem not in ("release", "acq_rel"):
        wrong.append(f"the store at {write.site.short} is {write.sem}: make it sem='release'")
    if read.sem not in ("acquire", "acq_rel"):
        wrong.append(f"the load at {read.site.short} is {read.sem}: make it sem='acquire'")
    if wrong:
        return "race", f"{flag} would order them, but " + " and ".join(wrong)
    both = includes(SCOPES[write.scope or "gpu"], write.rank, write.team, read.rank, read.team) and includes(
        SCOPES[read.scope or "gpu"], read.rank, read.team, write.rank, write.team
    )
    if not both:
        return "scope", f"{flag} would order them if its scope reached both ranks: say scope='sys' at both ends"
    return "race", (
        f"{flag} orders only the threads that store and read it: a block barrier (tl.debug_barrier()) is needed "
        "between the block's accesses and the release, and between the acquire and the block's accesses"
    )


def _flag_needed(first: Event, second: Event, clash: UnorderedPair) -> str:
    a, b = (f"rank {first.rank}", f"rank {second.rank}")
    if first.rank == second.rank:
        a, b = f"{a}, block {first.block},", f"{b}, block {second.block},"
    if clash.written and second.kind == "load":
        return (
            f"no flag tells {b} that {a} has written: let {a} release one after its store (tl.debug_barrier(), then a "
            f"store with sem='release', scope='sys') and {b} acquire it before its load"
        )
    if clash.written:
        return f"no flag tells {b} that {a} has finished with this memory: let {a} release one that {b} acquires first"
    return (
        f"no flag tells {b} that {a} has read: a trailing barrier would, or two buffers used in turn, so that {b} "
        "writes only after it has acquired a flag that was released after the read"
    )
