"""The strategies that choose the next task, tested on tasks that do nothing."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from tricomm.explorer.schedule.bounded_search import BoundedSearch, Touch
from tricomm.explorer.schedule.strategies import Given, Priorities, RandomWalk, default


@dataclass(eq=False)
class Fake:
    rank: int
    steps: int
    block, sync = 0, True

    @property
    def key(self) -> str:
        return f"r{self.rank}"

    @property
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.block, -1


def run(strategy, lengths) -> list[int]:
    """The order in which tasks of the given `lengths` take their steps."""
    return ordered(strategy, [Fake(rank, n) for rank, n in enumerate(lengths)])


def ordered(strategy, tasks, chosen=lambda step, task, usual: None) -> list[int]:
    """The same for `tasks`; `chosen` is told of each choice, and of the one that `default` makes."""
    current, order = None, []
    while ready := [t for t in tasks if t.steps]:
        usual = default(current, ready)
        current = strategy.choose(len(order), current, ready)
        chosen(len(order), current, usual)
        current.steps -= 1
        order.append(current.rank)
    return order


def preemptions(order, lengths) -> int:
    left, count = list(lengths), 0
    for n, (a, b) in enumerate(pairwise(order)):
        left[a] -= 1
        count += a != b and left[a] > 0
        assert n >= 0
    return count


def interleavings(lengths):
    if not any(lengths):
        return [[]]
    results = []
    for rank, n in enumerate(lengths):
        if n:
            rest = [m - (r == rank) for r, m in enumerate(lengths)]
            results += [[rank, *more] for more in interleavings(rest)]
    return results


@pytest.mark.parametrize("bound", [0, 1, 2, 9])
@pytest.mark.parametrize("lengths", [(1,), (2, 2), (3, 2), (2, 1, 2)], ids=str)
def test_the_bounded_search_visits_every_schedule_within_its_bound_once(lengths, bound):
    search, seen = BoundedSearch(bound), []
    while search.begin():
        seen.append(run(search, lengths))
        search.end()
    within = [order for order in interleavings(lengths) if preemptions(order, lengths) <= bound]
    assert sorted(seen) == sorted(within)


class Script(Fake):
    """A task that reads ("r"), adds to ("w") and polls ("p", until it is 2) words, and the values that it has read.

    "q" reads a word and the next one alternately until their sum is odd; "n", twice, polls a word until it grows and
    then reads another one.
    """

    def __init__(self, rank, ops) -> None:
        super().__init__(rank, len(ops))
        self.ops, self.seen, self.parked = list(ops), [], False
        self.looks, self.last, self.at = [], None, 0

    def go(self, words) -> Touch:
        (kind, word), line = self.ops[0], len(self.ops)
        if kind == "q":
            return self.look_at_two(word, words, line)
        if kind == "n":
            return self.nested(word, words, line)
        value = words[word]
        if kind == "p" and value < 2:
            self.parked, self.last = self.last == (line, value), (line, value)
        else:
            self.last = None
            del self.ops[0]
            words[word] += kind == "w"
            self.seen.append((kind, word, words[word]))
        return Touch(self.key, frozenset({("memory", word)}), kind == "w", line, b"%d" % value)

    def look_at_two(self, first, words, line) -> Touch:
        second = len(self.looks) % 2
        word = (first + second) % len(words)
        self.looks.append(words[word])
        if second and sum(self.looks[-2:]) % 2:
            self.seen.append(("q", first, *self.looks[-2:]))
            del self.ops[0]
            self.looks = []
        elif not second and self.looks[-3:-1] == [words[first], words[(first + 1) % len(words)]]:
            self.parked, self.looks = True, self.looks[-1:]
        return Touch(self.key, frozenset({("memory", word)}), False, (line, second), b"%d" % words[word])

    def nested(self, word, words, line) -> Touch:
        turn, second = divmod(self.at, 2)
        place = (word + second) % len(words)
        value = words[place]
        if second:
            self.seen.append(("n", place, value))
            self.at += 1
        elif value > turn:
            self.at += 1
        else:
            self.parked, self.last = self.last == (line, value), (line, value)
        if self.at == 4:
            del self.ops[0]
            self.at = 0
        return Touch(self.key, frozenset({("memory", place)}), False, (line, second), b"%d" % value)


def behaviours(scripts, bound, saw=BoundedSearch.saw, looks=True):
    """The values that the tasks may read, deadlocks included, and the number of executions that showed them."""
    search, result, count = BoundedSearch(bound), set(), 0
    while search.begin():
        tasks = [Script(rank, ops) for rank, ops in enumerate(scripts)]
        current, words = None, [0, 0, 0]
        while ready := [t for t in tasks if t.ops and not t.parked]:
            current = search.choose(0, current, ready)
            before = list(words)
            saw(search, current.go(words))
            if current.parked and looks:
                search.parked(current.key)
            for task in tasks:
                task.parked &= words == before
        result.add(tuple((tuple(t.seen), len(t.ops)) for t in tasks))
        count += 1
        search.end()
    return result, count


def programs(number):
    random = Random(number)
    lengths = [random.randint(1, 4) for _ in range(random.choice([2, 2, 3]))]
    return [[(random.choice("rwwpqn"), random.randrange(3)) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("numbers", [range(16), pytest.param(range(16, 150), marks=pytest.mark.soak)], ids=str)
def test_schedules_that_the_bounded_search_skips_show_nothing_new(numbers):
    every, fewer = 0, 0
    for number in numbers:
        for bound in (1, 2, 3):
            whole, n = behaviours(programs(number), bound, saw=lambda search, touch: None, looks=False)
            result, m = behaviours(programs(number), bound)
            assert result == whole, (number, bound)
            every, fewer = every + n, fewer + m
    assert fewer < every * 0.7


@pytest.mark.parametrize("broken", ["conflicts are not seen", "reads do not count"])
def test_skipping_more_schedules_loses_a_behaviour(monkeypatch, broken):
    change = {
        "conflicts are not seen": lambda a, b: False,
        "reads do not count": lambda a, b: a.writes and b.writes and not a.words.isdisjoint(b.words),
    }
    monkeypatch.setattr(Touch, "conflicts", change[broken])

    def lost(number):
        whole, _ = behaviours(programs(number), 2, saw=lambda search, touch: None, looks=False)
        return behaviours(programs(number), 2)[0] != whole

    assert any(map(lost, range(40)))


def test_no_step_is_moved_across_host_code():
    scripts = [[("w", 0), ("w", 0)], [("w", 1), ("w", 1)]]
    whole, n = behaviours(scripts, 2, saw=lambda search, touch: None, looks=False)
    assert behaviours(scripts, 2)[1] < n
    assert behaviours(scripts, 2, saw=lambda search, touch: search.saw(None), looks=False)[1] == n


def test_the_bounded_search_preempts_before_strong_accesses_only():
    class Plain(Fake):
        sync = False

    search, seen = BoundedSearch(2), []
    while search.begin():
        seen.append(ordered(search, [Plain(0, 2), Plain(1, 2)]))
        search.end()
    assert sorted(seen) == [[0, 0, 1, 1], [1, 1, 0, 0]]


def test_a_function_that_is_not_deterministic_is_noticed():
    search = BoundedSearch(2)
    search.begin()
    run(search, (2, 2))
    search.end()
    search.begin()
    with pytest.raises(RuntimeError, match="does not repeat itself"):
        run(search, (2, 2, 2))


@pytest.mark.parametrize(
    "make", [lambda s: RandomWalk(s), lambda s: RandomWalk(s, 0.5), lambda s: Priorities(s, 3, 20)]
)
def test_a_seed_is_a_schedule(make):
    orders = [run(make(seed), (8, 8, 8)) for seed in range(20)]
    assert orders == [run(make(seed), (8, 8, 8)) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 10


def test_priorities_run_one_task_until_it_drops():
    orders = [run(Priorities(seed, 3, 24), (8, 8, 8)) for seed in range(30)]
    assert max(preemptions(order, (8, 8, 8)) for order in orders) == 2


def test_choices_repeat_a_schedule():
    for seed in range(10):
        choices = []

        def note(step, task, usual, choices=choices):
            choices += [] if task is usual else [(step, task.key)]

        order = ordered(RandomWalk(seed), [Fake(rank, 6) for rank in range(3)], note)
        assert run(Given(choices), (6, 6, 6)) == order


def test_choices_that_are_not_possible_are_skipped():
    assert run(Given([(0, "r7"), (1, "r1")]), (2, 2)) == [0, 1, 1, 0]
