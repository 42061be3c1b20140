"""The steps of a warp's access: a scheduling point, the access itself, its examination, and the wake-up of pollers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tricomm.explorer.compiled.events import Elements, in_shared_memory, locate, values_at
from tricomm.explorer.compiled.race_checks import Maker
from tricomm.explorer.compiled.thread_clocks import SCOPES, Array
from tricomm.explorer.compiled.thread_detector import ThreadDetector
from tricomm.explorer.compiled.weak_memory import LateStore, WeakMemory, words_of
from tricomm.explorer.memory_model.regions import Memory, OutOfBounds, Region, present
from tricomm.explorer.ptx.access import ThreadAccess
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.schedule.contention import Contention
from tricomm.explorer.schedule.scheduler import Scheduler
from tricomm.explorer.schedule.tasks import Poll, State, Task
from tricomm.kernels.launch.memory_access import Access

_PATIENCE = 64  # rounds of a loop of weak loads, which may not be a poll
_ABORTED = 300  # rounds after an abort: a compiled kernel reads the abort word in one of 256
_ACQUIRES = ("acquire", "acq_rel")


@dataclass(eq=False)
class Crew:
    """The warps of one running block. `waited`: the block is past its wait for earlier launches. `signalled`: it lets
    later launches begin (`Launches`)."""

    maker: Maker
    shared_memory: Region
    tasks: list[Task] = field(default_factory=list)
    waiting: dict[Task, Callable[[], bool]] = field(default_factory=dict)
    waited: bool = False
    signalled: bool = False


class UnitMachine:
    """Performs the accesses of an execution's compiled kernels. `detector`, `weak` and `contention` may be None. With a
    seed, a warp is parked at a random load of its polling loop, so that polled words may change between any two
    loads."""

    def __init__(
        self, memory: Memory, detector: ThreadDetector | None, weak: WeakMemory | None, contention: Contention | None,
        patience: int = 1, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._random = None if seed is None else Random(seed)
        self.memory, self.detector, self.weak, self.contention = memory, detector, weak, contention
        self.scheduler: Scheduler
        self._patience = patience

    # Accesses

    def access(self, task: Task, crew: Crew, access: ThreadAccess) -> None:
        if not len(access.addresses):
            access.perform(None)
            return
        self.scheduler.turns += 1
        if access.space == "shared":
            self._within_block(crew, access)
            if access.kind in ("rmw", "cas", "red"):
                self.poke(crew)
            return
        assert task.launch is not None
        places = locate(access, self.memory, task.launch.private, task.rank)
        if isinstance(places, int):
            self._outside(task, crew, access, places)
        elif places[0].region.kind == "control":
            access.perform(None)
            if access.writes:
                self.scheduler.wake_if_aborted(places[0].region.rank, self.memory)
        elif places[0].region.kind == "private":
            self._private(task, crew, access, places)
        elif access.kind == "load" and all(_constant(place, access.itemsize) for place in places):
            access.perform(None)
        else:
            self._shared(task, crew, access, places)

    def fence(self, task: Task, crew: Crew, sem: str, scope: str, threads: Array, instruction: Instruction) -> None:
        if self.weak is not None and sem != "alias":  # an alias fence alone orders nothing
            for held in self.weak.fenced(task, crew.maker, SCOPES[scope]):
                self._arrive(held)
            self.weak.synchronised(task)
        if self.detector is not None:
            self.detector.fence(crew.maker, threads, sem, scope)

    def barrier(self, task: Task, crew: Crew, number: int, threads: Array, instruction: Instruction) -> None:
        if self.detector is not None:
            self.detector.clocks.go_on(crew.maker.team, number, crew.maker.team.slots[threads])
        if self.weak is not None:
            self.weak.synchronised(task)

    def arrive(self, task: Task, crew: Crew, number: int, threads: Array, instruction: Instruction) -> None:
        if self.detector is not None:
            team, waits = crew.maker.team, "arrive" not in instruction.modifiers
            self.detector.clocks.arrive(team, number, team.slots[threads], waits)
        if self.weak is not None:
            self.weak.met(task)
        self.poke(crew)

    def warp_barrier(self, task: Task, crew: Crew, threads: Array, instruction: Instruction) -> None:
        if self.detector is not None:
            self.detector.clocks.meet(crew.maker.team, crew.maker.team.slots[threads])
        if self.weak is not None:
            self.weak.met(task)
            self.weak.synchronised(task)

    def wait(self, task: Task, crew: Crew, until: Callable[[], bool], instruction: Instruction) -> None:
        self.scheduler.turns += 1
        if until():
            return
        task.waits = crew.maker.site(instruction)
        while not until():
            crew.waiting[task] = until
            self.scheduler.park()
        crew.waiting.pop(task, None)
        task.waits = None

    def leave(self, crew: Crew, threads: Array) -> None:
        """Threads of a warp have ended."""
        if self.detector is not None:
            self.detector.clocks.leave(crew.maker.team, crew.maker.team.slots[threads])
        self.poke(crew)

    def poke(self, crew: Crew) -> bool:
        """The state of the block has changed: wake the warps whose condition is now true."""
        woken = False
        for task, until in list(crew.waiting.items()):
            if task.state is State.PARKED and until():
                del crew.waiting[task]
                task.state = State.READY
                woken = True
        return woken

    def release_held(self, now: bool = False) -> bool:
        """Perform the late stores that are due; `now`: all of them."""
        due = self.weak.due(self.scheduler.step, now) if self.weak is not None else []
        for held in due:
            self._arrive(held)
        return bool(due)

    # Inside

    def _private(self, task: Task, crew: Crew, access: ThreadAccess, places: list[Elements]) -> None:
        """An access to memory of one rank, in which only blocks of this rank can wait for each other."""
        if access.sem is not None:
            task.sync = True
            self.scheduler.take_turns()
        before = _before(task, access, places)
        old, changed = self._perform(access, places)
        if self.detector is not None:
            self.detector.access(crew.maker, access, places, changed)
        writes = access.writes and (changed is None or bool(changed.any()))
        if not (writes and self._wrote(task, access, places, before, old)) and access.sem and old is not None:
            self._looked(task, crew, access, places, old)

    def _within_block(self, crew: Crew, access: ThreadAccess) -> None:
        if self.detector is None:
            access.perform(None)
            return
        places, changed = in_shared_memory(access, crew.shared_memory), None
        inside = int(access.addresses.max()) + access.width <= crew.shared_memory.nbytes
        before = values_at(access, places) if access.kind == "store" and inside else None
        access.perform(None)
        if before is not None:
            changed = (before != values_at(access, places)).any(axis=1)
        self.detector.access(crew.maker, access, places, changed)

    def _shared(self, task: Task, crew: Crew, access: ThreadAccess, places: list[Elements]) -> None:
        task.sync = access.sem is not None and (
            self.contention is None or self.contention.contested(task, places, access.itemsize)  # type: ignore[arg-type]
        )
        self.scheduler.take_turns()
        weak = self.weak
        if weak is not None:
            late = weak.late(task, crew.maker, access, places, self.scheduler.step)
            for held in weak.before(task, crew.maker, access, places, late is not None):
                self._arrive(held)
            if late is not None:
                self._hold(task, crew, access, places, *late)
                return
        before = _before(task, access, places)
        old, changed, messages = None, None, None
        if weak is not None and access.kind == "load":
            old, messages = self._early(task, access, places)
        if messages is None:
            old, changed = self._perform(access, places)
        if self.detector is not None:
            self.detector.access(crew.maker, access, places, changed, messages)
        if weak is not None:
            for place in places:
                weak.looked(task, place, access.itemsize)
            if access.sem in _ACQUIRES:
                weak.synchronised(task)
            for held in weak.read_before(access, places):
                self._arrive(held)
        writes = access.writes and (changed is None or bool(changed.any()))
        if self.contention is not None:
            site = crew.maker.site(access.instruction)
            strong = writes or access.sem in ("release", "acq_rel")
            seen = b"" if old is None else old.tobytes()
            self.contention.done(task, places, strong, site, seen, access.itemsize)  # type: ignore[arg-type]
        if not (writes and self._wrote(task, access, places, before, old)) and old is not None:
            self._looked(task, crew, access, places, old)

    def _wrote(
        self, task: Task, access: ThreadAccess, places: list[Elements], before: Array | None, old: Array | None
    ) -> bool:
        """False if the write has changed no value, because a polling loop may store or exchange in each round."""
        before = old if access.op == "exch" else before
        if before is None or not np.array_equal(before.reshape(len(access.threads), -1), values_at(access, places)):
            task.changed_memory()
            self.scheduler.wrote(_addresses(places, access))
            return True
        if access.kind == "store":
            task.stored_the_same(access.instruction.line, _addresses(places, access))
        return False

    def _perform(self, access: ThreadAccess, places: list[Elements]) -> tuple[Array | None, Array | None]:
        """Perform the access. Returns the values read (uint8 [lanes, width]) and, for a read-modify-write, the lanes
        that have changed a value."""
        if access.writes and self.weak is not None and places[0].region.shared:
            for place in places:
                self._note_overwritten(place, access)
        if access.kind == "red":
            before = values_at(access, places)
            access.perform(None)
            return None, (before != values_at(access, places)).any(axis=1)
        old = access.perform(None)
        if access.kind in ("rmw", "cas"):
            assert old is not None
            if access.op == "exch":
                return old, np.ones(len(old), bool)
            return old, (old.reshape(len(access.threads), -1) != values_at(access, places)).any(axis=1)
        return old, None

    def _note_overwritten(self, place: Elements, access: ThreadAccess) -> None:
        assert self.weak is not None and self.detector is not None
        messages = self.detector.messages(place, access.itemsize)
        self.weak.overwritten(place, access.itemsize, place.bytes(access.itemsize), messages)

    def _early(
        self, task: Task, access: ThreadAccess, places: list[Elements]
    ) -> tuple[Array | None, list[Array] | None]:
        assert self.weak is not None and self.detector is not None
        if access.supply is None:
            return None, None
        pasts = [self.weak.early(task, access, place) for place in places]
        if not any(pasts):
            return None, None
        values, messages = values_at(access, places).reshape(len(access.threads), access.elements, -1), []
        for place, past in zip(places, pasts, strict=True):
            now = self.detector.messages(place, access.itemsize)
            if past is not None:
                chosen, old, old_messages = past
                values[place.lanes[chosen], place.numbers[chosen]] = old[chosen]
                now = np.where(chosen, old_messages, now)
            messages.append(now)
        flat = values.reshape(len(access.threads), -1)
        access.supply(flat)
        return flat, messages

    def _hold(
        self, task: Task, crew: Crew, access: ThreadAccess, places: list[Elements], chosen: list[Array], until: int
    ) -> None:
        assert self.weak is not None and self.detector is not None
        stamp = self.detector.stamp(crew.maker, access, places)
        before = [place.bytes(access.itemsize) for place in places]
        past = [self.detector.messages(place, access.itemsize) for place in places]
        access.perform(None)
        for place, late, old, messages in zip(places, chosen, before, past, strict=True):
            here, later = place.some(~late), place.some(late)
            values = later.bytes(access.itemsize)
            later.put(access.itemsize, old[late])
            if len(here.offsets):
                self.weak.overwritten(here, access.itemsize, old[~late], messages[~late])
                self.detector.arrived(crew.maker, access, [here], stamp)
                self.scheduler.wrote(_addresses([here], access))
            if len(later.offsets):
                words = words_of(later, access.itemsize)
                self.weak.add(LateStore(task, crew.maker, access, later, values, stamp, until, words))
            self.weak.looked(task, place, access.itemsize)
        task.forget_polls()

    def _arrive(self, held: LateStore) -> None:
        assert self.weak is not None and self.detector is not None
        self._note_overwritten(held.elements, held.access)
        held.elements.put(held.access.itemsize, held.values)
        for task in self.weak.behind(held):
            self.weak.looked(task, held.elements, held.access.itemsize)
        self.detector.arrived(held.maker, held.access, [held.elements], held.stamp)
        self.scheduler.wrote(_addresses([held.elements], held.access))

    # Polls

    def _looked(self, task: Task, crew: Crew, access: ThreadAccess, places: list[Elements], old: Array) -> None:
        """Park a warp whose loop sees no new value, unless another warp of its block sees one in the same loop."""
        values = old.reshape(len(access.threads), access.elements, -1)
        seen = np.concatenate([values[place.lanes, place.numbers] for place in places])
        addresses = _addresses(places, access)
        look = Access(access.kind, np.zeros(0, bool), addresses, access.itemsize, access.sem, access.scope, _nothing)
        site = crew.maker.site(access.instruction)
        rounds = self._patience if access.sem is not None else _PATIENCE
        if task.rank in self.scheduler.aborted:
            rounds = _ABORTED
        if task.note_read(look, site, seen, rounds) and not self._news(task, crew):
            if self._random is not None and len(task.loop()) > 1 and self._random.random() < 0.5:
                return
            if self.contention is not None:
                self.contention.parked(task)
            self.scheduler.park()

    def _news(self, task: Task, crew: Crew) -> bool:
        """True if memory that the warps of this loop poll has changed since they last read it."""
        mine = task.loop()
        sites = {poll.site for poll in mine}
        polls = list(mine)
        for mate in crew.tasks:
            if mate is not task and mate.repeated and mate.polls[mate.repeated[-1]].site in sites:
                polls += mate.loop() or [mate.polls[mate.repeated[-1]]]
        private = [] if task.launch is None else task.launch.private
        return any(self._changed(poll, private) for poll in polls)

    def _changed(self, poll: Poll, private: list[Region]) -> bool:
        addresses, size = poll.access.addresses, poll.access.itemsize
        places = self.memory.places(addresses, size, private)
        if isinstance(places, int):
            return True
        return present(places, size, len(addresses)) != poll.values

    def _outside(self, task: Task, crew: Crew, access: ThreadAccess, address: int) -> None:
        assert task.launch is not None
        near = self.memory.nearest(address, task.launch.private, task.rank)
        what = "reads" if access.kind == "load" else "writes"
        thread = int(access.threads[int(np.flatnonzero(access.addresses == np.uint64(address))[0])])
        text = (
            f"rank {task.rank}, block {task.block}, thread {thread} {what} {access.width} bytes at {address:#x}: {near}"
        )
        if self.detector is not None:
            self.detector.out_of_bounds(crew.maker, access, text)
        raise OutOfBounds(f"{crew.maker.site(access.instruction).where}: {text}")


def _before(task: Task, access: ThreadAccess, places: list[Elements]) -> Array | None:
    """The values that a store will overwrite, if its task may be in a polling loop."""
    return values_at(access, places) if access.writes and task.repeated else None


def _addresses(places: list[Elements], access: ThreadAccess) -> Array:
    return np.concatenate([place.offsets.astype(np.uint64) + np.uint64(place.region.base) for place in places])


def _constant(place: Elements, itemsize: int) -> bool:
    return place.region.constant(int(place.offsets.min()), int(place.offsets.max()) + itemsize - 1)


def _nothing(lanes: Array | None) -> Array | None:
    return None
