"""The text of a race between two threads: the accesses, and the ordering that is missing."""

from __future__ import annotations

from collections.abc import Sequence

from tricomm.explorer.compiled.events import Event
from tricomm.explorer.compiled.thread_clocks import SCOPES, includes
from tricomm.explorer.compiled.thread_epochs import UnorderedPair
from tricomm.explorer.report import diagnosis
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
    """`second` conflicts with `first`, which does not happen before it."""
    words = "a strong access against a weak one", "strong accesses"
    missing = _missing(first, second, clash, flags)
    return diagnosis.unordered(clash.written, first.record(), second.record(), words, missing, threads)


def _missing(first: Event, second: Event, clash: UnorderedPair, flags: Pair | None) -> tuple[str, str]:
    if clash.fence_missing:
        return "race", (
            "they are in order, but one goes by a plain address and the other by a multicast address: put "
            "fence.proxy.alias between the two, such as after the flag that orders them (ALIASES of "
            "tricomm.kernels.primitives.barrier)"
        )
    later = max(first, second, key=lambda event: event.launch)
    if later.dependent and first.rank == second.rank and first.launch != second.launch:
        return "race", (
            f"the kernel at {later.site.short} is a dependent launch, which may begin before earlier kernels of its "
            "stream have ended: put griddepcontrol.wait (tl.extra.cuda.gdc_wait()) before the access, and into each "
            "dependent launch between the two kernels"
        )
    strong = first.sem is not None and second.sem is not None
    if strong and first.itemsize == second.itemsize and _through_switch(first) == _through_switch(second):
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


def _through_switch(event: Event) -> bool:
    return event.instruction is not None and event.instruction.opcode == "multimem"


def _flag_needed(first: Event, second: Event, clash: UnorderedPair) -> str:
    a, b = (f"rank {first.rank}", f"rank {second.rank}")
    if first.rank == second.rank:
        a, b = f"{a}, block {first.block},", f"{b}, block {second.block},"
    return diagnosis.flag_needed(clash.written, second.kind, a, b)
