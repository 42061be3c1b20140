"""The ranks of a tuning run: rank 0 asks, all measure, rank 0 reads what they found.

No rank decides anything by its own clock. What is asked and answered crosses the store that the ranks met at, not the
kernels under test: these may be wrong, or never return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import msgspec
from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import Communicator, InvalidArgument, PeerDied, PeerStalled, ResourceError, TricommError, env
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.sampler import Sampler
from tricomm.policy import tuning_tables
from tricomm.store.records import MessageHeader

Open = Callable[[int], Communicator]


class RankLost(TricommError):
    """A rank died, or did not answer in time; tuning ends, and what was measured is kept."""


class Task(msgspec.Struct, frozen=True):
    """What all ranks do next: check, time, take a table, make the group anew, end."""

    do: str
    point: Point | None = None
    candidates: tuple[Candidate, ...] = ()
    repeats: int = 0
    table: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What one rank found. `values` by candidate: wrong elements, or times; `fault` where the group was lost by the
    candidate of number `at`, `refused` why a candidate cannot run (by number)."""

    values: tuple[tuple[float, ...], ...] = ()
    refused: dict[int, str] = {}
    fault: str = ""
    at: int = 0
    digest: str = ""


class Team:
    """One rank of it. `open_group(n)` makes the n-th communicator: a candidate that hangs costs the group its life.

    `patience` is how long, in seconds, anybody waits for a word of another rank.
    """

    def __init__(self, store: Store, rank: int, world_size: int, open_group: Open, patience: float) -> None:
        self._store, self._rank, self._world_size = PrefixStore("tricomm-tune", store), rank, world_size
        self._open, self._patience = open_group, timedelta(seconds=patience)
        self._number = self._groups = 0
        self.comm = open_group(0)
        self._sampler = Sampler(self.comm)

    def close(self) -> None:
        self.comm.close()

    def follow(self) -> None:
        """Be a rank other than 0: do what is asked until the end.

        Raises `RankLost` if nothing is asked in time, `RendezvousError` if what is asked is not from rank 0.
        """
        while True:
            task = msgspec.json.decode(self._get("task", 0), type=Task)
            self._set("answer", self._do(task))
            self._number += 1
            if task.do == "end":
                return

    def ask(self, task: Task) -> list[Answer]:
        """Rank 0: have it done by all; their answers by rank. Raises as `follow`."""
        self._set("task", task)
        answers = [self._do(task)]
        for rank in range(1, self._world_size):
            answers.append(msgspec.json.decode(self._get("answer", rank), type=Answer))
        self._number += 1
        return answers

    def _set(self, what: str, said: Task | Answer) -> None:
        data = self._header(what, self._rank).seal(msgspec.json.encode(said), env.token())
        self._store.set(self._key(what, self._rank), cast(str, data))  # declared as str; bytes go as they are

    def _get(self, what: str, rank: int) -> bytes:
        key = self._key(what, rank)
        try:
            self._store.wait([key], self._patience)
            data = bytes(self._store.get(key))
        except RuntimeError as error:  # torch's DistError among them
            raise RankLost(
                f"rank {rank} has said nothing for {self._patience.total_seconds():g} s: {str(error).splitlines()[0]}"
            ) from None
        return self._header(what, rank).open(data, env.token())

    def _header(self, what: str, rank: int) -> MessageHeader:
        return MessageHeader(rank, self._world_size, self._number, what)

    def _key(self, what: str, rank: int) -> str:
        return f"{what}{self._number}/{rank}"

    def _do(self, task: Task) -> Answer:
        match task.do:
            case "check" if task.point is not None:
                return self._each(task.point, task, lambda p, c: float(self._sampler.check(p, c)))
            case "time" if task.point is not None:
                return self._each(task.point, task, self._sampler.sample)
            case "table":
                found = tuning_tables.loads(task.table.encode(), "rank 0's table")
                self.comm.use_table(found.rows, found.name)
                return Answer(digest=found.digest.hex())
            case "renew":
                self.comm.close()
                self._groups += 1
                self.comm = self._open(self._groups)
                self._sampler = Sampler(self.comm)
        return Answer()

    def _each(self, point: Point, task: Task, measure: Callable[[Point, Candidate], float]) -> Answer:
        """Every candidate once a round, so that a drift of the machine hits all of them."""
        values: list[list[float]] = [[] for _ in task.candidates]
        refused: dict[int, str] = {}
        for turn in range(task.repeats):
            for at in _in_turn(len(task.candidates), turn):
                if at in refused:
                    continue
                try:
                    values[at].append(measure(point, task.candidates[at]))
                except (InvalidArgument, ResourceError) as error:
                    refused[at] = str(error)
                except (PeerDied, PeerStalled):  # no candidate's fault, and nobody to go on with
                    raise
                except TricommError as error:
                    return Answer(fault=f"{type(error).__name__}: {error}", at=at)
        return Answer(tuple(tuple(found) for found in values), refused)


def _in_turn(count: int, turn: int) -> Sequence[int]:
    """Forwards, then backwards: nobody is always measured behind the same one."""
    return range(count) if turn % 2 == 0 else range(count - 1, -1, -1)
