"""Units of the PTX machine that take turns, in an environment that performs every access at once."""

from __future__ import annotations

from collections import deque

import greenlet


class Deadlock(Exception):
    """No unit of the concurrent launches can continue."""


class PassOn:
    """The environment of one unit. `told` has its events, `accesses` its accesses if they are to be kept."""

    def __init__(self, turns: RoundRobin, keeps: bool) -> None:
        self.turns, self.keeps, self.accesses, self.told, self._made = turns, keeps, [], [], 0

    def access(self, access) -> None:
        if self.keeps:
            self.accesses.append(access)
        access.perform(None)
        self._made += 1
        if access.sem is not None or self._made % 16 == 0:
            self.turns.turn()

    def fence(self, sem, scope, threads, instruction) -> None:
        self.told.append(("fence", sem, scope, threads.tolist()))

    def barrier(self, number, threads, instruction) -> None:
        self.told.append(("barrier", number, threads.tolist()))

    def arrive(self, number, threads, instruction) -> None:
        self.told.append(("arrive", number, threads.tolist()))

    def wait(self, until, instruction) -> None:
        self.turns.wait(until)

    def warp_barrier(self, threads, instruction) -> None:
        self.told.append(("warp", threads.tolist()))

    def wait_for_launches(self, threads, instruction) -> None:
        self.told.append(("launches", threads.tolist()))

    def launch_dependents(self) -> None:
        self.told.append(("dependents",))

    def nanotime(self) -> int:
        return 12345


class RoundRobin:
    """Units as greenlets. `around` has their environments."""

    def __init__(self, units, keeps: bool) -> None:
        self.around = [PassOn(self, keeps) for _ in units]
        self._waiting = {}
        self._all = [greenlet.greenlet(lambda u=u, a=a: u(a)) for u, a in zip(units, self.around, strict=True)]
        self._ready = deque(self._all)

    def turn(self) -> None:
        self._ready.append(greenlet.getcurrent())
        self._hub.switch()

    def wait(self, until) -> None:
        if not until():
            self._waiting[greenlet.getcurrent()] = until
            self.turn()

    def run(self) -> None:
        """Run until all units have ended. Raises `Deadlock`, and what a unit raises."""
        self._hub, blocked = greenlet.getcurrent(), 0
        try:
            while self._ready:
                one = self._ready.popleft()
                until = self._waiting.get(one)
                if until is not None and not until():
                    self._ready.append(one)
                    blocked += 1
                    if blocked > len(self._ready):
                        raise Deadlock(f"{len(self._ready)} units wait at barriers that will not open")
                    continue
                self._waiting.pop(one, None)
                blocked = 0
                one.switch()
        finally:
            for one in self._all:
                if not one.dead:
                    one.throw(greenlet.GreenletExit)


def run(launches, keeps: bool = False) -> list[PassOn]:
    """Run all units of all launches in turns, until all have ended; returns their environments."""
    robin = RoundRobin([unit for blocks in launches for block in blocks for unit in block.units], keeps)
    robin.run()
    return robin.around
