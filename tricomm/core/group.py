"""A group of ranks: which of them this one is, the memory that they share, and how long both last."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack

import torch

from tricomm.core import topology_agreement
from tricomm.core.bootstrap import Shared
from tricomm.core.runtime import Runtime
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import GroupArgument
from tricomm.options import Options
from tricomm.store.arena import Arena
from tricomm.store.control import RankState
from tricomm.store.process import forks

_NO_TABLE: tuple[torch.Tensor, GroupArgument] = (torch.empty(0), ())
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """One rank's end of a group. The constructor is collective, and takes over what is in `shared`.

    rank, world_size   this rank's number, and how many there are
    name               the group's, the same on all ranks
    device, gpu        of this rank's tensors; `gpu` is None if the kernels are interpreted on a CPU
    simulated          whether the kernels are interpreted: no time measured then says anything about a GPU
    table              int64 tensor that users' kernels read everything from: ranks, addresses, sizes
    argument           the same for the shipped kernels: `layout.group_argument`
    routes             which backends there are for its calls
    words, flags       the control words that this rank's kernels and its host share; `flags` reads faster
    closed             whether calls are refused: it has been closed, or this process is a forked child
    max_blocks         the largest grid whose blocks are surely resident together on every rank's device
    owned              arenas of symmetric memory, which end with the group
    """

    def __init__(
        self, shared: Shared, device: torch.device, timeout: float, options: Options, runtime: Runtime
    ) -> None:  # fmt: skip
        control = shared.control
        self.rank, self.world_size, self.name = control.rank, control.world_size, control.group
        self.device, self.timeout, self.options, self.runtime = device, timeout, options, runtime
        self.control, self.arena, self.layout = control, shared.arena, shared.layout
        self.topology, self.routes = shared.topology or options.topology, shared.routes
        topology_agreement.check(options, self.world_size)
        self.gpu: Gpu | None = runtime.gpu(device)
        self.simulated = self.gpu is None
        self.pid, self.forks = os.getpid(), forks()
        self.closed = False
        _groups.add(self)
        self.owned: list[Arena] = []
        self.words = control.words()
        self.flags = memoryview(self.words)  # type: ignore[arg-type]  # reads faster than an array
        self.words[layout.ENDED] = options.first_epoch
        self.reachable = all(self.arena.bases)
        self.table, self.argument = self._write_table() if self.routes.no_kernels is None else _NO_TABLE
        facts = runtime.facts(device)
        # This exchange also says that every rank has written its table: only after it may a kernel run.
        device_class, most = topology_agreement.agree_on_devices(control, facts, options.max_blocks, timeout)
        self.device_class, self.max_blocks = device_class, most

    def _write_table(self) -> tuple[torch.Tensor, GroupArgument]:
        """Fill the group table at the head of this rank's arena, and the counters of its messages."""
        arena, memory = self.arena, self.layout
        table = arena.tensor(self.rank, 0, (layout.HEADERS // 8,), torch.int64)
        control = getattr(arena, "control_address", self.control.device_words)
        values = topology_agreement.group_table(
            self.rank, arena.bases, control, memory, self.topology, self.options.first_epoch
        )
        table.copy_(torch.tensor(values, dtype=torch.int64))
        counters = torch.tensor(memory.first_counters(self.options.first_epoch), dtype=torch.int64)
        arena.tensor(self.rank, memory.queue_states, tuple(counters.shape), torch.int64).copy_(counters)
        if self.gpu is not None:  # the first kernel may run on another stream than this copy
            self.gpu.synchronize()
        return table, layout.group_argument(table, values, self.world_size)

    def leave_to_graphs(self, undo: ExitStack) -> None:
        """Leave the memory to the graphs that were captured over it; `undo` ends what else there is.

        A graph may be replayed at any time until the process ends. Its kernels are told to leave, so a replay ends
        soon, and its output is undefined.
        """
        self.words[layout.ABORT] = 1
        undo.callback(self.control.set_state, RankState.CLOSED)
        for arena in (self.arena, *self.owned):
            undo.callback(arena.keep)

    def release(self, undo: ExitStack, acknowledged: bool) -> None:
        """Let `undo` give the memory back; not the arena if a peer will still acknowledge a message there."""
        undo.callback(self.control.close)
        if acknowledged:
            undo.callback(self.arena.close)
        for arena in self.owned:
            undo.callback(arena.close)

    def forget_views(self) -> None:
        """Drop the tensors and views that keep mappings alive; the words keep what they said."""
        self.table, self.argument = _NO_TABLE
        self.words = self.words.copy()
        self.flags = memoryview(self.words)  # type: ignore[arg-type]  # reads faster than an array

    def __str__(self) -> str:
        return f"tricomm group {self.name}, rank {self.rank} of {self.world_size} on {self.device}"


def _after_fork() -> None:
    """In a child: its copies of the groups are closed, so that a call need not ask in which process it is made."""
    for group in list(_groups):
        group.closed = True


os.register_at_fork(after_in_child=_after_fork)
