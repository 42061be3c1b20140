"""The search through every state that a model of events can reach, and the comparison of verdicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=tuple[object, ...])
SAFE = "safe"


def search(
    start: State, moves: Callable[[State], Iterable[State | str]], want: str = SAFE, limit: int = 1_000_000
) -> tuple[str, int]:
    """The verdict and the number of visited states: all states, or all up to the first one with the fault `want`.

    `moves(state)` returns the next states, and faults as strings. The verdict is `want` if some order has this fault,
    otherwise the first fault, or SAFE if there is none. Raises RuntimeError for more than `limit` states.
    """
    seen, stack, faults = {start}, [start], list[str]()
    while stack and want not in faults:
        for state in moves(stack.pop()):
            if isinstance(state, str):
                faults.append(state)
            elif state not in seen:
                seen.add(state)
                stack.append(state)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states: make the case smaller")
    return want if want in faults else [*faults, SAFE][0], len(seen)


def compare(cases: Iterable[tuple[str, str, Callable[[str], tuple[str, int]]]]) -> None:
    """Print the verdict on each case (name, wanted verdict, exploration), and exit, with 1 if a verdict is not the
    wanted one."""
    wrong = 0
    for name, want, explore in cases:
        verdict, states = explore(want)
        wrong += verdict != want
        print(f"{'ok ' if verdict == want else 'BAD'} {name}: {verdict} ({states} states)", flush=True)
    sys.exit(int(wrong > 0))
