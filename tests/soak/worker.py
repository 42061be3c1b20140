"""A rank of the soak: a process that makes many groups and causes the faults that it is told to."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import tricomm
from tests.c10d.bodies.groups import same
from tests.soak import groups, growth
from tests.soak.calls import Turn
from tests.soak.groups import Where

AGREE_EVERY = 4  # calls


class Injected(Exception):
    """An exception class of a user."""


class Job(NamedTuple):
    """One round: a group, and a seed for its calls."""

    where: Where
    seed: str
    first_number: int
    every_call: bool = False


@dataclass
class Report:
    """One rank's report of a round. `error`: class, whether it is tricomm's, text, time."""

    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    error: tuple[str, bool, str, float] | None = None
    sample: dict[str, int] = field(default_factory=dict)


class Signals:
    """SIGINT and SIGUSR2 raise only while calls are made; an earlier one is raised at the next call."""

    def __init__(self) -> None:
        self._armed, self._came = False, None
        for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR2, Injected)):
            signal.signal(number, lambda *_, kind=kind: self._raise(kind))

    def _raise(self, kind: type[BaseException]) -> None:
        self._came = kind
        if self._armed:
            raise kind("sent by the soak")

    def check(self) -> None:
        """Python drops an exception that a signal raises in a destructor; this raises it again."""
        if self._came is not None:
            raise self._came("sent by the soak")

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._came, self._armed = None, True
        try:
            yield
        finally:
            self._armed = False


def main(pipe: Connection, log: str) -> None:
    """Play rounds until the pipe ends."""
    import torch._dynamo  # DDP imports it at its first use, and an interrupt in the middle would leave it half imported

    os.setsid()
    torch.set_num_threads(1)
    file = open(log, "a")  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    signals = Signals()
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        if not isinstance(job, Job):  # an order that arrived after its round had ended
            continue
        print(f"round {job.seed}: {job.where}", file=sys.stderr, flush=True)
        report = Round(job, pipe, signals).play()
        report.sample = growth.sample()
        try:
            pipe.send(("end", report))
        except OSError:
            return


class Round:
    def __init__(self, job: Job, pipe: Connection, signals: Signals) -> None:
        self._job, self._pipe, self._signals = job, pipe, signals
        self._report = Report()
        self._choices = random.Random(job.seed)
        self._number = job.first_number
        self._over = False  # as far as this rank knows
        self._orders: list[str] = []

    def play(self) -> Report:
        group = None
        try:
            group = groups.make(self._job.where)
            self._pipe.send(("formed", time.monotonic()))
            with self._signals.armed():
                self._work(group)
        except BaseException as error:
            self._report.error = told(error)
            traceback.print_exc()
        try:
            if group is not None:
                group.close()
        except BaseException as error:
            self._report.error = self._report.error or told(error)
            traceback.print_exc()
        return self._report

    def _work(self, group: Any) -> None:
        if self._job.every_call:
            for call in group.calls:
                self._call(group, call)
        while True:
            for _ in range(AGREE_EVERY):
                self._listen()
                if self._choices.random() < 0.1:
                    self._call(group, None)
                    continue
                call = self._choices.choice(group.calls)
                if call.__name__ != "messages" and "leave" in self._orders:
                    return self._act()
                if call.__name__ not in ("messages", "barrier") and "wrong" in self._orders:
                    self._act()
                    random.Random(self._job.seed).choice(group.wrong_calls())()
                    raise AssertionError("a call that no other rank made ended well")
                self._call(group, call)
            if group.highest(int(self._over)):
                return

    def _act(self) -> None:
        self._orders.clear()
        self._pipe.send(("acted", time.monotonic()))

    def _call(self, group: Any, call: Any) -> None:
        self._signals.check()
        where, name = self._job.where, "sub-group" if call is None else call.__name__
        self._number += 1
        turn = Turn(where.rank, where.world_size, self._number, self._choices)
        pairs = group.part(turn) if call is None else group.run(call, turn)
        self._report.calls[name] += 1
        bad = [(got, want) for got, want in pairs if not same(got, want)]
        if bad:
            got, want = bad[0]
            self._report.wrong.append(
                f"{where.route} {name} number {self._number} rank {where.rank} of {where.world_size}, {got.dtype} "
                f"{tuple(got.shape)}: {got.flatten()[:5].tolist()} instead of {want.flatten()[:5].tolist()}"
            )

    def _listen(self) -> None:
        while self._pipe.poll():
            order = self._pipe.recv()
            if order == "end":
                self._over = True
            else:
                self._orders.append(order)


def told(error: BaseException) -> tuple[str, bool, str, float]:
    named = isinstance(error, tricomm.TricommError)
    return type(error).__name__, named, str(error)[:600], time.monotonic()
