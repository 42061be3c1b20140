"""The ranks of a tuning run: all do what rank 0 asks, the slowest counts, and nothing waits without a bound."""

from __future__ import annotations

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
from tricomm.perf.tuner import live, team
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.perf.tuner.state import Heat, Record
from tricomm.perf.tuner.team import Answer, RankLost, Task, Team
from tricomm.policy import tuning_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_POINT = Point("all_reduce", 16, "graph", 1024)
_A, _B, _C = (Candidate("one_shot", "ll", blocks, 8, 512) for blocks in (1, 2, 4))
_PATIENCE = 3.0


class _Comm:
    """A communicator as far as the team knows it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.closed, self.used = rank, False, ""

    def use_table(self, rows: Any, name: str) -> None:
        self.used = name

    def close(self) -> None:
        self.closed = True


class _Sampler:
    """Rank r needs r + 1 times the blocks; `ill` says what a candidate does instead, by rank."""

    ill: dict[tuple[int, Candidate], Exception | int] = {}

    def __init__(self, comm: _Comm) -> None:
        self._comm = comm

    def check(self, point: Point, candidate: Candidate) -> int:
        ill = self.ill.get((self._comm.rank, candidate), 0)
        if isinstance(ill, Exception):
            raise ill
        return ill

    def sample(self, point: Point, candidate: Candidate) -> float:
        self.check(point, candidate)
        return float((self._comm.rank + 1) * candidate.blocks)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "Sampler", _Sampler)
    monkeypatch.setattr(_Sampler, "ill", {})


def _ranks(lead: Callable[[Team], Any], world_size: int = 3, stop: int | None = None) -> tuple[Any, list[list[_Comm]]]:
    """`lead(team)` of rank 0, while the others follow; rank `stop` never comes. Its result, and every rank's groups."""
    made = [list[_Comm]() for _ in range(world_size)]
    folder = tempfile.TemporaryDirectory()
    stores = [FileStore(f"{folder.name}/store", world_size) for _ in range(world_size)]

    def open_group(rank: int) -> Callable[[int], _Comm]:
        def opened(number: int) -> _Comm:
            made[rank].append(_Comm(rank))
            return made[rank][-1]

        return opened

    def follow(rank: int) -> None:
        try:
            Team(stores[rank], rank, world_size, open_group(rank), _PATIENCE).follow()  # type: ignore[arg-type]
        except RankLost:
            pass

    others = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, world_size) if rank != stop]
    for thread in others:
        thread.start()
    mine = Team(stores[0], 0, world_size, open_group(0), _PATIENCE)  # type: ignore[arg-type]
    try:
        result = lead(mine)
        mine.ask(Task("end"))
    finally:
        for thread in others:
            thread.join(2 * _PATIENCE + 5)
            assert not thread.is_alive()
        folder.cleanup()
    return result, made


def _lead(mine: Team) -> Any:
    """What rank 0 measures with, without a search."""
    lead = live._Lead.__new__(live._Lead)
    lead._say, lead._team, lead._right = (lambda what, **_: None), mine, set()
    return lead


def test_every_sample_is_the_slowest_ranks() -> None:
    found, _ = _ranks(lambda t: _lead(t)._times(_POINT, [_A, _C], 2))
    assert found == {_A: (3.0, 3.0), _C: (12.0, 12.0)}


def test_what_is_wrong_on_any_rank_is_never_timed() -> None:
    _Sampler.ill = {(2, _B): 7, (1, _C): ResourceError("too many registers")}
    found, made = _ranks(lambda t: _lead(t)._checked(_POINT, [_A, _B, _C]))
    assert found == [_A] and [len(groups) for groups in made] == [1, 1, 1]


def test_a_candidate_that_hangs_costs_the_group_and_itself() -> None:
    lost = CollectiveTimeout("no answer")
    _Sampler.ill = {(rank, _B): lost for rank in range(3)}

    def lead(mine: Team) -> Any:
        one = _lead(mine)
        return one._checked(_POINT, [_A, _B, _C]), one._times(_POINT, [_A, _B, _C], 1)

    (right, times), made = _ranks(lead)
    assert right == [_A, _C] and times == {_A: (3.0,), _C: (12.0,)}
    assert [[comm.closed for comm in groups] for groups in made] == [[True, True, False]] * 3  # made anew, twice


def test_a_rank_that_never_comes_ends_it_in_time() -> None:
    with pytest.raises(RankLost, match="rank 2 has said nothing for 3 s"):
        _ranks(lambda t: t.ask(Task("time", _POINT, (_A,), 1)), stop=2)


def test_all_ranks_take_the_same_table() -> None:
    found = TunedTable(Fingerprint("cpu", "", 3), (TableRow("all_reduce", 3, None, "two_shot", "ll"),))
    answers, made = _ranks(lambda t: t.ask(Task("table", table=tuning_tables.dumps(found).decode())))
    assert {answer.digest for answer in answers} == {found.digest.hex()}
    assert {groups[-1].used for groups in made} == {found.name}


def test_another_ranks_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    one = _lead(type("Deaf", (), {"ask": lambda self, task: [Answer(digest="00")]})())
    one._fingerprint, one._world_size, one._cpu, one._points = Fingerprint("cpu", "", 2), 2, True, [_POINT]
    changed = type("Changed", (), {"changed": True, "chosen": _A, "point": _POINT})
    monkeypatch.setattr(live.result, "lines", lambda *_: [])
    with pytest.raises(RankLost, match="rank 0 has table 00, rank 0"):
        one._publish([changed()])
    assert list(tmp_path.iterdir()) == []  # nothing is written that not all ranks have


# What is on the disk

_candidates = st.builds(
    Candidate, st.sampled_from(["one_shot", "two_shot"]), st.sampled_from(["ll", "simple"]), st.integers(1, 64),
    st.sampled_from([4, 8]), st.sampled_from([512, 1024]),
)  # fmt: skip
_points = st.builds(Point, st.just("all_reduce"), st.sampled_from([16, 32]), st.just("eager"), st.integers(1, 1 << 40))


@st.composite
def _heats(draw: st.DrawFn) -> Heat:
    candidates = tuple(draw(st.lists(_candidates, max_size=4, unique=True)))
    times = st.none() | st.lists(st.floats(0, 1e9), max_size=4).map(tuple)
    return Heat(draw(_points), candidates, tuple(draw(times) for _ in candidates))


def _samples(heats: list[Heat]) -> dict[tuple[Point, Candidate], list[float]]:
    found: dict[tuple[Point, Candidate], list[float]] = {}
    for heat in heats:
        for candidate, times in zip(heat.candidates, heat.times, strict=True):
            found.setdefault((heat.point, candidate), []).extend(times or ())
    return found


def _recalled(record: Record, keys: Any) -> dict[tuple[Point, Candidate], list[float]]:
    return {key: record.recall(*key, 1 << 30) for key in keys}


@given(st.lists(_heats(), max_size=6), st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_a_run_that_is_cut_off_anywhere_goes_on_with_its_whole_heats(heats: list[Heat], where: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning.jsonl"
        record = Record(file, "key")
        ends = [file.stat().st_size]
        for heat in heats:
            record.append(heat)
            ends.append(file.stat().st_size)
        record.close(finished=False)
        cut = int(where * ends[-1])
        file.write_bytes(file.read_bytes()[:cut])
        whole = heats[: max(sum(end <= cut for end in ends) - 1, 0)]
        again = Record(file, "key")
        expected = _samples(whole)
        assert again.known == sum(map(len, expected.values()))
        assert _recalled(again, expected) == expected and again.known == 0
        for heat in heats[len(whole) :]:
            again.append(heat)
        again.close(finished=False)
        last = Record(file, "key")  # what was torn is gone, what came behind it is whole
        assert _recalled(last, _samples(heats)) == _samples(heats)
        last.close(finished=True)
        assert not file.exists()


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_whatever_the_file_is_a_run_begins(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning.jsonl"
        file.write_bytes(b"key\n" + text)
        record = Record(file, "key")
        record.append(Heat(_POINT, (_A,), ((1.0,),)))
        record.close(finished=False)
        again = Record(file, "key")
        assert 1.0 in again.recall(_POINT, _A, 1 << 30)
        again.close(finished=True)


def test_another_runs_record_is_not_taken(tmp_path: Path) -> None:
    record = Record(tmp_path / "t.jsonl", "one")
    record.append(Heat(_POINT, (_A, _B), ((1.0, 2.0, 3.0), None)))
    record.close(finished=False)
    again = Record(tmp_path / "t.jsonl", "one")
    assert (again.recall(_POINT, _A, 2), again.recall(_POINT, _A, 2), again.recall(_POINT, _A, 2)) == ([1, 2], [3], [])
    assert again.wrong(_POINT, _B) and not again.wrong(_POINT, _A)
    again.close(finished=False)
    other = Record(tmp_path / "t.jsonl", "two")
    assert other.known == 0
    other.close(finished=True)


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written.*TRICOMM_TUNING_DIR"):
        Record(tmp_path / "file" / "t.jsonl", "key")


def test_refused_arguments_are_told_apart_from_faults() -> None:
    _Sampler.ill = {(rank, _A): InvalidArgument("not over these links") for rank in range(3)}
    answers, made = _ranks(lambda t: t.ask(Task("check", _POINT, (_A,), 1)))
    assert all(a.refused == {0: "not over these links"} and not a.fault for a in answers)
    assert [len(groups) for groups in made] == [1, 1, 1]


def test_a_rank_that_died_is_no_fault_of_the_candidate() -> None:
    _Sampler.ill = {(rank, _A): PeerDied("rank 1 died") for rank in range(3)}
    with pytest.raises(PeerDied):
        _ranks(lambda t: t.ask(Task("check", _POINT, (_A,), 1)), world_size=1)
