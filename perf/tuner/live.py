"""Tuning on real ranks: rank 0 searches, the team measures, everything is on the disk when it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

import tricomm
from tricomm import InvalidArgument, ResourceError
from tricomm.kernels.collectives import registry
from tricomm.perf import provenance
from tricomm.perf.bench.measure import pick_device
from tricomm.perf.cost_model import model
from tricomm.perf.cost_model.machines import MACHINES, Machine
from tricomm.perf.history import database
from tricomm.perf.tuner import result
from tricomm.perf.tuner.points import Candidate, Point, pool
from tricomm.perf.tuner.request import Settings
from tricomm.perf.tuner.search import Decision, search
from tricomm.perf.tuner.state import Heat, Record
from tricomm.perf.tuner.successive_halving import Spent
from tricomm.perf.tuner.team import Answer, RankLost, Task, Team
from tricomm.policy import tuning_tables, user_tables
from tricomm.policy.tuning_tables import TunedTable

Say = Callable[..., None]
_MEETING = 60.0  # seconds for all ranks to come


def tune(say: Say, rank: int, world_size: int, store: Store, settings: Settings) -> None:
    """Be one rank of a tuning run. Rank 0 says `note`, `heat` and at last `result`.

    Raises `ResourceError` where times would be simulated and that was not asked for, or where nothing can be written;
    `RankLost` or the group's own error where a rank ended.
    """
    device = pick_device(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not settings.simulated:
        raise ResourceError(
            "these ranks run on a CPU, whose times are simulated and say nothing about a GPU; --simulated makes a "
            "table of them that no GPU ever uses"
        )
    torch.set_num_threads(1)

    def open_group(number: int) -> tricomm.Communicator:
        options = tricomm.Options(timeout=settings.timeout)
        meeting = PrefixStore(f"tricomm-tune-{number}", store)
        return tricomm.Communicator(meeting, rank, world_size, device, options=options, meeting_timeout=_MEETING)

    team = Team(store, rank, world_size, open_group, 2 * settings.timeout + _MEETING)
    try:
        if rank:
            team.follow()
        else:
            _Lead(say, team, settings).run()
    finally:
        team.close()


class _Lead:
    """Rank 0: what the search asks for, and what is known already."""

    def __init__(self, say: Say, team: Team, settings: Settings) -> None:
        self._say, self._team, self._settings = say, team, settings
        comm = team.comm
        self._cpu, self._world_size, self._fingerprint = comm.simulated, comm.world_size, comm.fingerprint
        self._points = settings.points(self._cpu)
        self._in_force = {point: _chosen(comm, point) for point in self._points}
        self._machine = _like(self._fingerprint.device, self._fingerprint.topology)
        self._right: set[tuple[Point, Candidate]] = set()
        key = settings.key(self._fingerprint.digest, tuning_tables.KERNELS, provenance.versions())
        self._record = Record(user_tables.folder() / f"tuning-{self._fingerprint.digest}.jsonl", key)
        self._end, self._spent = time.monotonic() + settings.budget, False

    def run(self) -> None:
        """Search, publish, save, and say what changed."""
        if self._record.known:
            self._say("note", text=f"going on from {self._record.file}: {self._record.known} samples are known")
        finished = False
        try:
            decisions = search(self._points, self._pool, self._in_force.__getitem__, self._prior, self._measure)
            self._publish(decisions)
            finished = not self._spent
            self._team.ask(Task("end"))
        except (RankLost, tricomm.PeerDied, tricomm.PeerStalled) as error:
            raise RankLost(f"{error}. What was measured is kept in {self._record.file}; tune again to go on") from error
        finally:
            self._record.close(finished)

    def _publish(self, decisions: list[Decision]) -> None:
        """All ranks take the same table, or none does; then it is written."""
        mine = user_tables.load(self._fingerprint)
        rows = result.merged(mine.rows if mine is not None else (), result.rows(decisions, self._world_size))
        lines = result.lines(decisions, len(self._points), self._cpu)
        if not any(d.changed for d in decisions):
            self._say("result", lines=lines, file=None)
            return
        found = TunedTable(self._fingerprint, rows, database.now(), provenance.versions())
        for rank, answer in enumerate(self._team.ask(Task("table", table=tuning_tables.dumps(found).decode()))):
            if answer.digest != found.digest.hex():
                raise RankLost(f"rank {rank} has table {answer.digest[:12]}, rank 0 {found.digest.hex()[:12]}")
        self._say("result", lines=lines, file=str(user_tables.save(found)))

    def _pool(self, point: Point) -> list[Candidate]:
        kernels = [k for k in registry.of(point.collective, self._world_size) if self._runs(point, k)]
        return pool(kernels, self._team.comm.arena_layout, self._team.comm.most_blocks, self._cpu)

    def _runs(self, point: Point, kernel: registry.Kernel) -> bool:
        try:
            self._team.comm.explain(point.collective, 8, algorithm=kernel.algorithm, protocol=kernel.protocol)
        except InvalidArgument:  # not over these links
            return False
        return not kernel.needs_cube or self._fingerprint.topology == "hybrid_cube_mesh"

    def _prior(self, point: Point, candidate: Candidate) -> float:
        kernel = registry.find(point.collective, *candidate.family)
        shape = {"blocks": candidate.blocks, "warps": candidate.warps}
        return model.predict(self._machine, kernel, self._world_size, point.nbytes, point.mode, **shape).time_us

    def _measure(self, point: Point, candidates: Sequence[Candidate], repeats: int) -> dict[Candidate, list[float]]:
        candidates = [c for c in candidates if not self._record.wrong(point, c)]
        known = {candidate: self._record.recall(point, candidate, repeats) for candidate in candidates}
        lacking = [candidate for candidate in candidates if len(known[candidate]) < repeats]
        if not lacking:
            return known
        if time.monotonic() > self._end:
            self._spent = True
            raise Spent
        times = self._times(point, self._checked(point, lacking), repeats - min(len(known[c]) for c in lacking))
        self._record.append(Heat(point, tuple(lacking), tuple(times.get(c) for c in lacking)))
        self._say("heat", point=str(point), candidates=len(lacking), repeats=repeats)
        return {c: [*known[c], *times.get(c, ())] for c in candidates if c in times or c not in lacking}

    def _checked(self, point: Point, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that give the right result on every rank: a protocol that is broken may well be fast."""
        fresh = [c for c in candidates if (point, c) not in self._right]
        while fresh:
            answers = self._team.ask(Task("check", point, tuple(fresh), 1))
            at = self._lost(answers)
            if at is None:
                break
            self._leave_out(point, fresh.pop(at), next(a.fault for a in answers if a.fault))
        for at, candidate in enumerate(fresh):
            why = _verdict(answers, at)
            if why is None:
                self._right.add((point, candidate))
            else:
                self._leave_out(point, candidate, why)
        return [c for c in candidates if (point, c) in self._right]

    def _leave_out(self, point: Point, candidate: Candidate, why: str) -> None:
        self._right.discard((point, candidate))
        self._say("note", text=f"{point.collective} {point.nbytes} B, {candidate}: left out, {why}")

    def _lost(self, answers: Sequence[Answer]) -> int | None:
        """The number of the candidate that cost the group its life, if one did; then there is a new group."""
        lost = [answer.at for answer in answers if answer.fault]
        if not lost:
            return None
        self._team.ask(Task("renew"))
        return min(lost)  # a rank that was done with it met the fault in the next one

    def _times(self, point: Point, candidates: list[Candidate], repeats: int) -> dict[Candidate, tuple[float, ...]]:
        """The slowest rank's time of every sample."""
        if not candidates:
            return {}
        answers = self._team.ask(Task("time", point, tuple(candidates), repeats))
        at = self._lost(answers)
        if at is not None:
            self._leave_out(point, candidates[at], next(a.fault for a in answers if a.fault))
            return self._times(point, [c for c in candidates if c != candidates[at]], repeats)
        refused = {at for answer in answers for at in answer.refused}
        return {
            candidate: tuple(max(sample) for sample in zip(*(a.values[at] for a in answers), strict=True))
            for at, candidate in enumerate(candidates)
            if at not in refused
        }


def _verdict(answers: Sequence[Answer], at: int) -> str | None:
    """What is wrong with candidate number `at`, on any rank."""
    for rank, answer in enumerate(answers):
        if at in answer.refused:
            return f"rank {rank}: {answer.refused[at]}"
    wrong = sum(answer.values[at][0] for answer in answers)
    return f"{wrong:.0f} wrong elements" if wrong else None


def _chosen(comm: tricomm.Communicator, point: Point) -> Candidate:
    dtype = getattr(torch, point.dtype)
    choice = comm.explain(point.collective, point.nbytes, dtype, mode=point.mode)
    return Candidate(choice.algorithm, choice.protocol, choice.blocks, choice.warps, choice.block)


def _like(device: str, topology: str) -> Machine:
    """What the prior takes these devices for; a wrong one costs time, the search corrects it."""
    if topology == "pcie":
        return MACHINES["pcie4"]
    return next((m for m in MACHINES.values() if m.architecture == device), MACHINES["h100"])
