"""Rounds of the soak: make a group, make calls, cause a fault, judge the errors and the resources left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak import faults, growth
from tests.soak.faults import FAULTS, PAUSE, STALL, TIMEOUT, Outcome
from tests.soak.groups import ROUTES, Where
from tests.soak.pool import Pool
from tests.soak.worker import Job, Report

SIZE = 4
FORMING = 60.0  # seconds for a group to be made
SLACK = 5.0  # seconds added to each limit, because the machine is busy
MEMORY = 16 * growth.MEBIBYTE  # bytes that a process may grow by
ENDING = TIMEOUT + 25.0  # seconds for a call, its error and the group's end; more is a hang


@dataclass
class Plan:
    """One round: its group, its ranks (rank -> slot), and the fault with the rank that it strikes."""

    number: int
    route: str
    slots: list[int]
    fault: str | None
    victim: int
    pause: float


class Soak:
    """Rounds of `every` seconds for `seconds`, or `rounds` of them. `problems`: what was wrong, kinds and texts."""

    def __init__(self, folder: Path, seed: int, seconds: float, every: float, rounds: int | None = None) -> None:
        self._folder, self._seed, self._seconds, self._every, self._rounds = folder, seed, seconds, every, rounds
        self._random = random.Random(seed)
        self._samples: dict[int, list[dict[str, int]]] = {}
        self._routes: dict[int, set[str]] = {}
        self._queue: list[tuple[str, str]] = []
        self._warm = True
        self.calls, self.faults = Counter[str](), Counter[str]()
        self.problems: list[tuple[str, str]] = []

    def run(self) -> None:
        """Play rounds until the time is up, then check which resources have grown."""
        began, names = time.monotonic(), set(os.listdir("/dev/shm"))
        with Pool(SIZE, self._folder) as pool:
            for number, route in enumerate(ROUTES):
                self._play(pool, Plan(-1 - number, route, list(range(SIZE)), None, 0, 0.0))
            self._warm, number = False, 0
            while time.monotonic() - began < self._seconds and number != self._rounds:
                number += 1
                self._play(pool, self._plan(number))
        time.sleep(0.5)
        for pid, samples in self._samples.items():
            grown = growth.grown(samples, MEMORY).items()
            self.problems += [("growth", f"process {pid}: {more} more {name}") for name, more in grown if more]
        self.problems += [("name", f"/dev/shm/{name} is an orphan") for name in growth.orphans(names)]

    def _plan(self, number: int) -> Plan:
        """The next fault and route of a shuffled list of all of them. Slots 0 and 1 always take part and are never
        killed, because growth shows in processes that live long."""
        if not self._queue:
            kinds, routes = list(FAULTS), list(ROUTES)
            turn = self._random.randrange(len(routes))
            self._queue = [(kind, routes[(i + turn) % len(routes)]) for i, kind in enumerate(kinds)]
            self._random.shuffle(self._queue)
        kind, route = self._queue.pop()
        slots = [0, 1, 2, 3] if self._random.random() < 0.5 else [0, 1, self._random.choice((2, 3))]
        self._random.shuffle(slots)
        mortal = [rank for rank, slot in enumerate(slots) if slot > 1]
        victim = self._random.choice(mortal if kind == "kill" else range(len(slots)))
        return Plan(number, route, slots, kind, victim, self._every * self._random.uniform(0.3, 0.8))

    def _play(self, pool: Pool, plan: Plan) -> None:
        pool.fill()  # the round before may have lost ranks, and a first round may be slow on a busy machine
        seed = f"{self._seed}:{plan.number}"
        for rank, slot in enumerate(plan.slots):
            path = str(self._folder / f"store-{plan.number}")
            where = Where(plan.route, rank, len(plan.slots), path, TIMEOUT, STALL)
            pool.send(slot, Job(where, seed, (plan.number + 10) * 100_000, self._warm))
        outcome = _Watch(pool, plan, self._every).outcome()
        for rank, report in enumerate(outcome.reports):
            if report is None:
                outcome.codes[rank] = pool.end(plan.slots[rank], 0.0 if outcome.problems else 5.0)
        if not outcome.problems:  # consequences of a hang are not counted again
            outcome.problems = faults.judge(outcome, SLACK)
        self._account(pool, plan, outcome)

    def _account(self, pool: Pool, plan: Plan, outcome: Outcome) -> None:
        for rank, report in enumerate(outcome.reports):
            slot = plan.slots[rank]
            if report is None:
                continue
            self.calls.update(report.calls)
            seen = self._routes.setdefault(pool.pid(slot), set())
            seen.add(plan.route)
            # A process makes some threads once, for the first group of any kind.
            if not self._warm and len(seen) == len(ROUTES):
                self._samples.setdefault(pool.pid(slot), []).append(report.sample)
        self.faults.update(filter(None, [plan.fault]))
        self.problems += outcome.problems
        said = [r.error[0] if r and r.error else "-" for r in outcome.reports]
        print(plan.route, plan.fault or "warm-up", *said, *outcome.problems, flush=True)


class _Watch:
    """The supervisor of one round: causes the fault, receives the reports, and has a limit on every wait."""

    def __init__(self, pool: Pool, plan: Plan, every: float) -> None:
        self._pool, self._plan, self._every = pool, plan, every
        self._outcome = Outcome(plan.route, plan.fault, plan.victim, None, [None] * len(plan.slots))
        self._formed: set[int] = set()
        self._acted: dict[int, float] = {}
        self._over: set[int] = set()

    def outcome(self) -> Outcome:
        plan = self._plan
        if not self._until(lambda: len(self._formed | self._over) == len(plan.slots), FORMING, "make a group"):
            return self._outcome
        if plan.fault is None:
            self._order_end()
        else:
            self._until(lambda: bool(self._over), plan.pause, None)
            if not self._over:
                self._strike(plan.fault)
            if plan.fault == "pause":
                self._until(lambda: bool(self._over), self._every - plan.pause, None)
                self._order_end()
        waits = ENDING + (STALL if plan.fault == "stop" else 0.0)
        self._until(lambda: len(self._over) == len(plan.slots), waits, "end")
        return self._outcome

    def _strike(self, fault: str) -> None:
        numbers = {"kill": signal.SIGKILL, "raise": signal.SIGUSR2, "interrupt": signal.SIGINT}
        if fault in numbers:
            self._tell(numbers[fault])
            self._outcome.at = time.monotonic()
        elif fault == "pause":
            self._tell(signal.SIGSTOP)
            time.sleep(PAUSE)
            self._tell(signal.SIGCONT)
        elif fault == "stop":
            self._tell(signal.SIGSTOP)
            self._outcome.at = time.monotonic()
            others = len(self._plan.slots) - 1
            self._until(lambda: len(self._over) >= others, FAULTS["stop"].within[1] + 10.0, None)
            self._tell(signal.SIGCONT)
        else:
            self._pool.send(self._plan.slots[self._plan.victim], fault)
            self._until(lambda: bool(self._acted or self._over), ENDING, "do what it was told to")
            self._outcome.at = next(iter(self._acted.values()), None)

    def _tell(self, number: int) -> None:
        with suppress(ProcessLookupError):  # its loss is reported elsewhere
            os.kill(self._pool.pid(self._plan.slots[self._plan.victim]), number)

    def _order_end(self) -> None:
        self._pool.send(self._plan.slots[0], "end")

    def _until(self, done: Any, seconds: float, what: str | None) -> bool:
        """Receive messages until `done`; running out of time is a hang, if `what` is given."""
        end = time.monotonic() + seconds
        while not done():
            waiting = [slot for rank, slot in enumerate(self._plan.slots) if rank not in self._over]
            left = end - time.monotonic()
            if not waiting or left <= 0:
                break
            for slot, message in self._pool.receive(waiting, min(left, 0.5)):
                self._take(self._plan.slots.index(slot), message)
        if done() or what is None:
            return bool(done())
        self._hang(what, seconds)
        return False

    def _take(self, rank: int, message: Any) -> None:
        kind, value = message if message is not None else ("end", None)
        if kind == "formed":
            self._formed.add(rank)
        elif kind == "acted":
            self._acted[rank] = value
        else:
            assert value is None or isinstance(value, Report)
            self._outcome.reports[rank] = value
            self._over.add(rank)

    def _hang(self, what: str, seconds: float) -> None:
        """Report a rank that hangs and kill it; a new process takes its slot."""
        if any(kind == "hang" for kind, _ in self._outcome.problems):
            return
        late = [rank for rank in range(len(self._plan.slots)) if rank not in self._over]
        text = f"{self._plan.route}, {self._plan.fault or 'no fault'}: ranks {late} did not {what} in {seconds:.0f} s"
        self._outcome.problems.append(("hang", text))
        for rank in late:
            self._pool.dump(self._plan.slots[rank])
            self._over.add(rank)
