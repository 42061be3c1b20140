"""Rank 0 of a tuning run: it searches, broadcasts what to measure, and writes the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm import InvalidArgument
from tricomm.kernels.collectives import registry
from tricomm.perf import provenance, row_calls
from tricomm.perf.cost_model import kernel_time, machines
from tricomm.perf.cost_model.machines import MACHINES, MachineSpec
from tricomm.perf.history import database
from tricomm.perf.tuner import tuned_tables
from tricomm.perf.tuner.points import Candidate, Point, TuningRequest, pool
from tricomm.perf.tuner.sample_log import Round, SampleLog
from tricomm.perf.tuner.search import Decision, search
from tricomm.perf.tuner.successive_halving import BudgetExceeded
from tricomm.perf.tuner.worker import RankLost, TuningAnswer, TuningTask, TuningWorker
from tricomm.policy import row_shapes, tuning_tables, user_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import TunedTable

_STEP = 0.5  # most seconds for one task; between two tasks rank 0 checks the clock
_RESERVE = 0.05  # of the budget, for the decisions and the table


class Coordinator:
    """Searches within the request's budget. Emits `note`, `round` and at last `result`."""

    def __init__(self, emit: Callable[..., None], worker: TuningWorker, request: TuningRequest) -> None:
        self._emit, self._worker = emit, worker
        comm = worker.comm
        self._cpu, self._world_size = comm.simulated, comm.world_size
        self._fingerprint = comm._internal.group.fingerprint
        self._points = request.points(self._cpu)
        self._in_force = {point: _in_force(comm, point) for point in self._points}
        self._site = comm._internal.planner.site
        self._machine = _similar_machine(self._fingerprint.device, self._fingerprint.topology)
        self._end, self._budget_exceeded = request.end - _RESERVE * request.budget, False
        self._times = CheckedTimes(emit, worker, self._left)
        self._reached: set[Point] = set()
        key = request.key(self._fingerprint.digest, tuning_tables.KERNELS, provenance.versions())
        self._log = SampleLog(user_tables.folder() / f"tuning-{self._fingerprint.digest}.jsonl", key)

    def _left(self) -> float:
        """Seconds of the budget; the first round of a run is measured in any case."""
        return self._end - time.monotonic() if self._reached else math.inf

    def run(self) -> None:
        """Search, give all ranks the table, save it, and report what changed. Raises `RankLost`."""
        if self._log.known:
            self._emit("note", text=f"going on from {self._log.file}: {self._log.known} samples are known")
        finished = False
        prior = partial(predicted_us, self._machine, self._world_size)
        try:
            decisions = search(self._points, self._pool, self._in_force.__getitem__, prior, self._measure)
            self._publish(decisions)
            finished = not self._budget_exceeded
            self._worker.broadcast(TuningTask("end"))
        except (RankLost, tricomm.PeerDied, tricomm.PeerStalled) as error:
            raise RankLost(f"{error}. What was measured is kept in {self._log.file}; tune again to go on") from error
        finally:
            self._log.close(finished)

    def _publish(self, decisions: list[Decision]) -> None:
        earlier = user_tables.load(self._fingerprint)
        tuned = tuned_tables.rows(decisions, self._world_size)
        rows = tuned_tables.replaced(earlier.rows if earlier is not None else (), tuned)
        lines = tuned_tables.decision_lines(decisions, len(self._points), self._cpu)
        if not any(d.changed for d in decisions):
            self._emit("result", lines=lines, file=None)
            return
        table = TunedTable(self._fingerprint, rows, database.now(), provenance.versions())
        self._emit("result", lines=lines, file=str(adopt(self._worker, table)))

    def _pool(self, point: Point) -> list[Candidate]:
        known = registry.of(point.collective, self._world_size, multicast=not self._cpu, wire=True)
        kernels = [k for k in known if k.wire in ("", point.wire) and self._runs(point, k)]
        group = self._worker.comm._internal.group
        candidates = pool(kernels, group.layout, group.max_blocks, self._cpu, point.beside)
        return [c for c in candidates if _as_it_is(self._site, point, c)] if point.epilogue else candidates

    def _runs(self, point: Point, kernel: registry.Kernel) -> bool:
        try:
            _explained(self._worker.comm, point, algorithm=kernel.algorithm, protocol=kernel.protocol)
        except InvalidArgument:  # not over these links, or not of this type
            return False
        return not kernel.needs_cube or self._fingerprint.topology == "hybrid_cube_mesh"

    def _measure(self, point: Point, candidates: Sequence[Candidate], repeats: int) -> dict[Candidate, list[float]]:
        candidates = [c for c in candidates if not self._log.wrong(point, c)]
        known = {candidate: self._log.recall(point, candidate, repeats) for candidate in candidates}
        lacking = [candidate for candidate in candidates if len(known[candidate]) < repeats]
        if not lacking:
            return known
        missing = repeats - min(len(known[c]) for c in lacking)
        try:
            times = self._times.times(point, self._times.right(point, lacking), missing)
        except BudgetExceeded:
            self._budget_exceeded = True
            raise
        self._log.append(Round(point, tuple(lacking), tuple(times.get(c) for c in lacking)))
        self._reached.add(point)
        self._emit("round", point=point.name, reached=len(self._reached), points=len(self._points))
        return {c: [*known[c], *times.get(c, ())] for c in candidates if c in times or c not in lacking}


class CheckedTimes:
    """Times candidates on all ranks, if their results are right on all ranks. Emits a `note` for each other candidate.

    Raises `BudgetExceeded` before a step that is not expected to fit into the seconds `left`. After the first step at a
    point, whose cost is unknown, steps are as large as `_STEP` allows.
    """

    def __init__(self, emit: Callable[..., None], worker: TuningWorker, left: Callable[[], float]) -> None:
        self._emit, self._worker, self._left = emit, worker, left
        self._right: set[tuple[Point, Candidate]] = set()
        self._costs: dict[tuple[str, Point], float] = {}  # seconds of a candidate and turn

    def right(self, point: Point, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with right results on every rank, because a broken protocol may be fast."""
        fresh = [c for c in candidates if (point, c) not in self._right]
        while fresh:
            step, _ = self._step("check", point, fresh, 1)
            answers = self._done("check", point, step, 1)
            at = self._fatal_candidate(answers)
            if at is not None:
                self._leave_out(point, fresh.pop(at), next(a.fault for a in answers if a.fault))
                continue
            for number, candidate in enumerate(step):
                trouble = _trouble(answers, number)
                if trouble is None:
                    self._right.add((point, candidate))
                else:
                    self._leave_out(point, candidate, trouble)
            fresh = fresh[len(step) :]
        return [c for c in candidates if (point, c) in self._right]

    def times(self, point: Point, candidates: list[Candidate], repeats: int) -> dict[Candidate, tuple[float, ...]]:
        """The slowest rank's time of every sample; each candidate has one sample per turn."""
        samples: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        while any(len(times) < repeats for times in samples.values()):
            least = min(map(len, samples.values()))
            behind = [candidate for candidate, times in samples.items() if len(times) == least]
            most = repeats - least if len(behind) == len(samples) else 1  # all have equal turns before the next
            step, turns = self._step("time", point, behind, most)
            answers = self._done("time", point, step, turns)
            at = self._fatal_candidate(answers)
            if at is not None:
                self._leave_out(point, step[at], next(a.fault for a in answers if a.fault))
                del samples[step[at]]
                continue
            refused = {at for answer in answers for at in answer.refused}
            for number, candidate in enumerate(step):
                if number in refused:
                    del samples[candidate]
                else:
                    each = zip(*(answer.values[number] for answer in answers), strict=True)
                    samples[candidate] += [max(sample) for sample in each]
        return {candidate: tuple(times) for candidate, times in samples.items()}

    def _step(self, do: str, point: Point, candidates: list[Candidate], turns: int) -> tuple[list[Candidate], int]:
        """The candidates of the next task, the first of these, and its turns. Raises `BudgetExceeded`."""
        cost = self._costs.get((do, point))
        if cost is None:
            count = turns = 1
        else:
            count = max(1, min(len(candidates), int(_STEP / cost)))
            turns = max(1, min(turns, int(_STEP / cost / count))) if count == len(candidates) else 1
        if self._left() < (cost or 0.0) * count * turns:
            raise BudgetExceeded
        return candidates[:count], turns

    def _done(self, do: str, point: Point, step: list[Candidate], turns: int) -> list[TuningAnswer]:
        began = time.monotonic()
        answers = self._worker.broadcast(TuningTask(do, point, tuple(step), turns))
        self._costs[do, point] = max((time.monotonic() - began) / len(step) / turns, 1e-6)
        return answers

    def _leave_out(self, point: Point, candidate: Candidate, reason: str) -> None:
        self._right.discard((point, candidate))
        self._emit("note", text=f"{point.collective} {point.nbytes} B, {candidate}: left out, {reason}")

    def _fatal_candidate(self, answers: Sequence[TuningAnswer]) -> int | None:
        """The number of the candidate whose fault ended the group, if any; then all ranks make a new group."""
        fatal = [answer.at for answer in answers if answer.fault]
        if not fatal:
            return None
        self._worker.broadcast(TuningTask("renew"))
        return min(fatal)  # a rank that had finished this candidate saw the fault in the next one


def adopt(worker: TuningWorker, table: TunedTable) -> Path:
    """Have all ranks use the table, and save it; the file. Raises `RankLost` instead if a rank has another table."""
    for rank, answer in enumerate(worker.broadcast(TuningTask("table", table=tuning_tables.dumps(table).decode()))):
        if answer.digest != table.digest.hex():
            raise RankLost(f"rank {rank} has table {answer.digest[:12]}, rank 0 {table.digest.hex()[:12]}")
    return user_tables.save(table)


def predicted_us(machine: MachineSpec, world_size: int, point: Point, candidate: Candidate) -> float:
    """The cost model's time of a candidate, in microseconds."""
    kernel = registry.find(point.collective, *candidate.family)
    blocks, warps = candidate.blocks, candidate.warps
    launching = kernel_time.launching(machine, machines.is_dependent(machine, world_size, blocks), point.mode)
    return kernel_time.predict(launching, kernel, world_size, point.nbytes, point.mode, blocks, warps).time_us


def _trouble(answers: Sequence[TuningAnswer], at: int) -> str | None:
    """The fault of candidate number `at` on any rank."""
    for rank, answer in enumerate(answers):
        if at in answer.refused:
            return f"rank {rank}: {answer.refused[at]}"
    wrong = sum(answer.values[at][0] for answer in answers)
    return f"{wrong:.0f} wrong elements" if wrong else None


def _in_force(comm: tricomm.Communicator, point: Point) -> Candidate:
    choice = _explained(comm, point)
    if point.epilogue and not choice.fused:
        raise InvalidArgument(f"{point.collective} {point.epilogue}, {point.nbytes} B: {choice.reason}")
    return Candidate(choice.algorithm, choice.protocol, choice.blocks, choice.warps, choice.block, choice.registers)


def _explained(comm: tricomm.Communicator, point: Point, **forced: Any) -> tricomm.Choice:
    form = row_calls.parse(point.epilogue) if point.epilogue else None
    rows: dict[str, Any] = {"hidden": form.hidden, "quantize": form.quantize or None} if form is not None else {}
    dtype = getattr(torch, point.dtype)
    return comm.explain(point.collective, point.nbytes, dtype, mode=point.mode, **forced, **rows)


def _as_it_is(site: SelectionFacts, point: Point, candidate: Candidate) -> bool:
    """Whether such rows are launched with the candidate's shape; if not, another shape would be measured under its
    name."""
    form = row_calls.parse(point.epilogue)
    rows = point.nbytes * 8 // (form.hidden * point.bits)
    if candidate.blocks > rows:
        return False
    tabled = replace(site, tuned=(candidate.row(point, site.world_size, None),))
    facts = (point.collective, point.bits, form.hidden, rows, (None, None), form.quantize, point.mode)
    choice = row_shapes.choose(tabled, *facts)
    shape = (candidate.algorithm, candidate.protocol, candidate.blocks, candidate.warps, candidate.tile)
    return isinstance(choice, tricomm.Choice) and shape == (
        choice.algorithm,
        choice.protocol,
        choice.blocks,
        choice.warps,
        choice.block,
    )


def _similar_machine(device: str, topology: str) -> MachineSpec:
    """The machine that the prior assumes; a wrong one costs time only, because the search corrects it."""
    if topology == "pcie":
        return MACHINES["pcie4"]
    return next((m for m in MACHINES.values() if m.architecture == device), MACHINES["h100"])
