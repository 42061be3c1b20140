"""The ranks of a tuning run: all run rank 0's tasks, the slowest counts, and every wait has a limit."""

import math
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore

from tricomm import ResourceError
from tricomm.errors import CollectiveTimeout, InvalidArgument, PeerDied
from tricomm.perf.tuner import coordinator, worker
from tricomm.perf.tuner.coordinator import CheckedTimes, adopt
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.sample_log import Round, SampleLog
from tricomm.perf.tuner.successive_halving import BudgetExceeded
from tricomm.perf.tuner.worker import RankLost, TuningAnswer, TuningTask, TuningWorker
from tricomm.policy import tuning_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_POINT = Point("all_reduce", 16, "graph", 1024)
_A, _B, _C = (Candidate("one_shot", "ll", blocks, 8, 512) for blocks in (1, 2, 4))
_TIMEOUT = 3.0


class _Comm:
    """The part of a communicator that a worker uses."""

    def __init__(self, rank: int) -> None:
        self.rank, self.closed, self.used = rank, False, ""

    def use_table(self, rows: Any, name: str) -> None:
        self.used = name

    def close(self) -> None:
        self.closed = True


class _Sampler:
    """Rank r takes r + 1 times the number of blocks; `faults` has a candidate's wrong elements or error, by rank."""

    faults: dict[tuple[int, Candidate], Exception | int] = {}

    def __init__(self, comm: _Comm) -> None:
        self._comm = comm

    def check(self, point: Point, candidate: Candidate) -> int:
        fault = self.faults.get((self._comm.rank, candidate), 0)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def sample(self, point: Point, candidate: Candidate) -> float:
        self.check(point, candidate)
        return float((self._comm.rank + 1) * candidate.blocks)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Sampler", _Sampler)
    monkeypatch.setattr(_Sampler, "faults", {})


def _ranks(
    on_rank_0: Callable[[TuningWorker], Any], world_size: int = 3, stop: int | None = None
) -> tuple[Any, list[list[_Comm]]]:
    """Run `on_rank_0(worker)` while the others serve, except rank `stop`. Returns its result and all ranks' groups."""
    made = [list[_Comm]() for _ in range(world_size)]
    folder = tempfile.TemporaryDirectory()
    stores = [FileStore(f"{folder.name}/store", world_size) for _ in range(world_size)]

    def open_group(rank: int) -> Callable[[int], _Comm]:
        def opened(number: int) -> _Comm:
            made[rank].append(_Comm(rank))
            return made[rank][-1]

        return opened

    def serve(rank: int) -> None:
        try:
            TuningWorker(stores[rank], rank, world_size, open_group(rank), _TIMEOUT).serve()  # type: ignore[arg-type]
        except RankLost:
            pass

    others = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, world_size) if rank != stop]
    for thread in others:
        thread.start()
    worker_0 = TuningWorker(stores[0], 0, world_size, open_group(0), _TIMEOUT)  # type: ignore[arg-type]
    try:
        result = on_rank_0(worker_0)
        worker_0.broadcast(TuningTask("end"))
    finally:
        for thread in others:
            thread.join(2 * _TIMEOUT + 5)
            assert not thread.is_alive()
        folder.cleanup()
    return result, made


def _checked_times(worker_0: TuningWorker) -> CheckedTimes:
    return CheckedTimes(lambda event, **_: None, worker_0, lambda: math.inf)


def test_every_sample_is_the_slowest_ranks() -> None:
    result, _ = _ranks(lambda t: _checked_times(t).times(_POINT, [_A, _C], 2))
    assert result == {_A: (3.0, 3.0), _C: (12.0, 12.0)}


def test_a_candidate_with_a_wrong_result_on_any_rank_is_never_timed() -> None:
    _Sampler.faults = {(2, _B): 7, (1, _C): ResourceError("too many registers")}
    result, made = _ranks(lambda t: _checked_times(t).right(_POINT, [_A, _B, _C]))
    assert result == [_A] and [len(groups) for groups in made] == [1, 1, 1]


def test_a_candidate_that_hangs_costs_the_group_and_itself() -> None:
    lost = CollectiveTimeout("no answer")
    _Sampler.faults = {(rank, _B): lost for rank in range(3)}

    def on_rank_0(worker_0: TuningWorker) -> Any:
        times = _checked_times(worker_0)
        return times.right(_POINT, [_A, _B, _C]), times.times(_POINT, [_A, _B, _C], 1)

    (right, times), made = _ranks(on_rank_0)
    assert right == [_A, _C] and times == {_A: (3.0,), _C: (12.0,)}
    assert [[comm.closed for comm in groups] for groups in made] == [[True, True, False]] * 3  # replaced twice


class _Clock:
    """A one-rank worker with `left` seconds, whose check of a candidate takes 2 s and a sample 1 s."""

    def __init__(self, left: float) -> None:
        self.left, self.now, self.tasks = left, 0.0, list[TuningTask]()

    def broadcast(self, task: TuningTask) -> list[TuningAnswer]:
        self.tasks.append(task)
        seconds = (2 if task.do == "check" else 1) * len(task.candidates) * task.repeats
        self.now, self.left = self.now + seconds, self.left - seconds
        return [TuningAnswer(tuple((0.0,) * task.repeats for _ in task.candidates))]


@pytest.mark.parametrize("budget", [1, 2, 5, 8.5, 11, 20, 100])
def test_a_step_that_does_not_fit_is_not_begun(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check and the first sample at a point may exceed the time, because theirs is not known yet."""
    clock = _Clock(budget)
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: clock.now)
    times = CheckedTimes(lambda event, **_: None, clock, lambda: clock.left)  # type: ignore[arg-type]
    try:
        measured = times.times(_POINT, times.right(_POINT, [_A, _B, _C]), 4)
    except BudgetExceeded:
        measured = {}
    assert bool(measured) == (budget >= 3 * 2 + 3 * 4) and clock.now <= max(budget, 2) + 1
    assert all(len(task.candidates) == task.repeats == 1 for task in clock.tasks)  # each takes longer than a step


def test_quick_samples_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(math.inf)
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: clock.now / 1e4)
    times = CheckedTimes(lambda event, **_: None, clock, lambda: math.inf)  # type: ignore[arg-type]
    assert set(times.times(_POINT, times.right(_POINT, [_A, _B, _C]), 16)) == {_A, _B, _C}
    done = [(task.do, len(task.candidates), task.repeats) for task in clock.tasks]
    # One first, then the others, then the rest of the sixteen turns at once.
    assert done == [("check", 1, 1), ("check", 2, 1), ("time", 1, 1), ("time", 2, 1), ("time", 3, 15)]


def test_a_missing_rank_ends_the_run_in_time() -> None:
    with pytest.raises(RankLost, match="rank 2 has sent nothing for 3 s"):
        _ranks(lambda t: t.broadcast(TuningTask("time", _POINT, (_A,), 1)), stop=2)


def test_all_ranks_take_the_same_table() -> None:
    result = TunedTable(Fingerprint("cpu", "", 3), (TableRow("all_reduce", 3, None, "two_shot", "ll"),))
    answers, made = _ranks(lambda t: t.broadcast(TuningTask("table", table=tuning_tables.dumps(result).decode())))
    assert {answer.digest for answer in answers} == {result.digest.hex()}
    assert {groups[-1].used for groups in made} == {result.name}


def test_another_ranks_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    deaf: Any = type("Deaf", (), {"broadcast": lambda self, task: [TuningAnswer(digest="00")]})()
    with pytest.raises(RankLost, match="rank 0 has table 00, rank 0"):
        adopt(deaf, TunedTable(Fingerprint("cpu", "", 2), (TableRow("all_reduce", 2, None, "two_shot", "ll"),)))
    assert list(tmp_path.iterdir()) == []  # nothing is written unless all ranks have it


# The log of samples on disk

_candidates = st.builds(
    Candidate,
    st.sampled_from(["one_shot", "two_shot"]),
    st.sampled_from(["ll", "simple"]),
    st.integers(1, 64),
    st.sampled_from([4, 8]),
    st.sampled_from([512, 1024]),
)
_points = st.builds(Point, st.just("all_reduce"), st.sampled_from([16, 32]), st.just("eager"), st.integers(1, 1 << 40))


@st.composite
def _rounds(draw: st.DrawFn) -> Round:
    candidates = tuple(draw(st.lists(_candidates, max_size=4, unique=True)))
    times = st.none() | st.lists(st.floats(0, 1e9), max_size=4).map(tuple)
    return Round(draw(_points), candidates, tuple(draw(times) for _ in candidates))


def _samples(rounds: list[Round]) -> dict[tuple[Point, Candidate], list[float]]:
    results: dict[tuple[Point, Candidate], list[float]] = {}
    for one in rounds:
        for candidate, times in zip(one.candidates, one.times, strict=True):
            results.setdefault((one.point, candidate), []).extend(times or ())
    return results


def _recalled(log: SampleLog, keys: Any) -> dict[tuple[Point, Candidate], list[float]]:
    return {key: log.recall(*key, 1 << 30) for key in keys}


@given(st.lists(_rounds(), max_size=6), st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_a_run_interrupted_anywhere_resumes_with_its_complete_heats(rounds: list[Round], where: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning.jsonl"
        log = SampleLog(file, "key")
        ends = [file.stat().st_size]
        for one in rounds:
            log.append(one)
            ends.append(file.stat().st_size)
        log.close(finished=False)
        cut = int(where * ends[-1])
        file.write_bytes(file.read_bytes()[:cut])
        whole = rounds[: max(sum(end <= cut for end in ends) - 1, 0)]
        again = SampleLog(file, "key")
        expected = _samples(whole)
        assert again.known == sum(map(len, expected.values()))
        assert _recalled(again, expected) == expected and again.known == 0
        for one in rounds[len(whole) :]:
            again.append(one)
        again.close(finished=False)
        last = SampleLog(file, "key")  # the torn line is gone, and the lines appended after it are whole
        assert _recalled(last, _samples(rounds)) == _samples(rounds)
        last.close(finished=True)
        assert not file.exists()


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_a_run_starts_with_any_content_of_the_file(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning.jsonl"
        file.write_bytes(b"key\n" + text)
        log = SampleLog(file, "key")
        log.append(Round(_POINT, (_A,), ((1.0,),)))
        log.close(finished=False)
        again = SampleLog(file, "key")
        assert 1.0 in again.recall(_POINT, _A, 1 << 30)
        again.close(finished=True)


def test_the_record_of_another_run_is_not_used(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "t.jsonl", "one")
    log.append(Round(_POINT, (_A, _B), ((1.0, 2.0, 3.0), None)))
    log.close(finished=False)
    again = SampleLog(tmp_path / "t.jsonl", "one")
    assert (again.recall(_POINT, _A, 2), again.recall(_POINT, _A, 2), again.recall(_POINT, _A, 2)) == ([1, 2], [3], [])
    assert again.wrong(_POINT, _B) and not again.wrong(_POINT, _A)
    again.close(finished=False)
    other = SampleLog(tmp_path / "t.jsonl", "two")
    assert other.known == 0
    other.close(finished=True)


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written.*TRICOMM_TUNING_DIR"):
        SampleLog(tmp_path / "file" / "t.jsonl", "key")


def test_refused_arguments_are_distinguished_from_faults() -> None:
    _Sampler.faults = {(rank, _A): InvalidArgument("not over these links") for rank in range(3)}
    answers, made = _ranks(lambda t: t.broadcast(TuningTask("check", _POINT, (_A,), 1)))
    assert all(a.refused == {0: "not over these links"} and not a.fault for a in answers)
    assert [len(groups) for groups in made] == [1, 1, 1]


def test_a_rank_that_died_is_no_fault_of_the_candidate() -> None:
    _Sampler.faults = {(rank, _A): PeerDied("rank 1 died") for rank in range(3)}
    with pytest.raises(PeerDied):
        _ranks(lambda t: t.broadcast(TuningTask("check", _POINT, (_A,), 1)), world_size=1)
