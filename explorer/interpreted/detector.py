"""Detects data races: conflicting accesses that happens-before does not order, whatever the order in which they ran.

Every access is compared with the last accesses to the same bytes (`shadow`), by its block's vector clock (`clocks`).
Two conflicting accesses that nothing orders are a race, even if this schedule ran them in the intended order.

A strong access (an atomic, a volatile load) needs no order with another strong one of the same size, if the scopes of
both include both. All other conflicting accesses have to be ordered. The release that an acquire reads happens before
the acquire itself, and before other threads of its block from the next block barrier on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tricomm.explorer.memory_model import allowed
from tricomm.explorer.memory_model.access_kinds import PLAIN, RELEASES, kind_of, same_size, scope_of
from tricomm.explorer.memory_model.clocks import ACQUIRES, SEEN, STRICT, Message, Thread, longer
from tricomm.explorer.memory_model.regions import Array, Place, Region
from tricomm.explorer.memory_model.shadow import SCOPES, Clash, Index, LastByKind, Shadow
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.report import diagnosis
from tricomm.explorer.report.findings import MOST_FINDINGS, Finding, Record
from tricomm.explorer.report.rest import free_shadows, left_over, not_at_rest
from tricomm.explorer.schedule.tasks import Launch, Task
from tricomm.kernels.launch.memory_access import Access


@dataclass(slots=True)
class Stamp:
    """The clock and message of a store when it was issued. They count when it reaches memory later."""

    thread: Thread
    record: int
    message: int
    time: int


class Detector:
    """The happens-before checks of one execution of `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.findings: list[Finding] = []
        self.records: list[Record] = []
        self.step = 0
        self._slots = 4 * world_size
        self._threads: dict[tuple[int, int], Thread] = {}
        self._messages: list[Message] = []
        self._ranks = np.zeros(self._slots, np.int32)
        self._meetings: dict[int, list[Array]] = {}
        self._shadowed: list[Region] = []
        for rank in range(world_size):
            self.thread(rank, -1)

    # Vector clocks

    def thread(self, rank: int, block: int) -> Thread:
        """The clock of a block, or of a rank's host code (block -1)."""
        thread = self._threads.get((rank, block))
        if thread is None:
            slot = len(self._threads)
            if slot >= self._slots:
                self._widen()
            self._ranks[slot] = rank
            thread = self._threads[rank, block] = Thread(slot, rank, np.zeros((4, self._slots), np.int32))
        return thread

    def begin(self, launch: Launch) -> None:
        """A launch begins with the clock of its rank's host code, which includes earlier launches."""
        host = self.thread(launch.rank, -1)
        blocks = [self._of(task) for task in launch.blocks]  # may widen the clocks
        known = host.now
        host.tick()
        for block in blocks:
            block.begin(known)

    def end(self, launch: Launch) -> None:
        host = self.thread(launch.rank, -1)
        for task in launch.blocks:
            np.maximum(host.now, self._of(task).finish(), out=host.now)
        host.tick()

    def _of(self, task: Task) -> Thread:
        return self.thread(task.rank, task.block)

    def met(self, rank: int, step: int, after: bool) -> None:
        """Host code has entered exchange number `step` of the group, or (`after`) has left it with the values of all
        ranks."""
        host = self.thread(rank, -1)
        if not after:
            self._meetings.setdefault(step, []).append(host.now.copy())
            host.tick()
        else:
            for known in self._meetings[step]:
                np.maximum(host.now, longer(known, self._slots), out=host.now)

    def barrier(self, task: Task) -> None:
        self._of(task).barrier()

    # Accesses

    def access(self, task: Task, access: Access, places: list[Place], site: Site, changed: bool) -> None:
        """Examine an access that has been made. `changed` is False for a read-modify-write that changed no value."""
        thread = self._of(task)
        record = self._note(task, access, places, site, changed)
        time = _time(thread, access)
        if access.reads:
            for place in places:
                self._read(thread, access, place, record, time)
        if access.writes and (changed or access.sem in RELEASES):
            message = self._message(thread, access, places, site) if access.sem is not None else -1
            for place in places:
                self._write(thread, access, place, record, message, changed, time)

    def stamp(self, task: Task, access: Access, places: list[Place], site: Site) -> Stamp:
        """Stamp an issued store that has not reached memory yet."""
        thread = self._of(task)
        frozen = thread.frozen()
        record = self._note(task, access, places, site, True)
        message = self._message(thread, access, places, site) if access.sem is not None else -1
        return Stamp(frozen, record, message, frozen.time)

    def held(self, stamp: Any, access: Access, places: list[Place]) -> None:
        """The store of `stamp`, or some of its elements, reaches memory."""
        thread = stamp.thread
        if thread.now.shape[1] < self._slots:
            for name in ("now", "birth", "fenced", "pending"):
                setattr(thread, name, longer(getattr(thread, name), self._slots))
        for place in places:
            self._write(thread, access, place, stamp.record, stamp.message, True, stamp.time)

    def host_access(self, rank: int, write: bool, region: Region, offsets: Array, itemsize: int, site: Site) -> None:
        """Host code has read or written shared memory."""
        thread = self.thread(rank, -1)
        nothing = np.zeros(0, bool)
        access = Access("store" if write else "load", nothing, offsets, itemsize, None, None, lambda lanes: None)
        place = Place(region, offsets)
        record = self._record((rank, -1, 0), access, access.kind, site, place)
        if write:
            self._write(thread, access, place, record, -1, True, thread.time)
        else:
            self._read(thread, access, place, record, thread.time)

    def out_of_bounds(self, task: Task, access: Access, site: Site, text: str) -> None:
        record = self._record(_who(task), access, access.kind, site, None)
        self.report(diagnosis.out_of_bounds(self.records[record], text))

    def report(self, finding: Finding) -> None:
        """Keep a finding, unless an earlier one has the same kind and lines."""
        if len(self.findings) < MOST_FINDINGS and all(f.key != finding.key for f in self.findings):
            self.findings.append(finding)

    def leftovers(self, arenas: list[Region]) -> None:
        """At the end of a clean execution: report flags that were never read, and words that are not reset."""
        for finding in left_over(self._shadowed, lambda s: ~s.taken & (s.writer >= 0), self.records.__getitem__):
            self.report(finding)
        for finding in not_at_rest(arenas):
            self.report(finding)

    def close(self) -> None:
        free_shadows(self._shadowed)

    # Inside

    def _note(self, task: Task, access: Access, places: list[Place], site: Site, changed: bool) -> int:
        kind = access.kind if changed or not access.writes else "load"
        return self._record(_who(task), access, kind, site, places[0])

    def _record(self, who: tuple[int, int, int], access: Access, kind: str, site: Site, place: Place | None) -> int:
        """Keep a record of an access by `who`, (rank, block, launch). Its place is None if it is outside of all
        memory."""
        label = "nowhere" if place is None else place.region.label(int(place.offsets[0]))
        owner = -1 if place is None else place.region.rank
        count, itemsize = len(access.addresses), access.itemsize
        self.records.append(
            Record(self.step, *who, kind, access.sem, access.scope, site, label, count, itemsize, owner)
        )
        return len(self.records) - 1

    def _shadow(self, region: Region) -> Shadow:
        if region.shadow is None:
            region.shadow = Shadow(region.nbytes, self._slots)
            self._shadowed.append(region)
        elif region.shadow.slots < self._slots:
            region.shadow.widen(self._slots)
        return region.shadow  # type: ignore[no-any-return]

    def _read(self, thread: Thread, access: Access, place: Place, record: int, time: int) -> None:
        shadow = self._shadow(place.region)
        index = shadow.index(place.offsets, access.itemsize)
        strong = access.sem is not None
        unordered = shadow.unordered_write(index, thread.now[STRICT])
        if unordered.any():
            self._clashed(thread, access, shadow, index, unordered, record)
        if not strong:
            if place.region.shared and (shadow.writer[index] < 0).any():
                self.report(diagnosis.uninitialised(self.records[record]))
        else:
            for number in np.unique(shadow.message[index]).tolist():
                if number >= 0:
                    message = self._fit(self._messages[number])
                    thread.observe(message, access.sem or "", access.scope or "", self.records[record].site)
            shadow.take(index, thread.slot, thread.time)
            if place.region.holds_messages(int(place.offsets[0])):
                self._zero_missed(thread, shadow, index, record)
        self._unordered_among(shadow.displaced, thread, access, shadow, index, record)
        shadow.reads.note(index, thread.slot, time, record, _kind(access))

    def _write(
        self, thread: Thread, access: Access, place: Place, record: int, message: int, changed: bool, time: int
    ) -> None:
        shadow = self._shadow(place.region)
        index = shadow.index(place.offsets, access.itemsize)
        if not changed:  # a read-modify-write that only continues messages
            shadow.message[index] = message
            return
        strong, site = access.sem is not None, self.records[record].site
        unordered = shadow.unordered_write(index, thread.now[STRICT])
        if unordered.any():
            self._clashed(thread, access, shadow, index, unordered, record)
        for earlier in (shadow.displaced, shadow.reads):
            self._unordered_among(earlier, thread, access, shadow, index, record)
        if allowed.is_ll(site):
            self._ll_overwritten(thread, shadow, index, record)
        shadow.note_write(index, thread.slot, time, record, _kind(access))
        if strong:
            shadow.message[index] = message
            # The last value of a counter need not be read; a signal must be.
            shadow.taken[index] = access.kind == "rmw" and access.op != "XCHG"
            if allowed.is_ll(site) and not _any_byte(place, access.itemsize):  # a cleared word is no message
                shadow.taken[index], shadow.taking[index], shadow.cleared[index] = True, 0, True

    def _clashed(
        self, thread: Thread, access: Access, shadow: Shadow, index: Index, unordered: Array, record: int
    ) -> None:
        """The last write is not ordered before this access. It is a race, unless both are strong, have the same size,
        and are in each other's scope."""
        unordered = unordered & self._misfits(thread, access, shadow.kind[index], shadow.writer[index])
        if unordered.any():
            self._race(thread, shadow.clash_with_write(index, unordered), record)

    def _unordered_among(
        self, earlier: LastByKind, thread: Thread, access: Access, shadow: Shadow, index: Index, record: int
    ) -> None:
        misfits = partial(self._misfits, thread, access, slots=slice(self._slots))
        clash = earlier.late(index, thread.now[STRICT][:, None], misfits)
        if clash is not None and access.reads and access.sem in ACQUIRES:
            clash = earlier.late(index, self._told(thread, access, shadow.message[index]), misfits)
        if clash is not None:
            self._race(thread, clash, record)

    def _told(self, thread: Thread, access: Access, messages: Array) -> Array:
        """The clock of an acquire at each granule, joined with the message that it has read: array [slot, granule]."""
        numbers, which = np.unique(messages, return_inverse=True)
        told = [
            thread.told(self._fit(self._messages[n]), access.scope or "") if n >= 0 else thread.now[STRICT]
            for n in numbers.tolist()
        ]
        return np.stack(told, axis=1)[:, which]

    def _misfits(self, thread: Thread, access: Access, kinds: Any, slots: Any) -> Array:
        """True for each earlier conflicting access (of kind `kinds` and thread `slots`) that must be ordered with this
        one."""
        ranks = self._ranks[slots]
        if access.sem is None:
            return np.ones(len(ranks), bool)
        narrow = np.minimum(scope_of(kinds), SCOPES[access.scope or "sys"])  # 0 if one of the two is plain
        apart = (narrow < SCOPES["sys"]) & (ranks != thread.rank) | (narrow < SCOPES["gpu"])
        return apart | np.logical_not(same_size(kinds, access.itemsize))  # type: ignore[no-any-return]

    def _race(self, thread: Thread, clash: Clash, record: int) -> None:
        self.report(diagnosis.race(thread, clash, self.records[clash.record], self.records[record]))

    def _ll_overwritten(self, thread: Thread, shadow: Shadow, index: Index, record: int) -> None:
        """An LL word may be overwritten only after its read, which the reader's next header acknowledges."""
        lost = ~shadow.taken[index]
        early = shadow.taking[index] > thread.now[SEEN][shadow.taker[index]]
        for which, never in ((lost, True), (early & ~lost, False)):
            if which.any():
                clash = shadow.clash_with_write(index, which)
                self.report(diagnosis.ll_overwritten(self.records[clash.record], self.records[record], never))
                return
        late = shadow.cleared[index] & shadow.unordered_write(index, thread.known_to_block)
        if late.any():
            clash = shadow.clash_with_write(index, late)
            self.report(diagnosis.zero_may_come_late(self.records[clash.record], self.records[record]))

    def _zero_missed(self, thread: Thread, shadow: Shadow, index: Index, record: int) -> None:
        """A slot is cleared because its old content could be taken for new: the reader must not find the old
        content."""
        if (hidden := shadow.unordered_zero(index, thread.known_to_block)).any():
            clearing = self.records[shadow.zeroed[2, index][hidden][0]]
            self.report(diagnosis.zero_may_be_missed(clearing, self.records[record]))

    def _message(self, thread: Thread, access: Access, places: list[Place], site: Site) -> int:
        before = None
        if access.kind != "store" and access.op != "XCHG":
            for place in places:
                shadow = self._shadow(place.region)
                numbers = np.unique(shadow.message[shadow.index(place.offsets, access.itemsize)]).tolist()
                before = next((self._fit(self._messages[n]) for n in numbers if n >= 0), before)
        self._messages.append(thread.publish(access.sem or "", access.scope or "", site, before))
        return len(self._messages) - 1

    def _fit(self, message: Message) -> Message:
        if message.any.shape[0] < self._slots:
            message.any, message.seen = longer(message.any, self._slots), longer(message.seen, self._slots)
            for part in message.parts:
                part.strict, part.thread = longer(part.strict, self._slots), longer(part.thread, self._slots)
        return message

    def _widen(self) -> None:
        self._slots *= 2
        self._ranks = longer(self._ranks, self._slots)
        for thread in self._threads.values():
            for name in ("now", "birth", "fenced", "pending"):
                setattr(thread, name, longer(getattr(thread, name), self._slots))


def _time(thread: Thread, access: Access) -> int:
    return int(thread.known_by_release[thread.slot]) if access.sem in RELEASES else thread.time


def _kind(access: Access) -> int:
    return PLAIN if access.sem is None else kind_of(SCOPES[access.scope or "sys"], access.itemsize)


def _who(task: Task) -> tuple[int, int, int]:
    return task.rank, task.block, task.launch.number if task.launch is not None else 0


def _any_byte(place: Place, itemsize: int) -> bool:
    return bool(place.region.bytes[place.offsets[:, None] + np.arange(itemsize)].any())
