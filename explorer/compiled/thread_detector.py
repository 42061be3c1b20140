"""Detects data races between threads, whatever the order in which the schedule ran the accesses.

Two accesses to the same byte conflict if one of them writes. If nothing orders them (`thread_clocks`), they are a race
unless they are morally strong: both strong, of the same bytes, and both scopes include the other's thread (PTX ISA,
8.7 and 8.9.5). A vector access is one access for each element (8.2.2), so a `.v2.b64` may be seen in halves. An atomic
that changes nothing is a read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tricomm.explorer.compiled.events import Elements, Event
from tricomm.explorer.compiled.race_checks import Maker, RaceChecks
from tricomm.explorer.compiled.thread_clocks import SCOPES, Array, Clocks, distinct
from tricomm.explorer.compiled.thread_shadow import ThreadShadow
from tricomm.explorer.compiled.word_rule import WordRule
from tricomm.explorer.memory_model import allowed
from tricomm.explorer.memory_model.access_kinds import RELEASES, kind_of
from tricomm.explorer.memory_model.regions import Region
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.ptx.access import ThreadAccess
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import MOST_FINDINGS, Finding, Record
from tricomm.explorer.report.rest import free_shadows, left_over, not_at_rest

_SHARED_GRANULE = 4


@dataclass(slots=True)
class MadeStore:
    """The times and messages of a store's elements when it was issued, which count when it reaches memory."""

    times: Array
    messages: Array
    word: int
    record: int


class ThreadDetector:
    """Examines all accesses of one execution."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.events: list[Event] = [Event.nobodys()]
        self.step = 0
        self.clocks = Clocks()
        self.words = WordRule()
        self.checks = RaceChecks(self.clocks, self.events, self.words, self.report)
        # by rank: the stream operation that is running, which makes the host's accesses
        self.acting: dict[int, Maker] = {}
        self._hosts: dict[int, Maker] = {}
        self._meetings: dict[int, list[tuple[Array, Array]]] = {}
        self._shadowed: list[Region] = []

    @property
    def records(self) -> list[Record]:
        """The accesses to shared memory, in order."""
        return [event.record() for event in self.events if event.shared]

    def report(self, finding: Finding) -> None:
        """Keep a finding, unless an earlier one is about the same two lines."""
        if len(self.findings) < MOST_FINDINGS and all(f.key != finding.key for f in self.findings):
            self.findings.append(finding)

    # Host code

    def host(self, rank: int) -> Maker:
        """A rank's host code."""
        if rank not in self._hosts:
            self._hosts[rank] = Maker(self.clocks.team(rank, 1, host=True))
        return self._hosts[rank]

    def met(self, rank: int, step: int, after: bool) -> None:
        """Host code has entered exchange number `step` of the group, or has left it with the values of all ranks."""
        team = self.host(rank).team
        if not after:
            self._meetings.setdefault(step, []).append((self.clocks.row(team), self.words.row(rank)))
            return
        for threads, words in self._meetings[step]:
            self.clocks.learn(team, np.zeros(1, np.int64), threads)
            self.words.learn(rank, -1, words)

    def fence(self, maker: Maker, threads: Array, sem: str, scope: str) -> None:
        """As `Surroundings.fence`."""
        slots = maker.team.slots[threads]
        if sem == "alias":
            self.clocks.fence_aliases(maker.team, slots)
        else:
            self.clocks.fence(maker.team, slots, SCOPES[scope], sem == "sc")

    # Accesses

    def access(
        self,
        maker: Maker,
        access: ThreadAccess,
        places: list[Elements],
        changed: Array | None,
        messages: list[Array] | None = None,
    ) -> None:
        """Examine an access that has been made. `changed` (bool by lane): which atomics, or stores to shared memory,
        have changed a value. `messages`: for a load of past values, the message of each element of each place."""
        record, slots = self._note(maker, access, places), maker.team.slots[access.threads]
        if access.kind == "load":
            for n, place in enumerate(places):
                self._read(maker, access, place, slots, record, None if messages is None else messages[n])
            return
        self.checks.stored(access, slots, record)
        if access.kind == "store":
            stamp = self._stamp(maker, access, places, slots, record)
            self._stored(maker, access, places, stamp, changed)
            return
        for lane in range(len(slots)):
            alters = changed is None or bool(changed[lane])
            for place in places:
                mine = place.some(place.lanes == lane)
                if len(mine.offsets):
                    self._modify(maker, access, mine, slots, record, alters)

    def stamp(self, maker: Maker, access: ThreadAccess, places: list[Elements]) -> MadeStore:
        """Stamp an issued store of which not all has reached memory yet."""
        record, slots = self._note(maker, access, places), maker.team.slots[access.threads]
        self.checks.stored(access, slots, record)
        return self._stamp(maker, access, places, slots, record)

    def arrived(self, maker: Maker, access: ThreadAccess, places: list[Elements], stamp: MadeStore) -> None:
        """The elements `places` of a stamped store reach memory."""
        self._stored(maker, access, places, stamp)

    def host_access(self, rank: int, write: bool, region: Region, offsets: Array, itemsize: int, site: Site) -> None:
        """Host code, or an operation that it has enqueued on a stream, has read or written shared memory."""
        maker = self.acting.get(rank) or self.host(rank)
        self.events.append(
            Event(
                self.step,
                maker.rank,
                -1,
                maker.team.number,
                0,
                "store" if write else "load",
                None,
                None,
                site,
                region,
                int(offsets[0]),
                len(offsets),
                itemsize,
            )
        )
        record, shadow = len(self.events) - 1, self._shadow(region)
        pieces, _ = shadow.pieces(offsets, itemsize)
        slots = np.broadcast_to(maker.team.slots[0], pieces.shape)
        times = self.clocks.time[slots]
        if write:
            self.checks.write(maker, shadow, pieces, slots, record, kind_of(0, itemsize))
            shadow.note_write(maker.team, pieces, slots, times, record, kind_of(0, itemsize))
        else:
            self.checks.read(maker, shadow, pieces, slots, record, kind_of(0, itemsize))
            self.checks.read_over(maker, shadow, pieces, slots, record, kind_of(0, itemsize))
            shadow.plain.note(maker.team, pieces, slots, times, record, kind_of(0, itemsize))

    def messages(self, place: Elements, itemsize: int) -> Array:
        """The messages of the present values of the elements."""
        shadow = self._shadow(place.region)
        pieces, _ = shadow.pieces(place.offsets, itemsize)
        numbers: Array = shadow.message[pieces].reshape(len(place.offsets), -1)[:, 0]
        return numbers

    def out_of_bounds(self, maker: Maker, access: ThreadAccess, text: str) -> None:
        event = self._event(maker, access, None, 0)
        self.events.append(event)
        self.report(diagnosis.out_of_bounds(event.record(), text))

    def leftovers(self, arenas: list[Region]) -> None:
        """At the end of a clean execution: report flags that were never read, and words that are not reset."""
        for finding in left_over(self._shadowed, lambda s: s.waiting, lambda number: self.events[number].record()):
            self.report(finding)
        for finding in not_at_rest(arenas):
            self.report(finding)

    def close(self) -> None:
        free_shadows(self._shadowed)

    # Inside

    def _event(self, maker: Maker, access: ThreadAccess, place: Elements | None, offset: int) -> Event:
        return Event(
            self.step,
            maker.rank,
            maker.block,
            maker.team.number,
            maker.launch,
            access.kind,
            access.sem,
            access.scope,
            maker.site(access.instruction),
            None if place is None else place.region,
            offset,
            len(access.threads) * access.elements,
            access.itemsize,
            access.instruction,
            maker.kernel,
            maker.dependent,
            maker.stream,
        )

    def _note(self, maker: Maker, access: ThreadAccess, places: list[Elements]) -> int:
        self.clocks.switched |= access.multicast
        self.events.append(self._event(maker, access, places[0], int(places[0].offsets[0])))
        return len(self.events) - 1

    def _shadow(self, region: Region) -> ThreadShadow:
        if region.shadow is None:
            granule = _SHARED_GRANULE if region.kind == "block" else 8
            region.shadow = ThreadShadow(region.nbytes, self.clocks, granule)
            self._shadowed.append(region)
        return region.shadow  # type: ignore[no-any-return]

    def _read(
        self, maker: Maker, access: ThreadAccess, place: Elements, lanes: Array, record: int, past: Array | None
    ) -> None:
        shadow = self._shadow(place.region)
        pieces, elements = shadow.pieces(place.offsets, access.itemsize)
        slots = lanes[place.lanes[elements]]
        scope = SCOPES[access.scope or "sys"] if access.sem is not None else 0
        kind = kind_of(scope, access.itemsize, access.multicast)
        times = self.clocks.time[slots]
        self.checks.read(maker, shadow, pieces, slots, record, kind)
        if access.sem is None:
            self.checks.read_over(maker, shadow, pieces, slots, record, kind)
            if place.region.shared and (never := shadow.writer[pieces] == 0).any():
                for slot in np.unique(slots[never]).tolist():
                    self.checks.if_used(record, slot, partial(self._unwritten, record, slot))
            shadow.plain.note(maker.team, pieces, slots, times, record, kind)
            return
        messages = shadow.message[pieces] if past is None else past[elements]
        self._observe(maker, shadow, pieces, slots, messages, access.sem, scope, record)
        self.checks.read_over(maker, shadow, pieces, slots, record, kind)
        if place.region.holds_messages(int(place.offsets[0])):
            self.checks.read_over_zero(maker, shadow, pieces, slots, record, kind)
        if past is None:
            self.words.took(maker.rank, maker.block, shadow, pieces)
        shadow.strong.note(maker.team, pieces, slots, times, record, kind)

    def _unwritten(self, record: int, slot: int) -> Finding:
        return diagnosis.uninitialised(self.events[record].record(), self.checks.thread(slot))

    def _observe(
        self,
        maker: Maker,
        shadow: ThreadShadow,
        pieces: Array,
        slots: Array,
        messages: Array,
        sem: str,
        scope: int,
        record: int,
    ) -> None:
        if not messages.any() and not shadow.word[pieces].any():
            return
        self.clocks.observe(maker.team, slots, messages, sem, scope)
        self.words.saw(maker.rank, maker.block, shadow.word[pieces])
        for write in distinct(shadow.record[pieces]):
            self.checks.pairs.setdefault((write, maker.team.number), record)

    def _stamp(
        self, maker: Maker, access: ThreadAccess, places: list[Elements], slots: Array, record: int
    ) -> MadeStore:
        times = self.clocks.time[slots]
        messages, word = np.zeros(len(slots), np.int32), 0
        if access.sem is not None:
            scope = SCOPES[access.scope or "sys"]
            word = self.words.vector(maker.rank, maker.block)
            messages[:] = self.clocks.plain(maker.team, slots, scope)
            before = self._own_before(maker, access, places, slots, int(messages[0]))
            alone = range(len(slots)) if access.sem in RELEASES or self.clocks.has_fenced(slots) else before
            for lane in alone:
                messages[lane] = self.clocks.publish(
                    maker.team, int(slots[lane]), access.sem, scope, before.get(lane, ())
                )
        return MadeStore(times, messages, word, record)

    def _own_before(
        self, maker: Maker, access: ThreadAccess, places: list[Elements], slots: Array, plain: int
    ) -> dict[int, list[int]]:
        """By lane, the messages of the thread's own last writes to the same words, which a release pattern continues
        (8.8); without the message `plain`, which continues nothing."""
        by_lane: dict[int, list[int]] = {}
        for place in places:
            shadow = self._shadow(place.region)
            pieces, elements = shadow.pieces(place.offsets, access.itemsize)
            lanes, messages = place.lanes[elements], shadow.message[pieces]
            own = (messages > 0) & (messages != plain) & (shadow.writer[pieces] == slots[lanes])
            for lane, message in zip(lanes[own].tolist(), messages[own].tolist(), strict=True):
                if message not in by_lane.setdefault(lane, []):
                    by_lane[lane].append(message)
        return by_lane

    def _stored(
        self, maker: Maker, access: ThreadAccess, places: list[Elements], stamp: MadeStore, changed: Array | None = None
    ) -> None:
        lanes = maker.team.slots[access.threads]
        scope = SCOPES[access.scope or "sys"] if access.sem is not None else 0
        kind = kind_of(scope, access.itemsize, access.multicast)
        site = self.events[stamp.record].site
        words = scope > 0 and allowed.is_ll(site)
        for place in places:
            shadow = self._shadow(place.region)
            pieces, elements = shadow.pieces(place.offsets, access.itemsize)
            which = place.lanes[elements]
            slots, times = lanes[which], stamp.times[which]
            equal = None if changed is None or scope else ~changed[which]
            if equal is not None and equal.any():
                equal &= self.checks.again(shadow, pieces, stamp.record)
            self.checks.write(maker, shadow, pieces, slots, stamp.record, kind, equal)
            copies = self.checks.copies(access, place, pieces, elements, slots, times, stamp.record, kind)
            again = self.checks.again(shadow, pieces, stamp.record) if scope else None
            if words:
                self.checks.overwritten(maker, shadow, pieces, slots, stamp.record, kind, again)
            before = shadow.waiting[pieces]
            shadow.note_write(maker.team, pieces, slots, times, stamp.record, kind, equal)
            if copies is not None:
                shadow.displaced.note(maker.team, pieces[copies], slots[copies], times[copies], stamp.record, kind)
            if scope:
                shadow.message[pieces], shadow.word[pieces] = stamp.messages[which], stamp.word
                signal = words or access.elements == 1  # a vector may tear: it is data, which may stay unread
                shadow.waiting[pieces] = signal if again is None else np.where(again, before, signal)
                if words and not place.bytes(access.itemsize).any():  # a cleared word is no message
                    shadow.waiting[pieces], shadow.taking[pieces], shadow.cleared[pieces] = False, 0, True

    def _modify(
        self, maker: Maker, access: ThreadAccess, place: Elements, lanes: Array, record: int, alters: bool
    ) -> None:
        """One lane's read-modify-write."""
        shadow = self._shadow(place.region)
        pieces, elements = shadow.pieces(place.offsets, access.itemsize)
        slots = lanes[place.lanes[elements]]
        scope, sem = SCOPES[access.scope or "gpu"], access.sem or "relaxed"
        kind = kind_of(scope, access.itemsize, access.multicast)
        times = self.clocks.time[slots]
        self.checks.read(maker, shadow, pieces, slots, record, kind)
        messages = shadow.message[pieces].copy()
        self._observe(maker, shadow, pieces, slots, messages, sem, scope, record)
        self.checks.read_over(maker, shadow, pieces, slots, record, kind)
        self.words.took(maker.rank, maker.block, shadow, pieces)
        shadow.strong.note(maker.team, pieces, slots, times, record, kind)
        if not alters and sem not in RELEASES:
            return
        before = [n for n in np.unique(messages).tolist() if n]
        message = self.clocks.publish(maker.team, int(slots[0]), sem, scope, before)
        word = self.words.vector(maker.rank, maker.block)
        if alters:
            self.checks.write(maker, shadow, pieces, slots, record, kind)
            shadow.note_write(maker.team, pieces, slots, times, record, kind)
            # The last value of a counter need not be read; a signal must be.
            shadow.waiting[pieces] = access.op in ("exch", "cas")
        shadow.message[pieces], shadow.word[pieces] = message, word
