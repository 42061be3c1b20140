"""Finds what the order of accesses does not promise, thread by thread, whatever the schedule made of it.

Two accesses to the same byte conflict if one of them writes. If nothing orders them (`thread_clocks`), they are a race
unless they are morally strong: both strong, of the same bytes, and both scopes include the other's thread (PTX ISA,
8.7 and 8.9.5). A vector access is one access for each element (8.2.2), so a `.v2.b64` may be seen in halves. An atomic
that changes nothing is a read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricomm.explorer.compiled import thread_diagnosis
from tricomm.explorer.compiled.events import Elements, Event, site_of
from tricomm.explorer.compiled.thread_clocks import SCOPES, Array, Clocks, Team
from tricomm.explorer.compiled.thread_shadow import Clash, ThreadShadow, kind_of
from tricomm.explorer.compiled.unused_loads import UnusedLoads
from tricomm.explorer.compiled.word_rule import WordRule
from tricomm.explorer.memory_model import allowed
from tricomm.explorer.memory_model.regions import Region
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import Finding, Record
from tricomm.kernels import layout
from tricomm.ptx.access import ThreadAccess

_MOST = 20
_AT_REST = {layout.ARRIVALS: "arrivals", layout.BUSY: "busy", layout.MESSAGE_ARRIVALS: "message arrivals"}
_SHARED_GRANULE = 4
RELEASES = ("release", "acq_rel")


@dataclass(slots=True)
class Maker:
    """Who makes accesses: the threads `team` of a block of a launch of `kernel`, or host code (block -1)."""

    team: Team
    block: int = -1
    launch: int = 0
    kernel: Any = None

    @property
    def rank(self) -> int:
        return self.team.rank


@dataclass(slots=True)
class Stamp:
    """A store as its threads made it, for when it reaches memory: times, messages and so on of its elements."""

    times: Array
    messages: Array
    word: int
    record: int


class ThreadDetector:
    """The checks of one execution."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.events: list[Event] = [Event.nobodys()]
        self.step = 0
        self.clocks = Clocks()
        self.words = WordRule()
        self.unused = UnusedLoads(self.report)
        self.acting: dict[int, Maker] = {}  # by rank: what makes the host's accesses, if it is a stream's operation
        self._hosts: dict[int, Maker] = {}
        self._meetings: dict[int, list[tuple[Array, Array]]] = {}
        self._shadowed: list[Region] = []
        self._pairs: dict[tuple[int, int], int] = {}  # (a strong write's event, the reader's team): the read's event

    @property
    def records(self) -> list[Record]:
        """The accesses to what ranks share, in order."""
        return [event.record() for event in self.events if event.shared]

    def report(self, finding: Finding) -> None:
        """Keep a finding, unless the same two lines have been found at odds already."""
        if len(self.findings) < _MOST and all(f.key != finding.key for f in self.findings):
            self.findings.append(finding)

    # Host code

    def host(self, rank: int) -> Maker:
        """A rank's host code."""
        if rank not in self._hosts:
            self._hosts[rank] = Maker(self.clocks.team(rank, 1, host=True))
        return self._hosts[rank]

    def met(self, rank: int, step: int, after: bool) -> None:
        """Host code has come to exchange number `step` of the group, or has left it with everybody's answer."""
        team = self.host(rank).team
        if not after:
            self._meetings.setdefault(step, []).append((self.clocks.row(team), self.words.row(rank)))
            return
        for threads, words in self._meetings[step]:
            self.clocks.learn(team, np.zeros(1, np.int64), threads)
            self.words.learn(rank, -1, words)

    # Accesses

    def access(self, maker: Maker, access: ThreadAccess, places: list[Elements], changed: Array | None,
               messages: list[Array] | None = None) -> None:  # fmt: skip
        """An access that has been done. `changed` (bool by lane) says which read-modify-writes changed anything;
        `messages` are those of the words that a load took from the past, by element of each place."""
        record, slots = self._note(maker, access, places), maker.team.slots[access.threads]
        if access.kind == "load":
            for n, place in enumerate(places):
                self._read(maker, access, place, slots, record, None if messages is None else messages[n])
            return
        self.unused.ran(access.instruction, slots, record)
        if access.kind == "store":
            stamp = self._stamp(maker, access, places, slots, record)
            self._stored(maker, access, places, stamp)
            return
        for lane in range(len(slots)):
            alters = changed is None or bool(changed[lane])
            for place in places:
                mine = place.some(place.lanes == lane)
                if len(mine.offsets):
                    self._modify(maker, access, mine, slots, record, alters)

    def stamp(self, maker: Maker, access: ThreadAccess, places: list[Elements]) -> Stamp:
        """A store that its threads have made, and that has not reached memory yet, or not all of it."""
        record, slots = self._note(maker, access, places), maker.team.slots[access.threads]
        self.unused.ran(access.instruction, slots, record)
        return self._stamp(maker, access, places, slots, record)

    def arrived(self, maker: Maker, access: ThreadAccess, places: list[Elements], stamp: Stamp) -> None:
        """Now it does, or some of its elements: those of `places`."""
        self._stored(maker, access, places, stamp)

    def host_access(self, rank: int, write: bool, region: Region, offsets: Array, itemsize: int, site: Site) -> None:
        """Host code, or an operation that it has put on a stream, has read or written shared memory."""
        maker = self.acting.get(rank) or self.host(rank)
        self.events.append(
            Event(self.step, maker.rank, -1, maker.team.number, 0, "store" if write else "load", None, None, site,
                  region, int(offsets[0]), len(offsets), itemsize)
        )  # fmt: skip
        record, shadow = len(self.events) - 1, self._shadow(region)
        pieces, _ = shadow.pieces(offsets, itemsize)
        slots = np.broadcast_to(maker.team.slots[0], pieces.shape)
        times = self.clocks.time[slots]
        if write:
            self._check_write(maker, shadow, pieces, slots, record, kind_of(0, itemsize))
            shadow.note_write(maker.team, pieces, slots, times, record, kind_of(0, itemsize))
        else:
            self._check_read(maker, shadow, pieces, slots, record, kind_of(0, itemsize))
            shadow.plain.note(maker.team, pieces, slots, times, record, kind_of(0, itemsize))

    def messages(self, place: Elements, itemsize: int) -> Array:
        """What the elements carry now, by element."""
        shadow = self._shadow(place.region)
        pieces, _ = shadow.pieces(place.offsets, itemsize)
        found: Array = shadow.message[pieces].reshape(len(place.offsets), -1)[:, 0]
        return found

    def out_of_bounds(self, maker: Maker, access: ThreadAccess, text: str) -> None:
        event = self._event(maker, access, None, 0)
        self.events.append(event)
        self.report(diagnosis.out_of_bounds(event.record(), text))

    def leftovers(self, arenas: list[Region]) -> None:
        """At the end of an execution in which all went well: flags that nobody has read, words not as they were."""
        for region in self._shadowed:
            shadow: ThreadShadow = region.shadow
            for piece in np.flatnonzero(shadow.waiting).tolist():
                event, start = self.events[shadow.record[piece]], piece * shadow.granule
                if allowed.may_stay_unread(event.site) or event.rank == region.rank:
                    continue
                if region.bytes[start : start + shadow.granule].any():
                    self.report(diagnosis.leftover(event.record(), region.label(start)))
                    break
        epochs = []
        for region in arenas:
            words = region.bytes[: layout.HEADERS].view(np.int64)
            epochs.append(int(words[layout.EPOCH]))
            for word, name in _AT_REST.items():
                if words[word]:
                    self.report(diagnosis.dirty_word(region.rank, name, int(words[word])))
        if len(set(epochs)) > 1:
            self.report(diagnosis.epochs_differ(epochs))

    # Inside

    def _event(self, maker: Maker, access: ThreadAccess, place: Elements | None, offset: int) -> Event:
        return Event(
            self.step, maker.rank, maker.block, maker.team.number, maker.launch, access.kind, access.sem, access.scope,
            site_of(access.instruction, maker.kernel.name), None if place is None else place.region, offset,
            len(access.threads) * access.elements, access.itemsize, access.instruction, maker.kernel,
        )  # fmt: skip

    def _note(self, maker: Maker, access: ThreadAccess, places: list[Elements]) -> int:
        self.events.append(self._event(maker, access, places[0], int(places[0].offsets[0])))
        return len(self.events) - 1

    def _shadow(self, region: Region) -> ThreadShadow:
        if region.shadow is None:
            granule = _SHARED_GRANULE if region.kind == "block" else 8
            region.shadow = ThreadShadow(region.nbytes, self.clocks, granule)
            if region.shared:
                self._shadowed.append(region)
        return region.shadow  # type: ignore[no-any-return]

    def _read(self, maker: Maker, access: ThreadAccess, place: Elements, lanes: Array, record: int,
              past: Array | None) -> None:  # fmt: skip
        shadow = self._shadow(place.region)
        pieces, elements = shadow.pieces(place.offsets, access.itemsize)
        slots = lanes[place.lanes[elements]]
        scope = SCOPES[access.scope or "sys"] if access.sem is not None else 0
        kind = kind_of(scope, access.itemsize)
        times = self.clocks.time[slots]
        self._check_read(maker, shadow, pieces, slots, record, kind)
        if access.sem is None:
            if place.region.shared and (shadow.writer[pieces] == 0).any():
                self.report(diagnosis.uninitialised(self.events[record].record()))
            shadow.plain.note(maker.team, pieces, slots, times, record, kind)
            return
        messages = shadow.message[pieces] if past is None else past[elements]
        self._observe(maker, shadow, pieces, slots, messages, access.sem, scope, record)
        if past is None:
            self.words.took(maker.rank, maker.block, shadow, pieces)
        shadow.strong.note(maker.team, pieces, slots, times, record, kind)

    def _observe(self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, messages: Array, sem: str,
                 scope: int, record: int) -> None:  # fmt: skip
        if not messages.any() and not shadow.word[pieces].any():
            return
        self.clocks.observe(maker.team, slots, messages, sem, scope)
        self.words.saw(maker.rank, maker.block, shadow.word[pieces])
        for write in np.unique(shadow.record[pieces]).tolist():
            self._pairs.setdefault((write, maker.team.number), record)

    def _stamp(self, maker: Maker, access: ThreadAccess, places: list[Elements], slots: Array, record: int) -> Stamp:
        times = self.clocks.time[slots]
        messages, word = np.zeros(len(slots), np.int32), 0
        if access.sem is not None:
            scope = SCOPES[access.scope or "sys"]
            word = self.words.vector(maker.rank, maker.block)
            messages[:] = self.clocks.plain(maker.team, scope)
            before = self._own_before(maker, access, places, slots, int(messages[0]))
            alone = range(len(slots)) if access.sem in RELEASES or self.clocks.has_fenced(slots) else before
            for lane in alone:
                messages[lane] = self.clocks.publish(
                    maker.team, int(slots[lane]), access.sem, scope, before.get(lane, ())
                )
        return Stamp(times, messages, word, record)

    def _own_before(self, maker: Maker, access: ThreadAccess, places: list[Elements], slots: Array,
                    plain: int) -> dict[int, list[int]]:  # fmt: skip
        """By lane, the messages of the thread's own last writes to the same words, in which a release goes on (8.8);
        without `plain`, in which none does."""
        found: dict[int, list[int]] = {}
        for place in places:
            shadow = self._shadow(place.region)
            pieces, elements = shadow.pieces(place.offsets, access.itemsize)
            lanes, messages = place.lanes[elements], shadow.message[pieces]
            own = (messages > 0) & (messages != plain) & (shadow.writer[pieces] == slots[lanes])
            for lane, message in zip(lanes[own].tolist(), messages[own].tolist(), strict=True):
                if message not in found.setdefault(lane, []):
                    found[lane].append(message)
        return found

    def _stored(self, maker: Maker, access: ThreadAccess, places: list[Elements], stamp: Stamp) -> None:
        lanes = maker.team.slots[access.threads]
        scope = SCOPES[access.scope or "sys"] if access.sem is not None else 0
        kind = kind_of(scope, access.itemsize)
        site = self.events[stamp.record].site
        words = scope > 0 and allowed.is_ll(site)
        for place in places:
            if self._busy(place, site):
                continue
            shadow = self._shadow(place.region)
            pieces, elements = shadow.pieces(place.offsets, access.itemsize)
            which = place.lanes[elements]
            slots, times = lanes[which], stamp.times[which]
            self._check_write(maker, shadow, pieces, slots, stamp.record, kind)
            copies = self._copies(access, place, pieces, elements, slots, times, stamp.record, kind)
            again = self._again(shadow, pieces, stamp.record) if scope else None
            if words:
                self._overwritten(maker, shadow, pieces, slots, stamp.record, again)
            before = shadow.waiting[pieces]
            shadow.note_write(maker.team, pieces, slots, times, stamp.record, kind)
            if copies is not None:
                shadow.displaced.note(maker.team, pieces[copies], slots[copies], times[copies], stamp.record, kind)
            if scope:
                shadow.message[pieces], shadow.word[pieces] = stamp.messages[which], stamp.word
                shadow.waiting[pieces] = True if again is None else np.where(again, before, True)
                if words and not place.bytes(access.itemsize).any():  # a cleared word is no message
                    shadow.waiting[pieces], shadow.taking[pieces], shadow.cleared[pieces] = False, 0, True

    def _modify(self, maker: Maker, access: ThreadAccess, place: Elements, lanes: Array, record: int,
                alters: bool) -> None:  # fmt: skip
        """One lane's read-modify-write."""
        shadow = self._shadow(place.region)
        pieces, elements = shadow.pieces(place.offsets, access.itemsize)
        slots = lanes[place.lanes[elements]]
        scope, sem = SCOPES[access.scope or "gpu"], access.sem or "relaxed"
        kind = kind_of(scope, access.itemsize)
        times = self.clocks.time[slots]
        self._check_read(maker, shadow, pieces, slots, record, kind)
        messages = shadow.message[pieces].copy()
        self._observe(maker, shadow, pieces, slots, messages, sem, scope, record)
        self.words.took(maker.rank, maker.block, shadow, pieces)
        shadow.strong.note(maker.team, pieces, slots, times, record, kind)
        if not alters and sem not in RELEASES:
            return
        before = [n for n in np.unique(messages).tolist() if n]
        message = self.clocks.publish(maker.team, int(slots[0]), sem, scope, before)
        word = self.words.vector(maker.rank, maker.block)
        if alters:
            self._check_write(maker, shadow, pieces, slots, record, kind)
            shadow.note_write(maker.team, pieces, slots, times, record, kind)
            # A counter's last ticket need not be read by anybody; a signal must be.
            shadow.waiting[pieces] = access.op == "exch"
        shadow.message[pieces], shadow.word[pieces] = message, word

    # Checks

    def _check_read(self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int,
                    kind: int) -> None:  # fmt: skip
        unordered = shadow.unordered_write(maker.team, pieces, slots)
        weak = kind >> 5 == 0
        if unordered.any():
            if weak:
                for at in np.flatnonzero(unordered).tolist():
                    clash = shadow.clash_with_write(pieces, at)
                    self._unless_unused(record, int(slots[at]), clash, record)
            else:
                at = self._misfit(shadow, pieces, slots, unordered, kind)
                if at is not None:
                    self._race(shadow.clash_with_write(pieces, at), int(slots[at]), record)
        if shadow.displaced.used:
            clash = shadow.displaced.late(maker.team, pieces, slots, None if weak else shadow.fits(kind, slots))
            if clash is not None:
                clash.written = True
                self._race(clash, int(slots[clash.at]), record)

    def _check_write(self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int,
                     kind: int) -> None:  # fmt: skip
        unordered = shadow.unordered_write(maker.team, pieces, slots)
        strong = kind >> 5 > 0
        if unordered.any():
            at = self._misfit(shadow, pieces, slots, unordered, kind)
            if at is not None:
                self._race(shadow.clash_with_write(pieces, at), int(slots[at]), record)
        fits = shadow.fits(kind, slots) if strong else None
        if shadow.plain.late(maker.team, pieces, slots) is not None:
            for clash in shadow.plain.all_late(maker.team, pieces, slots):
                self._unless_unused(clash.record, clash.slot, clash, record, int(slots[clash.at]))
        for epochs in (shadow.strong, shadow.displaced):
            clash = epochs.late(maker.team, pieces, slots, fits)
            if clash is not None:
                clash.written = epochs is shadow.displaced
                self._race(clash, int(slots[clash.at]), record)

    def _copies(self, access: ThreadAccess, place: Elements, pieces: Array, elements: Array, slots: Array,
                times: Array, record: int, kind: int) -> Array | None:  # fmt: skip
        """Lanes of one weak store that store to one place: a race, unless they store the same. Then the last lane's
        stands for all, and here are the first ones of each place, which have to be ordered as well."""
        if kind >> 5 or len(pieces) == 1 or (np.diff(pieces) > 0).all():
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
            self._race(Clash(at, int(slots[one]), int(times[one]), record, kind, True), int(slots[at]), record)
        found: Array = np.unique(before[other])
        return found

    def _misfit(self, shadow: ThreadShadow, pieces: Array, slots: Array, unordered: Array, kind: int) -> int | None:
        """The first element whose last write may not meet this access unordered."""
        at = np.flatnonzero(unordered)
        if kind >> 5:
            fits = shadow.fits(kind, slots)(shadow.kind[pieces[at]], shadow.writer[pieces[at]], slots[at])
            at = at[~fits]
        return int(at[0]) if len(at) else None

    def _race(self, clash: Clash, slot: int, record: int) -> None:
        self.report(self._described(clash, slot, record))

    def _described(self, clash: Clash, slot: int, record: int) -> Finding:
        first, second = self.events[clash.record], self.events[record]
        pair = thread_diagnosis.pair(self._pairs, self.events, clash.record, record)
        return thread_diagnosis.race(first, second, clash, (self._thread(clash.slot), self._thread(slot)), pair)

    def _thread(self, slot: int) -> str:
        number = self.clocks.thread[slot]
        return f", thread {number}" if number >= 0 else ""

    def _unless_unused(self, load: int, reader: int, clash: Clash, record: int, slot: int | None = None) -> None:
        """A race with the weak load `load` of thread `reader`, if that thread ever uses what it has loaded."""
        event = self.events[load]
        found = lambda: self._described(clash, reader if slot is None else slot, record)  # noqa: E731
        if event.instruction is None:
            self.report(found())
        else:
            self.unused.judge(event.kernel, event.instruction, reader, load, found)

    def _again(self, shadow: ThreadShadow, pieces: Array, record: int) -> Array:
        """bool per piece: the same instruction of the same block has stored there last, as copies of one lane do."""
        event = self.events[record]
        known: dict[int, bool] = {}
        for number in np.unique(shadow.record[pieces]).tolist():
            other = self.events[number]
            known[number] = other.instruction is event.instruction and other.team == event.team
        if not any(known.values()):
            return np.zeros(len(pieces), bool)
        return np.array([known[n] for n in shadow.record[pieces].tolist()])

    def _overwritten(self, maker: Maker, shadow: ThreadShadow, pieces: Array, slots: Array, record: int,
                     again: Array | None) -> None:  # fmt: skip
        never, early = self.words.lost(maker.rank, maker.block, shadow, pieces)
        for which, unread in ((never, True), (early, False)):
            which = which if again is None else which & ~again
            if which.any():
                first = self.events[shadow.record[pieces[int(np.flatnonzero(which)[0])]]]
                self.report(diagnosis.ll_overwritten(first.record(), self.events[record].record(), unread))
                return
        late = shadow.cleared[pieces] & shadow.unordered_write(maker.team, pieces, slots)
        late = late if again is None else late & ~again
        if late.any():
            first = self.events[shadow.record[pieces[int(np.flatnonzero(late)[0])]]]
            self.report(diagnosis.zero_may_come_late(first.record(), self.events[record].record()))

    def _busy(self, place: Elements, site: Site) -> bool:
        return place.region.kind == "arena" and allowed.is_busy_word(site) and int(place.offsets[0]) == 8 * layout.BUSY
