"""The ranks of a tuning run: rank 0 broadcasts tasks, all ranks do them, and rank 0 reads the answers.

No rank decides anything by its own clock. Tasks and answers are exchanged through the store of the rendezvous, not by
the kernels under test, because these may be wrong or never return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import cast

from torch.distributed.distributed_c10d import PrefixStore, Store

from tricomm import Communicator, InvalidArgument, PeerDied, PeerStalled, ResourceError, TricommError, env, typed_json
from tricomm.perf.bench import timing
from tricomm.perf.tuner import tuned_calls
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.tuned_calls import TunedCall
from tricomm.policy import tuning_tables
from tricomm.store.records import MessageHeader

OpenGroup = Callable[[int], Communicator]
_EAGER_CALLS, _REPLAYS = 20, 3  # of a sample on a GPU


class RankLost(TricommError):
    """A rank died or did not answer in time; tuning ends, and the samples so far are kept."""


@dataclass(frozen=True)
class TuningTask:
    """The next thing that all ranks do: check, time, use a table, make a new group, end."""

    do: str
    point: Point | None = None
    candidates: tuple[Candidate, ...] = ()
    repeats: int = 0
    table: str = ""


@dataclass(frozen=True)
class TuningAnswer:
    """One rank's result. `values` by candidate: numbers of wrong elements, or times in microseconds. `refused` says, by
    number, why a candidate cannot run. `fault` is set if the candidate of number `at` cost the group."""

    values: tuple[tuple[float, ...], ...] = ()
    refused: dict[int, str] = field(default_factory=dict)
    fault: str = ""
    at: int = 0
    digest: str = ""


class TuningWorker:
    """One rank of a tuning run. `open_group(n)` makes the n-th communicator, because a candidate that hangs costs one.

    A rank waits `timeout` seconds for a task or an answer.
    """

    def __init__(self, store: Store, rank: int, world_size: int, open_group: OpenGroup, timeout: float) -> None:
        self._store, self._rank, self._world_size = PrefixStore("tricomm-tune", store), rank, world_size
        self._open_group, self._timeout = open_group, timedelta(seconds=timeout)
        self._number = self._groups = 0
        self.comm = open_group(0)
        self._sampler = Sampler(self.comm)

    def close(self) -> None:
        self.comm.close()

    def serve(self) -> None:
        """On ranks other than 0: do tasks until the one that says to end.

        Raises `RankLost` if no task comes in time, `RendezvousError` if another rank has written a task.
        """
        while True:
            task = typed_json.decode(self._receive("task", 0), TuningTask)
            self._send("answer", self._do(task))
            self._number += 1
            if task.do == "end":
                return

    def broadcast(self, task: TuningTask) -> list[TuningAnswer]:
        """On rank 0: have all ranks do a task; their answers by rank. Raises as `serve`."""
        self._send("task", task)
        answers = [self._do(task)]
        for rank in range(1, self._world_size):
            answers.append(typed_json.decode(self._receive("answer", rank), TuningAnswer))
        self._number += 1
        return answers

    def _send(self, kind: str, content: TuningTask | TuningAnswer) -> None:
        data = self._header(kind, self._rank).seal(json.dumps(asdict(content)).encode(), env.token())
        self._store.set(self._key(kind, self._rank), cast(str, data))  # declared as str; bytes pass unchanged

    def _receive(self, kind: str, rank: int) -> bytes:
        key = self._key(kind, rank)
        try:
            self._store.wait([key], self._timeout)
            data = bytes(self._store.get(key))
        except RuntimeError as error:  # torch's DistError among them
            raise RankLost(
                f"rank {rank} has sent nothing for {self._timeout.total_seconds():g} s: {str(error).splitlines()[0]}"
            ) from None
        return self._header(kind, rank).open(data, env.token())

    def _header(self, kind: str, rank: int) -> MessageHeader:
        return MessageHeader(rank, self._world_size, self._number, kind)

    def _key(self, kind: str, rank: int) -> str:
        return f"{kind}{self._number}/{rank}"

    def _do(self, task: TuningTask) -> TuningAnswer:
        match task.do:
            case "check" if task.point is not None:
                return self._each(task.point, task, lambda p, c: float(self._sampler.check(p, c)))
            case "time" if task.point is not None:
                return self._each(task.point, task, self._sampler.sample)
            case "table":
                table = tuning_tables.loads(task.table.encode(), "rank 0's table")
                self.comm.use_table(table.rows, table.name)
                return TuningAnswer(digest=table.digest.hex())
            case "renew":
                self.comm.close()
                self._groups += 1
                self.comm = self._open_group(self._groups)
                self._sampler = Sampler(self.comm)
        return TuningAnswer()

    def _each(self, point: Point, task: TuningTask, measure: Callable[[Point, Candidate], float]) -> TuningAnswer:
        """Every candidate once a turn, so that a drift of the machine hits all of them."""
        values: list[list[float]] = [[] for _ in task.candidates]
        refused: dict[int, str] = {}
        for turn in range(task.repeats):
            order = range(len(task.candidates))
            for at in order if turn % 2 == 0 else reversed(order):  # so that no candidate always follows the same one
                if at in refused:
                    continue
                try:
                    values[at].append(measure(point, task.candidates[at]))
                except (InvalidArgument, ResourceError) as error:
                    refused[at] = str(error)
                except (PeerDied, PeerStalled):  # not caused by the candidate, and the run cannot continue
                    raise
                except TricommError as error:
                    return TuningAnswer(fault=f"{type(error).__name__}: {error}", at=at)
        return TuningAnswer(tuple(map(tuple, values)), refused)


class Sampler:
    """Checks the results of a candidate on this rank, and times it.

    By calls of `comm`, whose table is replaced by the candidate's row. All ranks do the same in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._number = 0
        self._point: Point | None = None
        self._call: TunedCall | None = None
        self._graphs: dict[Candidate, tuple[timing.Call, int]] = {}

    def check(self, point: Point, candidate: Candidate) -> int:
        """Wrong elements on this rank, of two calls, because the two use different mailboxes."""
        call, wrong = self._use(point, candidate), 0
        for _ in range(2):
            self._number += 1
            wrong += call.wrong(self._number)
        return wrong

    def sample(self, point: Point, candidate: Candidate) -> float:
        """Microseconds a call, the median of several."""
        if point.mode == "graph" and candidate in self._graphs and point == self._point:
            run, calls = self._graphs[candidate]
        else:
            call = self._use(point, candidate)
            mode = "kernel" if point.mode == "graph" else "eager"  # enough calls that a graph's launch hardly counts
            run, calls = timing.prepare(self._comm, call.run, mode, 1)
            if point.mode == "graph":
                self._graphs[candidate] = run, calls
        iters = 1 if self._comm.simulated else _REPLAYS if point.mode == "graph" else _EAGER_CALLS
        return timing.quantile(timing.timed(self._comm, run, calls, iters), 0.5)

    def _use(self, point: Point, candidate: Candidate) -> TunedCall:
        if point != self._point or self._call is None:
            self._graphs.clear()
            self._call, self._point = tuned_calls.prepared(self._comm, point), point
        self._comm.use_table((candidate.row(point, self._comm.world_size, None),), str(candidate))
        return self._call
