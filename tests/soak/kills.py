"""Ranks are killed at random moments of calls and of shrink; the ranks that are left go on until one is left.

python -m tests.soak.kills 1000 [SEED [groups]]      groups: process groups of torch.distributed
"""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import OWN, SMALL, leftovers, more_than, right

ATTEMPTS = 20


@dataclass
class Kills:
    """`seconds`: from the kill to the first right result on all ranks that are left, of kills that no other followed
    at once; `again`: recoveries that another death made fail."""

    count: int = 0
    again: int = 0
    seconds: list[float] = field(default_factory=list)

    def text(self) -> str:
        median, worst = 1e3 * statistics.median(self.seconds), 1e3 * max(self.seconds)
        return (
            f"{self.count} kills, {self.again} recoveries failed and were repeated; from the kill to the first right "
            f"result of all: median {median:.0f} ms, worst {worst:.0f} ms ({len(self.seconds)} kills)"
        )


def endure(rank, world_size, tell, url):
    """Call, and shrink when a rank is lost, until this rank is alone; the number of shrinks that failed."""
    before, again, turn = leftovers(), 0, 0
    comm = tricomm.init(url, rank, world_size, "cpu", options=tricomm.Options(**SMALL))
    ranks.together(url, rank, range(world_size))
    tell(os.getpid())
    while True:
        try:
            right(comm, turn)
            if not turn:
                tell((comm.world_size, time.monotonic()))
            if comm.world_size == 1:
                break
            turn += 1
        except tricomm.TricommError:
            for attempt in range(ATTEMPTS):
                try:
                    comm, turn = comm.shrink(timeout=20), 0
                    break
                except tricomm.PeerDied:
                    again += 1
                    if attempt == ATTEMPTS - 1:
                        raise
    comm.close()
    del comm
    gc.collect()
    assert more_than(before, *OWN) == {}
    return again


def endure_in_groups(rank, world_size, tell, url):
    """As `endure`, in the default group of `torch.distributed`."""
    again, turn = 0, 0
    with default_group(rank, world_size, url, "kernels"):
        dist.barrier()
        ranks.together(url, rank, range(world_size))
        tell(os.getpid())
        while True:
            try:
                x = torch.arange(8) + dist.get_rank() + turn
                dist.all_reduce(x)
                size = dist.get_world_size()
                assert torch.equal(x, size * (torch.arange(8) + turn) + size * (size - 1) // 2), x
                if not turn:
                    tell((size, time.monotonic()))
                if size == 1:
                    return again
                turn += 1
            except tricomm.TricommError:
                for attempt in range(ATTEMPTS):
                    try:
                        tricomm.shrink(timeout=20)
                        turn = 0
                        break
                    except tricomm.PeerDied:
                        again += 1
                        if attempt == ATTEMPTS - 1:
                            raise


def trial(url: str, world_size: int, choose: random.Random, kills: Kills, body: Callable[..., Any] = endure) -> None:
    """Kill all ranks but one."""
    with ranks.start(world_size, body, url, timeout=60.0) as started:
        pids, left = started.messages(), list(range(world_size))
        while len(left) > 1:
            time.sleep(choose.uniform(0, 0.05))
            victim = choose.choice(left)
            left.remove(victim)
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.monotonic()
            kills.count += 1
            if len(left) > 1 and choose.random() < 0.5:
                time.sleep(choose.uniform(0, 0.06))  # the next one dies in a call, or in shrink
                continue
            kills.seconds.append(max(_first(started, rank, len(left)) for rank in left) - killed)
        outcome = started.results(left)[left[0]]
        assert outcome.error is None and outcome.code is None, outcome
        kills.again += outcome.value


def _first(started: ranks.Ranks, rank: int, world_size: int) -> float:
    """When `rank` had its first right result in a group of that size."""
    while True:
        size, when = started.message(rank)
        if size == world_size:
            return float(when)


def run(count: int, seed: int, body: Callable[..., Any] = endure) -> Kills:
    """At least `count` kills, of groups of 3 and 4 ranks in turn."""
    kills, choose = Kills(), random.Random(seed)
    while kills.count < count:
        with tempfile.TemporaryDirectory() as folder:
            trial(f"file://{folder}/store", choose.choice((3, 4)), choose, kills, body)
    return kills


if __name__ == "__main__":
    number = random.randrange(1 << 32) if len(sys.argv) < 3 else int(sys.argv[2])
    print(f"seed {number}", flush=True)
    print(run(int(sys.argv[1]), number, endure_in_groups if "groups" in sys.argv else endure).text())
