"""The accesses that the detector keeps for a word are enough: no later access hides a race with an earlier one."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from tricomm.explorer.interpreted.detector import Detector
from tricomm.explorer.memory_model.clocks import STRICT, Thread
from tricomm.explorer.memory_model.regions import Place, Region
from tricomm.explorer.memory_model.shadow import LastByKind
from tricomm.explorer.memory_model.source_lines import NOWHERE
from tricomm.explorer.schedule.tasks import Task
from tricomm.kernels.launch.memory_access import Access

WRITES = ("store", "store.relaxed.gpu.8", "xchg.relaxed.sys.4", "store.relaxed.cta.8")
READS = ("load", "look.relaxed.gpu.8", "look.relaxed.sys.4", "look.acquire.gpu.8")
FITTING_WRITES = ("xchg.relaxed.sys.8", "store.release.sys.8")
FITTING_READS = ("look.relaxed.sys.8", "load.relaxed.sys.8", "look.acquire.sys.8")


@dataclass
class Word:
    """A word of 8 bytes and a flag next to it, watched by the detector."""

    detector: Detector = field(default_factory=lambda: Detector(3))
    memory: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))

    def __post_init__(self) -> None:
        self.region = Region("private", 0, self.memory.ctypes.data, self.memory.nbytes, "words")
        self._tasks: dict[tuple[int, int], Task] = {}

    def task(self, rank: int, block: int = 0) -> Task:
        return self._tasks.setdefault((rank, block), Task(rank, block, lambda: None))

    def does(self, task: Task, name: str, at: int = 0) -> None:
        """`name`: store, load, xchg, rmw (that changes the word) or look (one that leaves it), order, scope, bytes."""
        what, sem, scope, size = (name.split(".") + [None] * 3)[:4]
        kind = what if what in ("store", "load") else "rmw"
        access = Access(kind, np.ones(1, bool), np.zeros(1, np.uint64), int(size or 8), sem, scope, lambda lanes: None)
        access.op = "XCHG" if what == "xchg" else "ADD" * (kind == "rmw")
        changed = access.writes and what != "look"
        self.detector.access(task, access, [Place(self.region, np.array([at]))], NOWHERE, changed)

    def hand_over(self, one: Task, other: Task, at: int = 8) -> None:
        """Order all earlier accesses of `one` before all later ones of `other`."""
        self.detector.barrier(one)
        self.does(one, "store.release.sys.8", at)
        self.does(other, "look.acquire.sys.8", at)
        self.detector.barrier(other)

    @property
    def races(self) -> list[tuple[int, ...]]:
        """The ranks of each race, first the rank of the earlier access."""
        assert {f.kind for f in self.detector.findings} <= {"race", "scope"}
        return [finding.ranks for finding in self.detector.findings]


def races(program: str, ranks: str = "012") -> list[tuple[int, ...]]:
    """The races of steps such as "A store", "B look.acquire.sys.8 @8" (at byte 8), "A bar" and "A hand B" (A's accesses
    happen before B's next ones). Block n is of rank `ranks[n]`."""
    word = Word()
    tasks = {chr(ord("A") + n): word.task(int(rank), n) for n, rank in enumerate(ranks)}
    for step in program.split(";"):
        who, name, *more = step.split()
        if name == "bar":
            word.detector.barrier(tasks[who])
        elif name == "hand":
            word.hand_over(tasks[who], tasks[more[0]], *(int(at[1:]) for at in more[1:]))
        else:
            word.does(tasks[who], name, *(int(at[1:]) for at in more))
    return word.races


@pytest.mark.parametrize("first", WRITES)
@pytest.mark.parametrize("later", FITTING_WRITES)
def test_a_strong_write_hides_no_race_with_an_earlier_access_that_conflicts(first, later):
    for other in FITTING_READS + FITTING_WRITES:
        assert races(f"A {later}; B {other}") == []
        assert races(f"A {first}; A {later}; B {other}") == [(0, 1)]
    assert races(f"A {first}; A hand B; B {later}; C xchg.relaxed.sys.8") == [(0, 2)]  # nor does one of another rank


@pytest.mark.parametrize("first", READS)
@pytest.mark.parametrize("later", FITTING_READS + FITTING_WRITES)
def test_a_strong_access_hides_no_race_with_an_earlier_read_that_conflicts(first, later):
    for other in FITTING_WRITES:
        assert races(f"A {later}; B {other}") == []
        assert races(f"A {first}; A {later}; B {other}") == [(0, 1)]


@pytest.mark.parametrize("first", WRITES + READS)
def test_a_plain_write_replaces_all_accesses_that_it_is_ordered_after(first):
    program = f"A {first}; A store.relaxed.sys.8; A hand B; B store; C xchg.relaxed.sys.8"
    assert races(program) == [(1, 2)]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        # A write of one scope and size does not replace one of another rank.
        ("A xchg.relaxed.sys.8; A hand B; B xchg.relaxed.sys.8; C look.relaxed.gpu.8", 1),
        # A word may be the flag that orders its own accesses.
        ("A store.relaxed.gpu.8; A hand B @0; B store", 0),
        # A release replaces no access after the last block barrier.
        ("A store.relaxed.sys.8; A bar; A store.release.sys.8; B look.acquire.sys.8; B bar; B store", 0),
        ("A store.relaxed.sys.8; A store.release.sys.8; B look.acquire.sys.8; B bar; B store", 1),
        ("A look.relaxed.sys.8; A bar; A look.acq_rel.sys.8; B look.acquire.sys.8; B bar; B store", 0),
        ("A look.relaxed.sys.8; A look.acq_rel.sys.8; B look.acquire.sys.8; B bar; B store", 1),
        # It does not precede an access that has read an earlier flag of its block.
        ("A store.release.sys.8; A store.release.sys.8 @8; B look.acquire.sys.8 @8; B bar; B store", 0),
        ("A store.release.sys.8 @8; A store.release.sys.8; B look.acquire.sys.8 @8; B bar; B store", 1),
        ("A store.release.sys.8; A store.relaxed.sys.8 @8; B look.acquire.sys.8 @8; B bar; B store", 1),
        ("A store.relaxed.sys.8 @8; A store.release.sys.8; B look.acquire.sys.8 @8; B bar; B store", 1),
        # An acquire that writes is ordered after the reads before the release that it reads.
        ("A load; A bar; A look.acq_rel.sys.8; B xchg.acquire.sys.8", 0),
        ("A load; A bar; A store.release.sys.8; B xchg.acquire.sys.8", 0),
        # The block's other threads are not ordered after the release yet.
        ("A load; A bar; A store.release.sys.8; B xchg.acquire.sys.8; B load.relaxed.gpu.8", 1),
    ],
)
def test_the_accesses_that_a_word_keeps(program, found):
    assert races(program, "011") == [(0, 1)] * found


@pytest.mark.parametrize("acquire", ["look.acquire.sys.8", "load.acquire.sys.8", "rmw.acq_rel.sys.8"])
@pytest.mark.parametrize("first", WRITES)
def test_an_acquire_is_ordered_after_the_writes_before_the_release_that_it_reads(first, acquire):
    assert races(f"A {first}; A bar; A store.release.sys.8; B {acquire}") == []
    assert races(f"A {first}; A bar; A store.relaxed.sys.8; B {acquire}") == [(0, 1)]


def test_many_releases_do_not_cover_accesses_after_the_last_block_barrier():
    word = Word()
    one, other = map(word.task, range(2))
    word.does(one, "store", at=8)
    for _ in range(1500):
        word.does(one, "store.release.sys.8")
    word.does(other, "look.acquire.sys.8")
    word.detector.barrier(other)
    word.does(other, "store")
    assert word.races == []
    word.does(other, "store", at=8)
    assert word.races == [(0, 1)]


def test_an_acquire_learns_of_a_word_only_from_that_word():
    """The elements of one tile are acquires of several threads."""
    word = Word()
    one, other = map(word.task, range(2))
    word.does(one, "store", at=8)
    word.does(one, "store.relaxed.sys.8", at=8)
    word.detector.barrier(one)
    word.does(one, "store.release.sys.8")
    tile = Access("load", np.ones(2, bool), np.zeros(2, np.uint64), 8, "acquire", "sys", lambda lanes: None)
    word.detector.access(other, tile, [Place(word.region, np.array([0, 8]))], NOWHERE, False)
    assert word.races == [(0, 1)]


def test_rows_for_more_threads_and_finer_granules_keep_their_accesses():
    word = Word(Detector(1))
    tasks = [word.task(0, block) for block in range(9)]
    word.does(tasks[0], "load", at=8)
    word.does(tasks[0], "xchg.relaxed.cta.8")
    word.does(tasks[0], "xchg.relaxed.gpu.8")
    for task in tasks[1:]:
        word.does(task, "load.relaxed.gpu.4", at=12)
    assert word.races == []
    word.does(tasks[8], "xchg.relaxed.gpu.4", at=12)
    assert word.races == [(0, 0)]
    word.detector.findings.clear()
    word.does(tasks[8], "look.relaxed.gpu.8")
    assert "rmw at .cta" in word.detector.findings[0].text


# A detector that keeps everything


@dataclass
class Earlier:
    half: int
    rank: int
    block: int
    slot: int
    time: int
    name: str
    writes: bool


class Everything:
    """Keeps every access to the two halves of a word, and compares each with all earlier ones."""

    def __init__(self, word: Word) -> None:
        self._word, self._accesses = word, []
        self._last, self._message = [-1, -1], [-1, -1]

    def clashes(self, task: Task, name: str, at: int) -> bool:
        """Make the access; True if it races with any before it."""
        detector = self._word.detector
        what, sem, scope, size = (name.split(".") + [None] * 3)[:4]
        thread = detector.thread(task.rank, task.block)
        time = int(thread.known_by_release[thread.slot]) if sem in ("release", "acq_rel") else thread.time
        halves = range(at // 4, (at + int(size or 8)) // 4)
        writes, result = what in ("store", "xchg", "rmw"), False
        for half in halves:
            told = thread.now[STRICT]
            if sem in ("acquire", "acq_rel") and what != "store" and self._message[half] >= 0:
                told = thread.told(detector._messages[self._message[half]], scope)
            for number, one in enumerate(self._accesses):
                known = thread.now[STRICT] if number == self._last[half] else told
                if one.half == half and (writes or one.writes) and one.time > known[one.slot]:
                    result |= not _fit(one, Earlier(half, task.rank, task.block, thread.slot, time, name, writes))
        self._word.does(task, name, at)
        for half in halves:
            if writes:
                self._last[half] = len(self._accesses)
            if writes or sem in ("release", "acq_rel"):
                self._message[half] = len(detector._messages) - 1 if sem else -1
            self._accesses.append(Earlier(half, task.rank, task.block, thread.slot, time, name, writes))
        return result


def _fit(one: Earlier, other: Earlier) -> bool:
    if "." not in one.name or "." not in other.name:
        return False
    (scope, size), (other_scope, other_size) = (a.name.split(".")[2:] for a in (one, other))
    near = {"sys"} | ({"gpu"} if one.rank == other.rank else set())
    near |= {"cta"} if (one.rank, one.block) == (other.rank, other.block) else set()
    return size == other_size and {scope, other_scope} <= near


def _program(seed: int) -> tuple[bool, bool]:
    """Run a random program until the first race; return whether the full history and the detector have found it."""
    random, word = Random(seed), Word()
    everything = Everything(word)
    tasks = [word.task(rank, block) for rank in range(2) for block in range(2)]
    names = random.sample(NAMES, 3) + 4 * ["hand over"]
    for _ in range(12):
        task, name = random.choice(tasks), random.choice(names)
        if name == "hand over":
            word.hand_over(task, random.choice(tasks), at=8)
        elif random.random() < 0.3:
            word.detector.barrier(task)
        else:
            at = random.choice((0, 4)) if name.endswith("4") else 0
            races = everything.clashes(task, name, at)
            if races or word.races:
                return races, bool(word.races)
    return False, False


NAMES = ["store", "load", "load.relaxed.sys.8"] + [
    f"{what}.{sem}.{scope}.{size}"
    for what, sems in (
        ("look", ("relaxed", "acquire", "acq_rel")),
        ("xchg", ("relaxed", "acquire", "release", "acq_rel")),
        ("rmw", ("relaxed", "acquire", "release", "acq_rel")),
        ("store", ("relaxed", "release")),
    )
    for sem in sems
    for scope in ("cta", "gpu", "sys", "sys")
    for size in (8, 8, 4)
]


def test_a_race_is_found_when_a_detector_that_keeps_everything_finds_it():
    programs = [_program(seed) for seed in range(600)]
    assert [n for n, (all_kept, kept) in enumerate(programs) if all_kept != kept] == []
    assert 100 < sum(race for race, _ in programs) < 500


def test_without_the_accesses_kept_for_late_stores_a_race_is_missed(monkeypatch):
    monkeypatch.setattr(LastByKind, "late", lambda *given: None)
    assert any(all_kept != kept for all_kept, kept in map(_program, range(100)))


def test_a_late_store_is_not_ordered_by_a_later_acquire_of_its_block():
    thread = Thread(0, 0, np.zeros((4, 4), np.int32))
    stored = thread.frozen()
    thread.pending[1] = 5
    assert thread.known_to_block[1] == 5 and stored.known_to_block[1] == 0
