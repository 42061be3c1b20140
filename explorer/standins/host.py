"""The host code of one rank of a program that makes its group, its memory and its launches through torch and Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tricomm.communicator import Communicator
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.explorer.memory_model.regions import Memory


class ProgramHost:
    """A rank's state. `in_program` is True while the program's own code runs, and False inside a stand-in, which needs
    torch as it is."""

    def __init__(self, comm: Communicator, memory: Memory, board: dict[int, list[Any]], architecture: int) -> None:
        self.comm, self.memory, self.rank, self.world_size = comm, memory, comm.rank, comm.world_size
        self.architecture = architecture  # 90 of sm_90
        self.config = 0  # the number of the configuration that autotuned kernels take
        self.in_program = False
        self.symmetric: Any = None  # its `SymmetricMemories`
        self.modules: Any = None  # its `ModuleState`
        self.group: Any = None  # the default process group
        self.workspaces: dict[str, torch.Tensor] = {}  # torch's workspace tensor of each group name
        self.streams: dict[int, Any] = {}  # torch's streams for symmetric memory, by priority
        ranks = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.world_size}
        ranks["LOCAL_WORLD_SIZE"] = comm.world_size
        self.environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        self.environment |= {name: str(value) for name, value in ranks.items()}
        self._board, self._exchanges = board, 0

    @contextmanager
    def library(self) -> Iterator[None]:
        """Around the code of a stand-in."""
        before, self.in_program = self.in_program, False
        try:
            yield
        finally:
            self.in_program = before

    def calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as code of a stand-in."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.library():
                return function(*args, **kwargs)

        return called

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order.

        Raises `CollectiveMismatch` on all ranks if they do not make the same call.
        """
        self.comm.synchronize()
        self._exchanges += 1
        posted = self._board.setdefault(self._exchanges, [None] * self.world_size)
        posted[self.rank] = value
        group = self.comm._group
        try:
            group.control.require_equal(what, "torch.distributed", group.timeout, abort_on_fault=True)
        except InvalidArgument as error:
            raise CollectiveMismatch(str(error)) from None
        return posted
