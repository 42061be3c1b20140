"""Random calls of torch.distributed against results that are computed here.

Every kind of call, type and operation, over the default group and overlapping ones, synchronous, asynchronous, and in
callbacks of futures, with random delays at every await on every rank. A call's choices and data follow from its path:
its place in the program, or its parent's path and its place among the parent's children. So all ranks agree on them
whenever and on whichever thread the call is made.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.c10d.bodies.groups import default_group, poisoned, same
from tests.soak.calls import Pairs
from tests.soak.fuzz_calls import KINDS, Turn, manager

OUTSTANDING = 12  # works in flight at a time
DEPTH = 2  # depth of nested callbacks
LIMIT = 60.0  # seconds of a call


class Fuzz:
    """One rank's part of the program."""

    def __init__(self, rank: int, groups: list[tuple[Any, list[int]]], seed: int, callbacks: bool, inject: str) -> None:
        self._rank, self._groups, self._seed, self._inject = rank, groups, seed, inject
        # Callbacks that make calls are attached `late`, after other calls, or `after` the wait.
        self._attach = ("early", "late", "after") if callbacks else ()
        # torch's manager is not thread-safe: it also takes the calls of a group's callbacks.
        self._kinds = [kind for kind in KINDS if not self._attach or kind is not manager]
        self._delays = random.Random(f"{seed} delays of {rank}")
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Any, Pairs]] = []
        self._late: list[tuple[int, Callable[[], None]]] = []
        self.calls: Counter[str] = Counter()
        self.wrong: list[str] = []

    def play(self, calls: int) -> None:
        group, members = self._groups[0]
        for number in itertools.count():
            if number % 50 == 0 and self._all_have(calls):
                break
            choices = random.Random(f"{self._seed} {number}")
            if choices.random() < 0.3:  # otherwise that of another call of the same group, which may be in flight
                group, members = choices.choice(self._groups)
            for due, attach in list(self._late):
                if due <= number:
                    self._late.remove((due, attach))
                    self.pause(0.3)  # on some ranks the call has completed by now
                    attach()
            if self._rank in members and not (self._inject == "skip" and number == 40 and self._rank == 1):
                self._call(group, members, (number,))
            while self._delays.random() < 0.2 or len(self._pending) > OUTSTANDING:
                if not self._wait_for_one():
                    break
            if self.wrong:
                return
        for _, attach in self._late:
            attach()
        while self._wait_for_one():
            pass

    def _all_have(self, calls: int) -> bool:
        """Whether every rank has made `calls`."""
        made = torch.tensor([sum(self.calls.values())])
        dist.all_reduce(made, dist.ReduceOp.MIN)
        return bool(made.item() >= calls)

    def pause(self, often: float = 0.03) -> None:
        chance = self._delays.random()
        if chance < 2 * often:
            time.sleep(self._delays.random() * (0.02 if chance < often else 0.002))

    def _call(self, group: Any, members: list[int], path: tuple[int, ...]) -> None:
        """Make the call of `path`. If it is asynchronous, `play` waits for it."""
        turn = Turn(group, members, members.index(self._rank), path, self._seed)
        kind = turn.choices.choice(self._kinds)
        made = kind(turn)
        name = f"{kind.__name__} {path} of {members}"
        with self._lock:
            self.calls[kind.__name__] += 1
            if self._inject == "wrong" and self._rank == 1 and sum(self.calls.values()) > 30 and made.pairs:
                made.pairs.append((made.pairs[0][0], poisoned((1,))))
        attached = self._attach if made.future and len(path) <= DEPTH else ()
        how = turn.choices.choice(("sync", "async", "async", *attached))
        self.pause(0.2 if how == "late" else 0.03)
        if how == "sync":
            made.start(False)
            self._compare(name, made.pairs)
            return
        work = made.start(True)
        if how == "late" and len(path) == 1:
            due = path[0] + turn.choices.choice((2, 2, 3, 5))
            self._late.append((due, lambda: self._keep(name, self._with_children(work, turn, (name, made.pairs)), [])))
            return
        if how == "after":
            work.wait()
        if how in ("early", "late", "after"):
            self.pause()
            work = self._with_children(work, turn, (name, made.pairs))
        self._keep(name, work, made.pairs)

    def _keep(self, name: str, work: Any, pairs: Pairs) -> None:
        with self._lock:
            self._pending.append((name, work, pairs))

    def _with_children(self, work: Any, turn: Turn, parent: tuple[str, Pairs]) -> Any:
        """The future of a callback that makes calls."""
        children = turn.choices.choice((1, 1, 2, 3))

        def callback(future: Any) -> None:
            future.value()
            self._compare(*parent)
            for child in range(children):
                self.pause()
                self._call(turn.group, turn.members, (*turn.path, child))

        future = work if isinstance(work, torch.futures.Future) else work.get_future()  # the future of a coalesced call
        return future.then(callback)

    def _wait_for_one(self) -> bool:
        with self._lock:
            if not self._pending:
                return False
            name, work, pairs = self._pending.pop(self._delays.randrange(len(self._pending)))
        self.pause()
        if work is not None:
            work.wait()
        self._compare(name, pairs)
        return True

    def _compare(self, name: str, pairs: Pairs) -> None:
        for got, want in pairs:
            if not same(got, want):
                with self._lock:
                    found, right = (x.flatten()[:5].tolist() for x in (got, want))
                    self.wrong.append(f"seed {self._seed}, rank {self._rank}: {name}: {found} instead of {right}")


def body(
    rank: int, world_size: int, tell: Any, url: str, route: str, calls: int, seed: int, callbacks: bool, inject: str
) -> tuple[dict[str, int], list[str]]:
    """A rank's calls by kind, and its wrong results and errors."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = 5.0 if inject else LIMIT
    with default_group(rank, world_size, url, route, timeout=limit):
        everyone = list(range(world_size))
        asked = [everyone, everyone, *(list(pair) for pair in itertools.combinations(everyone, 2))]
        groups = [(dist.new_group(members, timedelta(seconds=limit)), members) for members in asked]
        fuzz = Fuzz(rank, [(dist.group.WORLD, everyone), *groups], seed, callbacks, inject)
        try:
            fuzz.play(calls)
        except Exception as error:
            fuzz.wrong.append(f"seed {seed}, rank {rank}: {type(error).__name__}: {error}")
        return dict(fuzz.calls), fuzz.wrong


def run(
    url: str, route: str, calls: int, seed: int, callbacks: bool = True, world_size: int = 3, inject: str = ""
) -> tuple[Counter[str], list[str]]:
    """The calls of all ranks by kind, and the wrong results and errors. Raises if a rank did not end."""
    per_call = 1.0 if route == "kernels" else 0.2
    made, wrong = Counter[str](), []
    for counted, found in ranks.run(
        world_size, body, url, route, calls, seed, callbacks, inject, timeout=120 + calls * per_call
    ):
        made.update(counted)
        wrong += found
    return made, wrong
