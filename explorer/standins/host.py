"""The host code of one rank of a program that makes its group, its memory and its launches through torch and Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.errors import CollectiveMismatch
from tricomm.explorer.memory_model.regions import Memory
from tricomm.explorer.world.world import Turns


class Board:
    """The values that the ranks' host code exchanges. Host code waits here for the values of other ranks.

    `turns` lets other ranks run. `met(rank, step, after)` is called when a rank gives its values for exchange `step`,
    and again (`after`) when it has the values of the other ranks.
    """

    def __init__(self, turns: Turns, met: Callable[[int, int, bool], None]) -> None:
        self._turns, self._met = turns, met
        self._given: dict[Any, dict[int, Any]] = {}
        # by id of the values: numbers of exchanges; negative, unlike those of a communicator
        self._steps: dict[int, int] = {}

    def values(self, key: Any) -> dict[int, Any]:
        """The values of an exchange, by rank."""
        given = self._given.setdefault(key, {})
        self._steps.setdefault(id(given), -len(self._given))
        return given

    def met(self, rank: int, given: dict[int, Any], after: bool) -> None:
        self._met(rank, self._steps[id(given)], after)
        if not after:
            self._turns.wake_hosts()

    def until(self, rank: int, done: Callable[[], bool]) -> None:
        while not done():
            self._turns.wait(rank)


class ProgramHost:
    """A rank's state. `in_program` is True while the program's own code runs, and False within a stand-in, which needs
    torch's own functions."""

    def __init__(self, comm: Communicator, memory: Memory, board: Board, architecture: int) -> None:
        self.comm, self.memory, self.rank, self.world_size = comm, memory, comm.rank, comm.world_size
        self.architecture = architecture  # 90 for sm_90
        # tensors whose addresses the program has read, so that a kernel may get them
        self.addressed: dict[int, torch.Tensor] = {}
        self.config = 0  # the number of the configuration that autotuned kernels take
        self.in_program = False
        self.symmetric: Any = None  # its `SymmetricMemories`
        self.modules: Any = None  # the `ModuleState` of all ranks
        self.default_device: Any = None  # of `torch.set_default_device`
        self.group: Any = None  # the default process group
        self.groups: dict[str, Any] = {}  # all process groups, by name
        self.groups_made = 0
        self.workspaces: dict[str, torch.Tensor] = {}  # torch's workspace tensor of each group name
        self.streams: dict[int, Any] = {}  # torch's streams for symmetric memory, by priority
        ranks = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.world_size}
        ranks["LOCAL_WORLD_SIZE"] = comm.world_size
        variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        variables |= {name: str(value) for name, value in ranks.items()}
        self.environment = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
        self._board = board
        self._exchanges: dict[str, int] = {}  # by group

    @contextmanager
    def library(self) -> Iterator[None]:
        """A context manager around the code of a stand-in."""
        before, self.in_program = self.in_program, False
        try:
            yield
        finally:
            self.in_program = before

    def calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, run as code of a stand-in."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.library():
                return function(*args, **kwargs)

        return called

    def exchange(self, what: str, value: Any, ranks: Sequence[int], group: str) -> list[Any]:
        """Exchange values in a call of `group`: the `value` of each of `ranks`, in their order.

        Raises `CollectiveMismatch` on all of them if they do not make the same call.
        """
        self.comm.synchronize()
        self._exchanges[group] = self._exchanges.get(group, 0) + 1
        given = self._board.values((group, self._exchanges[group]))
        given[self.rank] = what, value
        self._board.met(self.rank, given, after=False)
        self._board.until(self.rank, lambda: len(given) == len(ranks))
        self._board.met(self.rank, given, after=True)
        others = [rank for rank in ranks if given[rank][0] != given[ranks[0]][0]]
        if others:
            said = ", ".join(f"rank {rank} has {given[rank][0]}" for rank in (ranks[0], others[0]))
            raise CollectiveMismatch(f"torch.distributed: the ranks do not make the same call: {said}")
        return [given[rank][1] for rank in ranks]
