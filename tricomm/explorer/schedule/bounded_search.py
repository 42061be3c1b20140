"""Every schedule with few preemptions, one after another, without those that differ from another one in nothing.

After CHESS (Musuvathi and Qadeer, PLDI'07) and bounded partial-order reduction (Coons, Musuvathi and McKinley,
OOPSLA'13). Two arguments keep the number small; both need that every execution is also examined for races.

A block is preempted only before a strong access to memory that another block touches, too: a switch before a plain
access shows nothing that a switch before the next strong one does not.

Nor does a preemption before access `a` whose block runs on before anybody has touched what `a` touches: the same
happens where `a` is done first, and its block preempted before its next strong access (or not at all, where it cannot
go on). What the block does in between is plain; if it clashed with what the others did meanwhile, that would be a
race, as nothing but `a` could order the two. So what would follow is passed by, and the preemption that is moved
towards the end comes to a place that is not. Later preemptions of a run are tried before earlier ones, so often it is
known what a block would do if it were let in earlier: the same, if it does not touch what was done in between.

A look that finds nothing new, and is repeated until it does, counts for nothing in all this; unless its loop looks at
other places, too, for then it matters what changes between two of them. (A loop of three looks or more at one place
that uses what each has found, and does not wait, is taken for a wait: no kernel of ours has one.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tricomm.explorer.schedule.scheduler import default
from tricomm.explorer.schedule.tasks import Task

_IDLE = b"a look that is repeated"


@dataclass(frozen=True, slots=True)
class Touch:
    """An access of an execution: whose, to which words, at which line, and what it has read."""

    task: str
    words: frozenset[tuple[str, int]]
    writes: bool
    line: object = None
    value: bytes = b""

    def conflicts(self, other: Touch) -> bool:
        return (self.writes or other.writes) and not self.words.isdisjoint(other.words)


def _idle(look: Touch) -> Touch:
    return Touch(look.task, frozenset(), False, look.line, _IDLE)


@dataclass(slots=True)
class _Fork:
    """A decision: who was ready, who was taken, after how many accesses, and how many preemptions came before it."""

    ready: list[str]
    taken: int
    preempts: bool
    spent: int
    at: int
    # Of each block that was let in: what it did until only the preempted one could go on; None where it is not so.
    turns: dict[str, list[Touch] | None] = field(default_factory=dict)
    idle: bool = False  # the running block would only have looked, and slept


class BoundedSearch:
    """Every schedule with at most `preemptions` preemptions, each or one that is equal to it.

    Where the running block cannot go on, whoever can is tried, which costs nothing.

        search = BoundedSearch(2)
        while search.begin():
            ... one execution with `search` as its strategy, and `search.saw` called after every access ...
            search.end()
    """

    def __init__(self, preemptions: int) -> None:
        self._most = preemptions
        self._path: list[_Fork] = []
        self._at = 0
        self._trace: list[Touch | None] = []
        self._parked: list[int] = []  # places in the trace
        self._over = False

    def begin(self) -> bool:
        """False when every schedule has been seen."""
        self._at = 0
        self._trace, self._parked = [], []
        return not self._over

    def saw(self, touch: Touch | None) -> None:
        """An access has been done; None is one that no other may be moved across."""
        self._trace.append(touch)

    def parked(self, task: str) -> None:
        """The last access was a look that found what was there before; its block now sleeps."""
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
        """After an execution: on to the next schedule, the last decision that has another way first."""
        del self._path[self._at :]
        self._set_idle()
        self._note_turns()
        self._pass_by()
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
            self._hand_on(fork)
        self._over = True

    def _known(self, fork: _Fork, taken: int) -> bool:
        """True where to let that block go on shows nothing new."""
        return (
            fork.idle
            or fork.turns.get(fork.ready[taken]) is not None
            or self._goes_on_for_nothing(fork.ready[taken], fork.at)
        )

    def _set_idle(self) -> None:
        """Make nothing of the looks of a loop that looks at one place, and again when its block has slept; but for the
        first that found what was there, which may have told it something."""
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
        """What the blocks did that this execution has let in for the first time."""
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

    def _hand_on(self, fork: _Fork) -> None:
        """A decision is done with. The same block's decision before it need not let in who would do the same there."""
        earlier = self._path[-1] if self._path else None
        if earlier is None or not (fork.preempts and earlier.preempts) or earlier.taken:
            return
        between = self._trace[earlier.at : fork.at]
        if earlier.ready[0] == fork.ready[0] and all(t is not None and t.task == fork.ready[0] for t in between):
            for block, turn in fork.turns.items():
                if turn is not None and not any(a.conflicts(b) for a in turn for b in between if b is not None):
                    earlier.turns[block] = turn

    def _pass_by(self) -> None:
        """Forget the decisions after a block that was preempted for nothing has gone on."""
        for fork in self._path:
            if fork.preempts and fork.taken:
                back = self._back(fork)
                if back is not None and self._untouched(fork.at, back, back):
                    del self._path[next((n for n, f in enumerate(self._path) if f.at > back), len(self._path)) :]
                    return

    def _goes_on_for_nothing(self, task: str, at: int) -> bool:
        """True where `task` was preempted before, would go on now, and nothing has happened that it minds."""
        for fork in reversed(self._path):
            if fork.preempts and fork.ready[0] == task and fork.taken:
                back = self._back(fork)
                return back is not None and back >= at and self._untouched(fork.at, at, back)
        return False

    def _back(self, fork: _Fork) -> int | None:
        """Where in the trace the block that `fork` preempted has gone on."""
        places = range(fork.at, len(self._trace))
        return next((n for n in places if (touch := self._trace[n]) and touch.task == fork.ready[0]), None)

    def _untouched(self, first: int, last: int, access: int) -> bool:
        """True where no access from `first` to `last` minds whether that at `access` is done before it."""
        mine = self._trace[access]
        assert mine is not None
        return not any(other is None or mine.conflicts(other) for other in self._trace[first:last])
