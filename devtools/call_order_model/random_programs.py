"""Random programs that work if each callback runs when it is attached. A statement uses only futures of earlier
ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from devtools.call_order_model.ranks import All, Call, Program, Statement, Then, Wait


def random_program(seed: int, calls: int, callbacks: int) -> Program:
    """A program of 2 to `calls` calls and `callbacks` statements Then or All. It waits for all futures."""
    return _Maker(random.Random(seed), calls, callbacks).made()


class _Maker:
    def __init__(self, rng: random.Random, calls: int, callbacks: int) -> None:
        self._rng, self._calls, self._callbacks = rng, calls, callbacks
        self._futures: list[str] = []  # in the order in which they exist if each callback runs when it is attached
        self._bodies: dict[str, tuple[Statement, ...]] = {}

    def made(self) -> Program:
        main = [self._call(), self._call()]
        while self._callbacks:
            main.append(self._statement())
        return {**self._bodies, "main": (*main, *(Wait(future) for future in self._futures))}

    def _statement(self) -> Statement:
        kind = self._rng.choice(["call", "then", "then", "all", "wait"])
        if kind == "call" and self._calls:
            return self._call()
        if kind in ("then", "all") and self._callbacks:
            self._callbacks -= 1
            child = f"f{self._callbacks}"
            if kind == "all":
                return self._new(All(tuple(self._rng.sample(self._futures, 2)), child))
            future, body = self._rng.choice(self._futures), f"callback {self._callbacks}"
            self._bodies[body] = tuple(self._body())
            return self._new(Then(future, body, child))
        return Wait(self._rng.choice(self._futures))

    def _body(self) -> Iterator[Statement]:
        if self._calls:
            yield self._call()
        for _ in range(self._rng.randint(0, 2)):
            yield self._statement()

    def _call(self) -> Statement:
        self._calls -= 1
        return self._new(Call(f"c{self._calls}"))

    def _new(self, statement: Call | Then | All) -> Statement:
        self._futures.append(statement.name if isinstance(statement, Call) else statement.child)
        return statement
