"""Reports races: two conflicting accesses without a happens-before order, and the ordering that is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tricomm.explorer.compiled.events import Elements, Event, site_of
from tricomm.explorer.compiled.thread_clocks import SCOPES, Array, Clocks, both_include, distinct
from tricomm.explorer.compiled.thread_epochs import UnorderedPair
from tricomm.explorer.compiled.thread_shadow import ThreadShadow
from tricomm.explorer.compiled.thread_teams import Team
from tricomm.explorer.compiled.unused_loads import UnusedLoads
from tricomm.explorer.compiled.word_rule import WordRule
from tricomm.explorer.memory_model.access_kinds import scope_of
from tricomm.explorer.memory_model.source_lines import NOWHERE, Site
from tricomm.explorer.ptx.access import ThreadAccess
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.ptx.unit_view import WARP
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import CACHED, FORMAL, REORDERED, Finding


@dataclass(slots=True)
class Maker:
    """The origin of accesses: the threads `team` of a block of a launch of `kernel`, or host code (block -1).
    `dependent`: the launch may begin before the one before it on its `stream` has ended. `caller`: the user's line
    that led to the launch, for kernels that are not the user's."""

    team: Team
    block: int = -1
    launch: int = 0
    kernel: Any = None
    dependent: bool = False
    stream: int | None = None
    caller: Site = NOWHERE

    @property
    def rank(self) -> int:
        return self.team.rank

    def site(self, instruction: Instruction) -> Site:
        return site_of(instruction, self.kernel.name).called_at(self.caller)


class RaceChecks:
    """The race checks of one execution. `pairs`: by the event of a strong write and the team of a reader, the read's
    event."""

    def __init__(self, clocks: Clocks, events: list[Event], words: WordRule, report: Callable[[Finding], None]) -> None:
        self._clocks, self._events, self._words, self._report = clocks, events, words, report
        self._unused = UnusedLoads(report)
        self.pairs: dict[tuple[int, int], int] = {}

    def stored(self, access: ThreadAccess, slots: Array, record: int) -> None:
        """Threads have executed an instruction that writes."""
        self._unused.ran(access.instruction, slots, record)

    def read(self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int, kind: int) -> None:
        team = maker.team
        unordered = shadow.unordered_write(team, pieces, slots, kind)
        weak = scope_of(kind) == 0
        if unordered.any():
            if weak:
                for at in np.flatnonzero(unordered).tolist():
                    clash = shadow.clash_with_write(team, pieces, slots, at)
                    self._unless_unused(record, int(slots[at]), clash, record)
            else:
                first = self._misfit(shadow, pieces, slots, unordered, kind)
                if first is not None:
                    self._race(shadow.clash_with_write(team, pieces, slots, first), int(slots[first]), record)

    def read_over(
        self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int, kind: int
    ) -> None:
        """Check a read against writes that later writes have replaced. An acquire is checked after it has joined the
        release."""
        if shadow.displaced.used:
            fits = shadow.fits(kind, slots) if scope_of(kind) else None
            displaced = shadow.displaced.late(maker.team, pieces, slots, kind, fits)
            if displaced is not None:
                displaced.written = True
                self._race(displaced, int(slots[displaced.at]), record)

    def write(
        self,
        maker: Maker,
        shadow: ThreadShadow,
        pieces: Array,
        slots: Array,
        record: int,
        kind: int,
        equal: Array | None = None,
    ) -> None:
        """Check a write. `equal` (bool per piece): another warp's copy of the lane has stored the same value to the
        piece."""
        team = maker.team
        unordered = shadow.unordered_write(team, pieces, slots, kind)
        if equal is not None:
            unordered &= ~equal
        if unordered.any():
            at = self._misfit(shadow, pieces, slots, unordered, kind)
            if at is not None:
                self._race(shadow.clash_with_write(team, pieces, slots, at), int(slots[at]), record)
        fits = shadow.fits(kind, slots) if scope_of(kind) else None
        if shadow.plain.late(team, pieces, slots, kind) is not None:
            for clash in shadow.plain.all_late(team, pieces, slots, kind):
                self._unless_unused(clash.record, clash.slot, clash, record, int(slots[clash.at]))
        if equal is not None:
            pieces, slots = pieces[~equal], slots[~equal]
        for epochs in (shadow.strong, shadow.displaced):
            late = epochs.late(team, pieces, slots, kind, fits)
            if late is not None:
                late.written = epochs is shadow.displaced
                self._race(late, int(slots[late.at]), record)

    def copies(
        self,
        access: ThreadAccess,
        place: Elements,
        pieces: Array,
        elements: Array,
        slots: Array,
        times: Array,
        record: int,
        kind: int,
    ) -> Array | None:
        """Lanes of one weak store that write to the same place race, unless they store the same value. If they do, the
        last lane's store stands for all of them. Returns the first lane of each such place. Its store must be ordered,
        like the last lane's."""
        if scope_of(kind) or len(pieces) == 1 or (np.diff(pieces) > 0).all():
            return None
        _, first, inverse = np.unique(pieces, return_index=True, return_inverse=True)
        before = first[inverse]
        other = before != np.arange(len(pieces))
        if not other.any():
            return None
        assert access.stored is not None
        values = access.stored().reshape(len(access.threads), access.elements, -1)
        values = values[place.lanes, place.numbers][elements]
        if len(pieces) != len(place.offsets):  # an element has several pieces
            part = np.arange(len(pieces)) % (len(pieces) // len(place.offsets))
            width = values.shape[1] // (int(part.max()) + 1)
            values = values[np.arange(len(pieces))[:, None], part[:, None] * width + np.arange(width)]
        differ = np.flatnonzero(other & (values != values[before]).any(axis=1))
        if len(differ):
            at = int(differ[0])
            one = int(before[at])
            self._race(UnorderedPair(at, int(slots[one]), int(times[one]), record, kind, True), int(slots[at]), record)
        earlier: Array = np.unique(before[other])
        return earlier

    def _misfit(self, shadow: ThreadShadow, pieces: Array, slots: Array, unordered: Array, kind: int) -> int | None:
        """The first element whose last write must be ordered before this access, and is not."""
        at = np.flatnonzero(unordered)
        if scope_of(kind):
            fits = shadow.fits(kind, slots)(shadow.kind[pieces[at]], shadow.writer[pieces[at]], slots[at])
            at = at[~fits]
        return int(at[0]) if len(at) else None

    def _race(self, clash: UnorderedPair, slot: int, record: int) -> None:
        self._report(self._described(clash, slot, record))

    def _described(self, clash: UnorderedPair, slot: int, record: int) -> Finding:
        first, second = self._events[clash.record], self._events[record]
        pair = _flags_between(self.pairs, self._events, clash.record, record)
        finding = _finding(first, second, clash, (self.thread(clash.slot), self.thread(slot)), pair)
        one, other = (int(self._clocks.thread[s]) // WARP for s in (clash.slot, slot))
        if first.team == second.team and one == other >= 0 and first.instruction is not second.instruction:
            return replace(finding, effect=FORMAL)
        if finding.effect == REORDERED and finding.kind == "race" and pair and clash.written:
            write, read = pair
            if read.team == second.team and self._clocks.released_by_launch(write.team, clash.slot, clash.time):
                return replace(finding, effect=CACHED)
        return finding

    def thread(self, slot: int) -> str:
        """The words that name a slot's thread in a finding; empty for host code."""
        number = self._clocks.thread[slot]
        return f", thread {number}" if number >= 0 else ""

    def _unless_unused(
        self, load: int, reader: int, clash: UnorderedPair, record: int, slot: int | None = None
    ) -> None:
        """Report a race with the weak load `load` of thread `reader`, if that thread ever uses the value."""
        self.if_used(load, reader, lambda: self._described(clash, reader if slot is None else slot, record))

    def if_used(self, load: int, reader: int, finding: Callable[[], Finding]) -> None:
        event = self._events[load]
        if event.instruction is None:
            self._report(finding())
        else:
            self._unused.judge(event.kernel, event.instruction, reader, load, finding)

    def again(self, shadow: ThreadShadow, pieces: Array, record: int) -> Array:
        """True for each piece whose last store is a copy of this one: by the same instruction of the same block."""
        event = self._events[record]
        known: dict[int, bool] = {}
        for number in distinct(shadow.record[pieces]):
            other = self._events[number]
            known[number] = other.instruction is event.instruction and other.team == event.team
        if not any(known.values()):
            return np.zeros(len(pieces), bool)
        return np.array([known[n] for n in shadow.record[pieces].tolist()])

    def overwritten(
        self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int, kind: int,
        again: Array | None,
    ) -> None:  # fmt: skip
        never, early = self._words.lost(maker.rank, maker.block, shadow, pieces)
        for which, unread in ((never, True), (early, False)):
            which = which if again is None else which & ~again
            if which.any():
                first = self._events[shadow.record[pieces[int(np.flatnonzero(which)[0])]]]
                self._report(diagnosis.ll_overwritten(first.record(), self._events[record].record(), unread))
                return
        late = shadow.cleared[pieces] & shadow.unordered_write(maker.team, pieces, slots, kind)
        late = late if again is None else late & ~again
        if late.any():
            first = self._events[shadow.record[pieces[int(np.flatnonzero(late)[0])]]]
            self._report(diagnosis.zero_may_come_late(first.record(), self._events[record].record()))

    def read_over_zero(
        self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int, kind: int
    ) -> None:
        """Check a read of a message's slot, which is cleared because its old content could be taken for new."""
        hidden = shadow.unordered_zero(maker.team, pieces, slots, kind)
        if hidden.any():
            first = self._events[shadow.zeroed[3, pieces][hidden][0]]
            self._report(diagnosis.zero_may_be_missed(first.record(), self._events[record].record()))


Pair = tuple[Event, Event]


def _flags_between(pairs: dict[tuple[int, int], int], events: Sequence[Event], first: int, second: int) -> Pair | None:
    """A flag between two events: a strong write, after event `first`, by its block, that the block of event `second`
    has read before `second`. If there is none: a flag that a later launch of the first rank wrote and an earlier launch
    of the second rank read."""
    one, other, by_launch = events[first], events[second], None
    for (write, team), read in pairs.items():
        flag, seen = events[write], events[read]
        if write < first or read > second:
            continue
        if flag.team == one.team and team == other.team:
            return flag, seen
        after = flag.team == one.team or flag.rank == one.rank and flag.launch > one.launch
        before = team == other.team or seen.rank == other.rank and 0 < seen.launch < other.launch
        if after and before and flag.rank != seen.rank:
            by_launch = flag, seen
    return by_launch


def _finding(
    first: Event, second: Event, clash: UnorderedPair, threads: tuple[str, str], flags: Pair | None
) -> Finding:
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
    same_stream = (first.rank, first.stream) == (second.rank, second.stream)
    if later.dependent and same_stream and first.launch != second.launch:
        return "race", (
            f"the kernel at {later.site.short} is a dependent launch, which may begin before earlier kernels of its "
            "stream have ended: put griddepcontrol.wait (tl.extra.cuda.gdc_wait()) before the access, and into each "
            "dependent launch between the two kernels"
        )
    strong = first.sem is not None and second.sem is not None
    if strong and first.itemsize == second.itemsize and _through_switch(first) == _through_switch(second):
        return "scope", (
            f"strong accesses meet only if the scopes of both include both: .{first.scope} at {_at(first)} and "
            f".{second.scope} at {_at(second)} do not; say scope='sys' (.sys) for memory that other ranks touch"
        )
    if first.team == second.team:
        return "race", (
            "two threads of one block: put tl.debug_barrier() between the two, or let one thread do both; lanes of a "
            "warp have no order either"
        )
    if flags is None:
        return "race", diagnosis.flag_needed(clash.written, first.record(), second.record())
    write, read = flags
    flag = diagnosis.flag_of((_at(write), write.sem, write.scope), (_at(read), read.sem, read.scope))
    wrong = []  # the end of a launch is a fence, so between launches a relaxed flag is enough
    if write.sem not in ("release", "acq_rel") and write.team == first.team:
        wrong.append(f"the store at {_at(write)} is {write.sem}: make it sem='release' (.release)")
    if read.sem not in ("acquire", "acq_rel") and read.team == second.team:
        wrong.append(f"the load at {_at(read)} is {read.sem}: make it sem='acquire' (.acquire)")
    if wrong:
        return "race", f"{flag} {diagnosis.WOULD_ORDER}, but " + " and ".join(wrong)
    scopes = SCOPES[write.scope or "gpu"], SCOPES[read.scope or "gpu"]
    if not both_include(scopes, (write.rank, write.team), (read.rank, read.team)):
        return "scope", f"{flag} {diagnosis.TOO_NARROW}"
    return "race", (
        f"{flag} orders only the threads that store and read it: a block barrier (tl.debug_barrier()) is needed "
        "between the block's accesses and the release, and between the acquire and the block's accesses"
    )


def _at(event: Event) -> str:
    """The kernel's line, and the helper function's line if the access is in one."""
    file, line, _ = event.site.chain[0] if event.site.chain else ("", 0, "")
    inner = f"{Path(file).name}:{line}"
    return event.site.short if not file or inner == event.site.short else f"{event.site.short} > {inner}"


def _through_switch(event: Event) -> bool:
    return event.instruction is not None and event.instruction.opcode == "multimem"
