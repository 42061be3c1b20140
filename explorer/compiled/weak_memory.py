"""Stores that reach memory late and loads that read early, as the memory model allows for weak and relaxed accesses.

Late   Later actions of its thread may overtake an element of a store. These may not: an access to the same bytes
       (program order per location, PTX ISA 8.10.5), a release, a fence, a host barrier, the thread's end. Two late
       stores to the same bytes arrive in their order. After a block barrier or a fence of cta scope, no thread of the
       block overtakes the store with an access to the same bytes, a release or a fence (8.9.5, causality order is
       transitive). A fence of gpu scope does the same for all threads of the rank. A release waits for its thread's
       earlier stores, but later loads and stores need not wait for the release (8.8).
Early  An element of a weak, relaxed or volatile load may have the value of an earlier moment. This moment is after the
       thread's last acquire, fence or barrier, and after the thread's last access to the same bytes.

Each element is a separate store or load (8.2.2): another thread may see one half of a `.v2.b64` without the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from tricomm.explorer.compiled.events import Elements
from tricomm.explorer.compiled.race_checks import Maker
from tricomm.explorer.compiled.thread_clocks import CTA, GPU, SYS, Array
from tricomm.explorer.compiled.thread_detector import MadeStore
from tricomm.explorer.memory_model.regions import Region
from tricomm.explorer.ptx.access import ThreadAccess

_OFTEN, _OFTEN_BEHIND, _EARLY = 0.25, 0.5, 0.5
_LONGEST = 40
_KEPT = 128  # writes per region whose old values are kept
MAY_WAIT = (None, "relaxed", "volatile")
_LATE = (*MAY_WAIT, "release")


@dataclass(slots=True, eq=False)
class LateStore:
    """Elements of a store in one region that have not reached memory yet, and their values."""

    task: Any
    maker: Maker
    access: ThreadAccess
    elements: Elements
    values: Array
    stamp: MadeStore
    until: int
    words: frozenset[int]
    reach: int = 0  # CTA, GPU: no thread of this block, or of this rank, overtakes it
    older: list[LateStore] = field(default_factory=list)  # late stores that it must not overtake


@dataclass(slots=True, eq=False)
class Overwritten:
    """The values that a write has overwritten, by element, with their messages."""

    moment: int
    offsets: Array
    itemsize: int
    values: Array
    messages: Array


@dataclass(eq=False)
class Looks:
    """The earliest moments that the loads of one warp may read."""

    floor: int = 0
    # by region: the moment of the warp's last access to each 4 bytes
    at: dict[Region, Array] = field(default_factory=dict)


class WeakMemory:
    """Chooses late stores and early loads. The choices are a function of `seed` and of the order of all accesses."""

    def __init__(self, seed: int) -> None:
        self.moment = 1
        self.held: list[LateStore] = []
        self._random = Random(seed)
        self._past: dict[Region, list[Overwritten]] = {}
        self._looks: dict[Any, Looks] = {}

    # Late stores

    def late(
        self, task: Any, maker: Maker, access: ThreadAccess, places: list[Elements], step: int
    ) -> tuple[list[Array], int] | None:
        """The elements of a store to hold back (bool by element of each place), and the step until which; or None. If
        an older store has not reached some of the bytes yet, only elements with such bytes are held back: then other
        threads can see new values together with even older ones."""
        if access.kind != "store" or access.sem not in _LATE:
            return None
        older = self._older(task, maker, words_in(places, access.itemsize)) if self.held else []
        if self._random.random() >= (_OFTEN_BEHIND if older else _OFTEN):
            return None
        until = step + self._random.randint(1, _LONGEST)
        if older:
            words = frozenset[int]().union(*(held.words for held in older))
            return [_among(place, access.itemsize, words) for place in places], max(until, *(h.until for h in older))
        chosen = []
        for place in places:
            _, copies = np.unique(place.offsets, return_inverse=True)  # copies of one lane are late together
            some = np.array([self._random.random() < 0.5 for _ in range(int(copies.max()) + 1)])
            chosen.append(some[copies])
        if not any(c.any() for c in chosen):
            chosen = [np.ones(len(c), bool) for c in chosen]
        return chosen, until

    def add(self, held: LateStore) -> None:
        held.older = self._older(held.task, held.maker, held.words)
        self.held.append(held)

    def before(
        self, task: Any, maker: Maker, access: ThreadAccess, places: list[Elements], late: bool
    ) -> list[LateStore]:
        """The late stores that must reach memory before `access`. If `access` is `late` itself, only those that it
        releases."""
        if not self.held:
            return []
        if access.writes and access.sem in ("release", "acq_rel"):
            return self._take(lambda h: self._mine(h, task, maker))
        older = [] if late else self._older(task, maker, words_in(places, access.itemsize))
        return self._take(lambda h: h in older) if older else []

    def _older(self, task: Any, maker: Maker, words: frozenset[int]) -> list[LateStore]:
        """This thread's late stores to these words. Its later accesses to the words must not overtake them."""
        return [h for h in self.held if self._mine(h, task, maker) and not h.words.isdisjoint(words)]

    def fenced(self, task: Any, maker: Maker, scope: int = SYS) -> list[LateStore]:
        """The late stores that must reach memory before a fence or the end of a warp. A narrower fence only raises the
        `reach` of late stores."""
        if scope == SYS:
            return self._take(lambda h: self._mine(h, task, maker)) if self.held else []
        for held in self.held:
            if self._mine(held, task, maker):
                held.reach = max(held.reach, scope)
        return []

    def met(self, task: Any) -> None:
        """The warp has arrived at a barrier of its block: raise the `reach` of its late stores."""
        for held in self.held:
            if held.task is task:
                held.reach = max(held.reach, CTA)

    def due(self, step: int, now: bool) -> list[LateStore]:
        return self._take(lambda h: now or h.until <= step) if self.held else []

    def read_before(self, access: ThreadAccess, places: list[Elements]) -> list[LateStore]:
        """Late stores to words that a load has just read without them. Half of them arrive right after this load, so
        that two loads of a flag and its payload can see different states."""
        if not self.held or access.kind != "load":
            return []
        words = words_in(places, access.itemsize)
        return self._take(lambda h: not h.words.isdisjoint(words) and self._random.random() < 0.5)

    def _mine(self, held: LateStore, task: Any, maker: Maker) -> bool:
        return (
            held.task is task
            or (held.reach >= CTA and held.maker.team is maker.team)
            or (held.reach >= GPU and held.maker.rank == maker.rank)
        )

    def _take(self, chosen: Any) -> list[LateStore]:
        """Remove the chosen stores and the older stores that they must not overtake from the late ones, and return
        them."""
        taken: list[LateStore] = []
        for held in reversed(self.held):
            if chosen(held) or any(held in newer.older for newer in taken):
                taken.insert(0, held)
        self.held = [h for h in self.held if h not in taken] if taken else self.held
        return taken

    # Early loads

    def overwritten(self, place: Elements, itemsize: int, values: Array, messages: Array) -> None:
        """Keep the old values of elements that are about to be written."""
        self.moment += 1
        past = self._past.setdefault(place.region, [])
        past.append(Overwritten(self.moment, place.offsets, itemsize, values, messages))
        if len(past) > _KEPT:
            del past[0]

    def synchronised(self, task: Any) -> None:
        """An acquire, a fence or a barrier of the warp: its later loads read no older values."""
        self._of(task).floor = self.moment

    def looked(self, task: Any, place: Elements, itemsize: int) -> None:
        """The warp has accessed these elements: its later loads of them read no older values."""
        self._at(task, place.region)[pieces_of(place, itemsize)] = self.moment

    def behind(self, held: LateStore) -> list[Any]:
        """The warps of the store's `reach`, which may have passed the barrier or fence after it."""
        if held.reach < GPU:
            return list(held.task.mates)
        return [*held.task.mates, *(t for t in self._looks if t.rank == held.task.rank and t not in held.task.mates)]

    def early(self, task: Any, access: ThreadAccess, place: Elements) -> tuple[Array, Array, Array] | None:
        """For a load: which elements read a past value (bool), and the values and messages of all elements; or None."""
        past = self._past.get(place.region)
        if not past or access.sem not in MAY_WAIT or self._random.random() >= _EARLY:
            return None
        floor = self._of(task).floor
        if past[-1].moment <= floor:
            return None
        moment = self._random.randint(floor, self.moment)
        looked = self._at(task, place.region)[pieces_of(place, access.itemsize)]
        seen = looked.reshape(len(place.offsets), -1).max(axis=1)
        willing = np.array([self._random.random() < 0.75 for _ in place.offsets])
        chosen = np.zeros(len(place.offsets), bool)
        values, messages = place.bytes(access.itemsize), np.zeros(len(place.offsets), np.int32)
        for entry in reversed(past):
            if entry.moment <= moment:
                break
            if entry.itemsize != access.itemsize:
                return None
            same = willing & (seen < entry.moment)
            for at in np.flatnonzero(same).tolist():
                where = np.flatnonzero(entry.offsets == place.offsets[at])
                if len(where):
                    values[at], messages[at], chosen[at] = entry.values[where[0]], entry.messages[where[0]], True
        return (chosen, values, messages) if chosen.any() else None

    def _of(self, task: Any) -> Looks:
        looks = self._looks.get(task)
        if looks is None:
            looks = self._looks[task] = Looks(self.moment)
        return looks

    def _at(self, task: Any, region: Region) -> Array:
        looks = self._of(task)
        moments = looks.at.get(region)
        if moments is None:
            moments = looks.at[region] = np.zeros(-(-region.nbytes // 4), np.int32)
        return moments


def pieces_of(place: Elements, itemsize: int) -> Array:
    """The numbers of the 4-byte pieces that the elements consist of."""
    each = max(1, itemsize // 4)
    if each == 1:
        return place.offsets // 4
    return (place.offsets[:, None] // 4 + np.arange(each)).reshape(-1)


def _among(place: Elements, itemsize: int, words: frozenset[int]) -> Array:
    """True for each element of which one of `words` (as from `words_of`) is a part."""
    alone = (place.some(np.arange(len(place.offsets)) == at) for at in range(len(place.offsets)))
    return np.array([not words.isdisjoint(words_of(one, itemsize)) for one in alone], bool)


def words_in(places: list[Elements], itemsize: int) -> frozenset[int]:
    """The words of all `places`, as `words_of`."""
    return frozenset[int]().union(*(words_of(place, itemsize) for place in places))


def words_of(place: Elements, itemsize: int) -> frozenset[int]:
    """The 4-byte words of the elements, by numbers that are unique across all memory."""
    return frozenset((pieces_of(place, itemsize) + place.region.base // 4).tolist())
