"""Runs every schedule with at most a given number of preemptions, except schedules that are equivalent to another one.

After CHESS (Musuvathi and Qadeer, PLDI'07) and bounded partial-order reduction (Coons, Musuvathi and McKinley,
OOPSLA'13). Two arguments keep the number small. Both require that every execution is also checked for races.

1. A block is preempted only before a strong access to memory that another block also accesses. A switch before a plain
access shows no more than a switch before the next strong one.

2. A preemption before access `a` is left out if the block runs again before any other block has accessed the memory of
`a`. A schedule that performs `a` first and preempts the block before its next strong access (or not at all, if it
cannot continue) has the same result. The block's accesses in between are plain. If they conflicted with the other
blocks' accesses, that would be a race, because nothing but `a` could order the two. So the search skips such a
preemption, and the one moved towards the end reaches a place that is not skipped. Later preemptions of a run are tried
before earlier ones. So it is often known how a block would behave if it were scheduled earlier: the same, if it
accesses none of the memory that was accessed in between.

A repeated read without a new value is ignored here, unless its loop also reads other memory: then it matters which of
two words changes between the reads. (A loop that reads one word three times or more, uses each value, and does not
wait, would be mistaken for a wait. No shipped kernel has one.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tricomm.explorer.schedule.strategies import default
from tricomm.explorer.schedule.tasks import Task

_IDLE = b"a repeated read"


@dataclass(frozen=True, slots=True)
class Touch:
    """An access: its task, words and source line, and the value that it has read."""

    task: str
    words: frozenset[tuple[str, int]]
    writes: bool
    line: object = None
    value: bytes = b""

    def conflicts(self, other: Touch) -> bool:
        return (self.writes or other.writes) and not self.words.isdisjoint(other.words)


def _idle(read: Touch) -> Touch:
    return Touch(read.task, frozenset(), False, read.line, _IDLE)


@dataclass(slots=True)
class _Fork:
    """A decision: the ready tasks, the task taken, and the numbers of accesses and of preemptions before it."""

    ready: list[str]
    taken: int
    preempts: bool
    spent: int
    at: int
    # For each block, its accesses until only the preempted block could run; None if another block ran in between.
    turns: dict[str, list[Touch] | None] = field(default_factory=dict)
    idle: bool = False  # the running block would only have polled until it was parked


class BoundedSearch:
    """A strategy that runs every schedule with at most `preemptions` preemptions, or an equivalent one.

    If the running block cannot continue, every ready block is tried. That switch is not a preemption.

        search = BoundedSearch(2)
        while search.begin():
            ... one execution with `search` as its strategy, and `search.saw` called after every access ...
            search.end()
    """

    hosts_first = True

    def __init__(self, preemptions: int) -> None:
        self._most = preemptions
        self._path: list[_Fork] = []
        self._at = 0
        self._trace: list[Touch | None] = []
        self._parked: list[int] = []  # indices in the trace
        self._over = False

    def begin(self) -> bool:
        """Begin a schedule; False if every schedule has been run."""
        self._at = 0
        self._trace, self._parked = [], []
        return not self._over

    def saw(self, touch: Touch | None) -> None:
        """Note an access. None stands for host code, across which no access may be moved."""
        self._trace.append(touch)

    def parked(self, task: str) -> None:
        """Note that the last access was a read without a new value, after which its block is parked."""
        self._parked.append(len(self._trace) - 1)

    def choose(self, step: int, current: Task | None, ready: list[Task]) -> Task:
        first = default(current, ready)
        preempts = current in ready
        if len(ready) == 1 or (preempts and not first.sync):
            return first
        order = [first, *(t for t in ready if t is not first)]
        if self._at < len(self._path):
            fork = self._path[self._at]
            if fork.ready != [t.key for t in order]:
                raise RuntimeError(
                    f"the function does not repeat itself: step {step} has other blocks ready than before"
                )
        else:
            spent = self._path[-1].spent if self._path else 0
            fork = _Fork([t.key for t in order], 0, preempts, spent, len(self._trace))
            self._path.append(fork)
        self._at += 1
        return order[fork.taken]

    def end(self) -> None:
        """End a schedule, and choose the next one: change the last decision that has an untried block."""
        del self._path[self._at :]
        self._set_idle()
        self._note_turns()
        self._skip_equivalent()
        while self._path:
            fork = self._path.pop()
            before = self._path[-1].spent if self._path else 0
            spent = before + (1 if fork.preempts else 0)
            taken = fork.taken + 1
            while taken < len(fork.ready) and self._known(fork, taken):
                taken += 1
            if taken < len(fork.ready) and spent <= self._most:
                fork.taken, fork.spent = taken, spent
                self._path.append(fork)
                return
            self._inherit_turns(fork)
        self._over = True

    def _known(self, fork: _Fork, taken: int) -> bool:
        """True if scheduling block `taken` would show nothing new."""
        return (
            fork.idle
            or fork.turns.get(fork.ready[taken]) is not None
            or self._resumes_without_effect(fork.ready[taken], fork.at)
        )

    def _set_idle(self) -> None:
        """Mark the repeated reads of a polling loop over one word as idle, except the first read of a value, which the
        block may use."""
        for place in self._parked:
            last = self._trace[place]
            assert last is not None
            mine = [n for n, touch in enumerate(self._trace) if touch is not None and touch.task == last.task]
            at = mine.index(place)
            again = self._trace[mine[at + 1]] if at + 1 < len(mine) else None
            if last.writes or again is None or (again.words, again.line) != (last.words, last.line):
                continue
            first = at
            while first and self._trace[mine[first - 1]] in (last, _idle(last)):
                first -= 1
            for n in mine[first + 1 : at + 1]:
                self._trace[n] = _idle(last)

    def _note_turns(self) -> None:
        """Note the accesses of each block that this execution has scheduled at a decision for the first time."""
        for fork in self._path:
            if fork.preempts and not fork.taken and fork.at < len(self._trace):
                touch = self._trace[fork.at]
                fork.idle = touch is not None and touch.value is _IDLE
            block = fork.ready[fork.taken]
            if fork.preempts and fork.taken and block not in fork.turns:
                back = self._back(fork)
                turn = self._trace[fork.at : back]
                alone = all(touch is not None and touch.task == block for touch in turn)
                forced = back is not None and all(f.at != back for f in self._path)
                fork.turns[block] = [t for t in turn if t is not None] if alone and forced else None

    def _inherit_turns(self, fork: _Fork) -> None:
        """The decision `fork` is exhausted. Pass its results on to an earlier decision of the same block, which then
        need not try blocks that would behave in the same way."""
        earlier = self._path[-1] if self._path else None
        if earlier is None or not (fork.preempts and earlier.preempts) or earlier.taken:
            return
        between = self._trace[earlier.at : fork.at]
        if earlier.ready[0] == fork.ready[0] and all(t is not None and t.task == fork.ready[0] for t in between):
            for block, turn in fork.turns.items():
                if turn is not None and not any(a.conflicts(b) for a in turn for b in between if b is not None):
                    earlier.turns[block] = turn

    def _skip_equivalent(self) -> None:
        """Drop the decisions that follow a preemption without effect, from where its block runs again."""
        for fork in self._path:
            if fork.preempts and fork.taken:
                back = self._back(fork)
                if back is not None and self._untouched(fork.at, back, back):
                    del self._path[next((n for n, f in enumerate(self._path) if f.at > back), len(self._path)) :]
                    return

    def _resumes_without_effect(self, task: str, at: int) -> bool:
        """True if `task` was preempted earlier, and no access since then conflicts with its next one."""
        for fork in reversed(self._path):
            if fork.preempts and fork.ready[0] == task and fork.taken:
                back = self._back(fork)
                return back is not None and back >= at and self._untouched(fork.at, at, back)
        return False

    def _back(self, fork: _Fork) -> int | None:
        """The index in the trace at which the block runs again that `fork` preempted."""
        places = range(fork.at, len(self._trace))
        return next((n for n in places if (touch := self._trace[n]) and touch.task == fork.ready[0]), None)

    def _untouched(self, first: int, last: int, access: int) -> bool:
        """True if no access from `first` to `last` conflicts with the one at `access`."""
        mine = self._trace[access]
        assert mine is not None
        return not any(other is None or mine.conflicts(other) for other in self._trace[first:last])
