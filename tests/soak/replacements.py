"""Ranks are killed at random moments of calls, of replace and join, and while suspended; new ones take their places.

python -m tests.soak.replacements 1000
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import tricomm
from tests import ranks
from tests.core.bodies.common_bodies import OWN, SMALL, leftovers, more_than, right
from tests.core.bodies.replace_bodies import joined
from tests.soak.kills import ATTEMPTS, Kills

_LIMIT = 120.0  # seconds that a process may live


def serve(rank, world_size, tell, url, place=None, size=0):
    """Call and suspend in turn until told to stop; replace ranks that are lost. The number of failures besides those
    losses. A new process takes `place` first."""
    before, again, turn, comm, attempts = leftovers(), 0, 0, None, ATTEMPTS
    stop = Path(url.removeprefix("file://")).with_name("stop")
    while True:
        try:
            if comm is None and place is None:
                comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
            elif comm is None:
                comm = joined(url, place, size, 20)
            elif turn < 0:
                comm.replace(timeout=20)
            turn = max(turn, 0)
            if comm.suspended:
                comm.resume()
            right(comm, turn)
            if not turn:
                tell((comm.group, time.monotonic()))
                attempts = ATTEMPTS
            if turn % 8 == 5:
                comm.suspend()
                time.sleep(0.005)
            elif int(comm.all_reduce(torch.tensor([stop.exists()], dtype=torch.int32), "min")):
                break
            turn += 1
        except tricomm.TricommError:
            again += turn <= 0
            turn, attempts = -1, attempts - 1
            if not attempts:
                raise
    comm.close()
    del comm
    gc.collect()
    assert more_than(before, *OWN) == {}
    return again


class Trial:
    """One group whose ranks are killed; `lives` are the processes that have its places now, `met` those ranks that had
    a result in the group that is being replaced."""

    def __init__(self, url: str, size: int, choose: random.Random, kills: Kills) -> None:
        self.url, self.size, self.choose, self.kills = url, size, choose, kills
        self.started = [ranks.start(size, serve, url, timeout=_LIMIT)]
        self.lives = [(self.started[0], rank) for rank in range(size)]
        self.group = ""

    def settled(self) -> float:
        """Wait until all ranks have had a result in one new group: when the last one had it."""
        said = {place: self.told(place) for place in range(self.size)}
        while len({group for group, _ in said.values()}) > 1 or said[0][0] == self.group:
            oldest = min(said, key=lambda place: said[place][1])
            said[oldest] = self.told(oldest)
        self.group = said[0][0]
        return max(when for _, when in said.values())

    def told(self, place: int) -> tuple[str, float]:
        started, rank = self.lives[place]
        return started.message(rank)

    def kill(self, place: int) -> None:
        started, rank = self.lives[place]
        os.kill(started.pids[rank], signal.SIGKILL)
        self.kills.count += 1
        new = ranks.start(1, serve, self.url, place, self.size, timeout=_LIMIT)
        self.started.append(new)
        self.lives[place] = new, 0

    def run(self, rounds: int) -> None:
        self.settled()
        for _ in range(rounds):
            time.sleep(self.choose.uniform(0, 0.1))
            survivor, *victims = self.choose.sample(range(self.size), self.size)
            self.kill(victims[0])
            killed, alone = time.monotonic(), True
            while self.choose.random() < 0.4:  # another one dies meanwhile, perhaps the new one
                time.sleep(self.choose.uniform(0, 0.15))
                self.kill(self.choose.choice(victims))
                alone = False
            when = self.settled()
            if alone:
                self.kills.seconds.append(when - killed)
        Path(self.url.removeprefix("file://")).with_name("stop").touch()
        for started, rank in self.lives:
            outcome = started.results([rank])[rank]
            assert outcome.error is None and outcome.code is None, outcome
            self.kills.again += outcome.value

    def end(self) -> None:
        for started in self.started:
            started.__exit__()


def run(count: int, seed: int) -> Kills:
    """At least `count` kills, in groups of 3 and 4 ranks."""
    kills, choose = Kills(), random.Random(seed)
    while kills.count < count:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(f"file://{folder}/store", choose.choice((3, 4)), choose, kills)
            try:
                trial.run(6)
            finally:
                trial.end()
    return kills


if __name__ == "__main__":
    number = random.randrange(1 << 32) if len(sys.argv) < 3 else int(sys.argv[2])
    print(f"seed {number}", flush=True)
    print(run(int(sys.argv[1]), number).text())
