"""The steps of an access: a scheduling point, the access itself, its examination, and the wake-up of pollers."""

from __future__ import annotations

from tricomm.explorer.interpreted.delays import Delays, Held
from tricomm.explorer.interpreted.detector import Detector
from tricomm.explorer.memory_model import allowed, source_lines
from tricomm.explorer.memory_model.regions import Array, Memory, OutOfBounds, Place, present
from tricomm.explorer.memory_model.source_lines import Site
from tricomm.explorer.schedule.contention import Contention
from tricomm.explorer.schedule.scheduler import Scheduler
from tricomm.explorer.schedule.tasks import Task
from tricomm.kernels.launch.memory_access import Access

_PATIENCE = 64  # rounds before a loop of plain loads, or of a kernel after an abort, counts as a poll


class Machine:
    """Performs the accesses of an execution. `detector`, `delays` and `contention` are optional."""

    def __init__(
        self,
        memory: Memory,
        detector: Detector | None,
        delays: Delays | None,
        contention: Contention | None,
        patience: int = 1,
    ) -> None:
        self._patience = patience
        self.memory, self.detector, self.delays, self.contention = memory, detector, delays, contention
        self.scheduler: Scheduler

    def access(self, access: Access) -> None:
        if not len(access.addresses):
            access.perform(None)
            return
        task = self.scheduler.current
        assert task is not None and task.launch is not None
        self.scheduler.turns += 1
        places = self.memory.places(access.addresses, access.itemsize, task.launch.private, task.rank)
        if isinstance(places, int):
            self._outside(task, access, places)
            return
        kind = places[0].region.kind
        if kind == "control":
            self._control(task, access, places[0])
        elif kind == "private":
            self._private(task, access, places)
        elif access.kind == "load" and all(map(_constant, places)):
            access.perform(None)
        else:
            self._shared(task, access, places)

    def barrier(self) -> None:
        task = self.scheduler.current
        if self.detector is not None and task is not None:
            self.detector.barrier(task)

    def compared(self, relation: str, left: Array, right: Array, result: Array) -> None:
        task = self.scheduler.current
        if task is not None and task.last_poll is not None:
            task.last_poll.compared(relation, left, right, result)

    def release_held(self, now: bool = False) -> bool:
        """Perform the delayed stores that are due; `now`: all of them."""
        due = self.delays.due(self.scheduler.step, now) if self.delays is not None else []
        for held in due:
            self._perform_held(held)
        return bool(due)

    def _shared(self, task: Task, access: Access, places: list[Place]) -> None:
        site = _site(task)
        if access.kind == "store" and access.sem is None and allowed.is_ll(site):
            access.sem, access.scope = "relaxed", "sys"
        task.sync = access.sem is not None and (
            self.contention is None or self.contention.contested(task, places, access.itemsize)
        )
        self.scheduler.take_turns()
        if self.delays is not None:
            lanes = self.delays.hold(task, access)
            if lanes is not None:
                self._hold(task, access, places, site, lanes)
                return
            for held in self.delays.before(task, access):
                self._perform_held(held)
        self._perform(task, access, places, site)

    def _perform(self, task: Task, access: Access, places: list[Place], site: Site) -> None:
        count = len(access.addresses)
        before = present(places, access.itemsize, count) if access.writes and task.repeated else None
        old = access.perform(None)
        changed = access.writes
        if access.kind in ("rmw", "cas") and access.op != "XCHG":
            assert old is not None
            changed = present(places, access.itemsize, count) != old.tobytes()
        if self.detector is not None:
            self.detector.access(task, access, places, site, changed)
        if self.contention is not None:
            writes = changed or access.sem in ("release", "acq_rel")
            self.contention.done(task, places, writes, site, b"" if old is None else old.tobytes(), access.itemsize)
        if access.op == "XCHG" and old is not None:
            before = old.tobytes()
        # A polling loop may store or exchange in each round. If that changes nothing, the loop still waits.
        if changed and (before is None or before != present(places, access.itemsize, count)):
            task.changed_memory()
            self.scheduler.wrote(access.addresses)
        elif access.kind == "store":
            task.stored_the_same(site, access.addresses)
        elif old is not None:
            impatient = access.sem is not None and task.rank not in self.scheduler.aborted
            if task.note_read(access, site, old, self._patience if impatient else _PATIENCE) and not self._news(task):
                if self.contention is not None:
                    self.contention.parked(task)
                self.scheduler.park()

    def _news(self, task: Task) -> bool:
        """True if memory that the task polls has changed since its last read."""
        for poll in task.loop():
            places = self.memory.places(poll.access.addresses, poll.access.itemsize, [])
            if (
                isinstance(places, int)
                or present(places, poll.access.itemsize, len(poll.access.addresses)) != poll.values
            ):
                return True
        return False

    def _hold(self, task: Task, access: Access, places: list[Place], site: Site, lanes: Array) -> None:
        assert self.delays is not None
        stamp = self.detector.stamp(task, access, places, site) if self.detector is not None else None
        if not lanes.all():
            access.perform(~lanes)
            self._held_done(task, access, places, ~lanes, stamp)
        self.delays.add(Held(task, access, places, lanes, stamp), self.scheduler.step)
        task.forget_polls()

    def _perform_held(self, held: Held) -> None:
        held.access.perform(held.lanes)
        self._held_done(held.task, held.access, held.places, held.lanes, held.stamp)

    def _held_done(self, task: Task, access: Access, places: list[Place], lanes: Array, stamp: object) -> None:
        if self.detector is not None:
            self.detector.held(stamp, access, [p for p in map(lambda p: _some(p, lanes), places) if len(p.offsets)])
        self.scheduler.wrote(access.addresses[lanes])

    def _private(self, task: Task, access: Access, places: list[Place]) -> None:
        assert task.launch is not None
        access.perform(None)
        if self.detector is not None and len(task.launch.blocks) > 1:
            self.detector.access(task, access, places, _site(task), access.writes)

    def _control(self, task: Task, access: Access, place: Place) -> None:
        access.perform(None)
        if access.writes:
            self.scheduler.wake_if_aborted(place.region.rank, self.memory)

    def _outside(self, task: Task, access: Access, address: int) -> None:
        assert task.launch is not None
        site = _site(task)
        near = self.memory.nearest(address, task.launch.private, task.rank)
        what = "reads" if access.kind == "load" else "writes"
        text = f"rank {task.rank}, block {task.block} {what} {access.itemsize} bytes at {address:#x}: {near}"
        if self.detector is not None:
            self.detector.out_of_bounds(task, access, site, text)
        raise OutOfBounds(f"{site.where}: {text}")


def _constant(place: Place) -> bool:
    return place.region.constant(int(place.offsets.min()), int(place.offsets.max()))


def _site(task: Task) -> Site:
    """The site of the access that is being made."""
    assert task.launch is not None and task.launch.host is not None
    return source_lines.current().called_at(task.launch.host.host_site)


def _some(place: Place, lanes: Array) -> Place:
    """The part of a place that belongs to the chosen lanes."""
    mine = lanes if place.lanes is None else lanes[place.lanes]
    whole = lanes.copy() if place.lanes is None else place.lanes & lanes
    return Place(place.region, place.offsets[mine], whole)
