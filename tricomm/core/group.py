"""The life of a group: its set-up, how a kernel is launched over it, its faults, its end.

`Communicator` adds the collectives. A fault costs the group and nothing else; everything that was opened is given
back by `close`, on whatever road the group ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from tricomm.core import launch_plan, nccl, topology_agreement
from tricomm.core.entry_guard import Turn, by_hand, guarded
from tricomm.core.faults import Faults
from tricomm.core.monitor import Native
from tricomm.core.runtime import PROCESSES, Runtime
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, TricommError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import Rows
from tricomm.metrics import publish
from tricomm.metrics.counters import Activity
from tricomm.options import Options
from tricomm.policy import backend_choice
from tricomm.policy.selection import Site
from tricomm.store.arena import Arena
from tricomm.store.control import ControlPage, Record, State
from tricomm.store.process import forks
from tricomm.topology.model import Topology

log = logging.getLogger("tricomm")
_LEAVE_SECONDS = 5.0
_STATUS, _ABORT = layout.STATUS, layout.ABORT
_ALONE = "nobody stands behind the kernels here"
_live: weakref.WeakSet[Group] = weakref.WeakSet()
_kept: list[Group] = []  # closed, and something may still use their memory


class Group(Faults):
    """Ranks that share an arena. Takes over `control` and `arena` and closes them with itself; until it is made, `undo`
    does.

    `routes` says where calls may go, and why not to the kernels; by default there is nobody behind these.
    """

    def __init__(
        self,
        undo: ExitStack,
        control: ControlPage,
        arena: Arena,
        arena_layout: layout.Layout,
        device: torch.device,
        timeout: float,
        options: Options,
        runtime: Runtime = PROCESSES,
        topology: Topology | None = None,
        routes: backend_choice.Site | None = None,
    ) -> None:
        self.rank = control.rank
        self.world_size = control.world_size
        self.group = control.group
        self.device = device
        self._gpu: Gpu | None = runtime.gpu(device)
        # The kernels are interpreted on a CPU; no time measured there says anything about a GPU.
        self.simulated = self._gpu is None
        self.options = options
        self._control, self._arena, self._layout, self._runtime = control, arena, arena_layout, runtime
        self._timeout = timeout
        self.topology = topology or options.topology
        topology_agreement.check(options, self.world_size)
        self._pid, self._forks = os.getpid(), forks()
        self._closed = False
        self._turn = Turn()
        self._sequence = 0
        self._announce = control.announcer()
        self._owned: list[Arena] = []  # of symmetric memory
        self._captured = False  # whether a graph holds a call of this communicator
        self._plans: dict[tuple[Any, ...], launch_plan.Plan] = {}
        self._known: dict[tuple[Any, ...], launch_plan.Known] = {}
        self._nccl: nccl.Nccl | None = None  # made by the first call that goes there
        self.counted = True  # whether `tricomm.stats()` counts the calls here; a c10d group does that itself
        self._stream: Any = None  # of the last eager call, and its handle
        self._raw_stream: int | None = None
        self.stream: Any = None  # a rank's own stream, where all ranks live in one process (`tricomm.local`)
        self._words = control.words()
        self._flags = memoryview(self._words)  # type: ignore[arg-type]  # reads faster than an array
        self._words[layout.ENDED] = options.first_epoch
        reachable = all(arena.bases)
        self._routes = replace(
            routes or backend_choice.Site(device.type, self.world_size, 1, None, None, _ALONE), reachable=reachable
        )
        self._group = self._write_table() if self._routes.no_kernels is None else torch.empty(0)
        # The exchange behind the grid also says that every rank has written its table: only now may a kernel run.
        device_class, most = topology_agreement.agree_on_devices(control, device, options.max_blocks, timeout)
        table = runtime.table(control, device_class, device, self.topology, timeout)
        self._site = Site(
            device_class, self.world_size, arena_layout, most, options.blocks, options.tile,
            topology=self.topology.kind if self.topology is not None else "", reachable=reachable,
            tuned=table.rows if table is not None else (), tuned_name=table.name if table is not None else "",
        )  # fmt: skip
        self._monitor = runtime.monitor(control, timeout, options.stall_timeout)
        undo.callback(self._monitor.stop)
        undo.callback(_live.discard, self)
        self._activity = Activity(self.group, self.rank, self.world_size, device, self._monitor.waited, self._gpu)
        publish.add(self._activity)
        self._monitor.start(self._diagnose, self._describe)
        _live.add(self)

    def _write_table(self) -> torch.Tensor:
        """Fill the group table at the head of this rank's arena; the kernels read everything from there."""
        table = self._arena.tensor(self.rank, 0, (layout.HEADERS // 8,), torch.int64)
        control = getattr(self._arena, "control_address", self._control.device_words)
        values = topology_agreement.group_table(
            self.rank, self._arena.bases, control, self._layout, self.topology, self.options.first_epoch
        )
        table.copy_(torch.tensor(values, dtype=torch.int64))
        counters = torch.tensor(self._layout.first_counters(self.options.first_epoch), dtype=torch.int64)
        self._arena.tensor(self.rank, self._layout.channel_states, tuple(counters.shape), torch.int64).copy_(counters)
        if self._gpu is not None:  # the first kernel may run on another stream than this copy
            self._gpu.synchronize()
        return table

    @property
    def gpu(self) -> Gpu | None:
        """The GPU on whose streams the kernels run; None where they are interpreted."""
        return self._gpu

    @property
    def kind(self) -> str:
        """How memory is shared: posix_shm, cuda_ipc or local; none where NCCL serves every call."""
        return self._arena.kind

    @property
    def arena_layout(self) -> layout.Layout:
        """Where headers and mailboxes lie in an arena."""
        return self._layout

    @property
    def most_blocks(self) -> int:
        """The largest grid whose blocks are surely resident together on every rank's device."""
        return self._site.max_blocks

    @property
    def peer_ranges(self) -> list[tuple[int, int]]:
        """(first address, bytes) of every rank's arena as mapped in this process."""
        return [(base, self._arena.nbytes) for base in self._arena.bases]

    @property
    def group_table(self) -> torch.Tensor:
        """int64 tensor that `tricomm.kernels.primitives` take as `group`: who am I, where my peers are."""
        return self._group

    @property
    def reachable(self) -> bool:
        """Whether every rank's memory is mapped on every other."""
        return self._site.reachable

    @guarded
    def announce(self, record: Record) -> None:
        """Tell the peers of a call that all ranks make by other means, so that who makes a different one is named."""
        self._usable()
        with self._my_turn():
            self._sequence += 1
            self._announce(self._sequence, record)

    @guarded
    def withdraw(self, calls: int) -> None:
        """Take back the last `calls` that were announced, for they were refused before anything was sent."""
        with self._my_turn():
            self._sequence -= calls

    def watch(self, native: Native) -> None:
        """Ask `native`, who makes such calls, for its errors too, and abort it where the group is given up."""
        self._monitor.watch(native)

    @guarded
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for the calls on the current stream; raises the group's fault, or `CollectiveTimeout`.

        `timeout` is in seconds (default: the communicator's).
        """
        self._usable()
        self._wait(self._timeout if timeout is None else timeout)

    @by_hand
    def close(self) -> None:
        """Leave the group and give everything back. Idempotent; a forked child's copy only forgets.

        If calls were captured in a CUDA graph, memory stays allocated until the process ends: a replay is harmless
        then, and its output undefined.
        """
        try: self._close(again=False)  # noqa: E701  # fmt: skip
        except BaseException as error:
            self._unwound(error)
            self._close(again=True)
            raise

    def _close(self, again: bool) -> None:
        """Every step may be repeated: the one before may have been interrupted."""
        if self._closed and not again:
            return
        self._closed = True
        _live.discard(self)
        if os.getpid() != self._pid:
            return
        if not self._quiet():
            # A kernel still works on raw addresses: what it works on stays mapped until the process ends.
            log.error("%s: a kernel has not left within %g s; its memory is kept", self, _LEAVE_SECONDS)
            _kept.extend(() if self.simulated else (self,))  # interpreted, its own thread holds on to the group
            if self._monitor.fault is None:  # else the peers have been told already
                self._control.set_state(State.CLOSED)
            self._monitor.stop()
            return
        if self._captured:
            self._keep()
            return
        with ExitStack() as undo:
            undo.callback(self._control.close)
            if self._settled(_LEAVE_SECONDS):
                undo.callback(self._arena.close)
            else:
                log.error("%s: a peer has not taken a message yet, and will say so here; its memory is kept", self)
            for arena in self._owned:
                undo.callback(arena.close)
            undo.callback(lambda: nccl.end(self._nccl, self._monitor.fault is not None, _LEAVE_SECONDS))
            undo.callback(self._monitor.stop)
            # Views keep a mapping alive; the words keep what they said.
            self._group, self._words = torch.empty(0), self._words.copy()
            self._flags = memoryview(self._words)  # type: ignore[arg-type]  # reads faster than an array

    def _keep(self) -> None:
        """A captured graph may be replayed at any time: all that its kernels use stays until the process ends.

        They are told to leave, so a replay ends soon, and its output is undefined.
        """
        _kept.append(self)
        self._words[layout.ABORT] = 1
        with ExitStack() as undo:
            undo.callback(self._control.set_state, State.CLOSED)
            for arena in (self._arena, *self._owned):
                undo.callback(arena.keep)
            undo.callback(self._monitor.stop)

    def _settled(self, seconds: float) -> bool:
        """True where no peer will touch this rank's memory any more; waits that long for it."""
        return True

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # between two calls; say what it was before the group is closed
            self.interrupted(error)
        self.close()

    def __repr__(self) -> str:
        return f"tricomm group {self.group}, rank {self.rank} of {self.world_size} on {self.device}"

    def _usable(self) -> None:
        if forks() != self._forks:
            raise InvalidArgument(
                f"{self}: made in process {self._pid}, forked into {os.getpid()}; make a new one here"
            )
        if self._closed:
            raise GroupAborted(f"{self}: closed; make a new communicator")
        if self._flags[_STATUS] or self._flags[_ABORT] or self._monitor.fault is not None:
            self.check()

    # The way of a call

    def _launch(self, chosen: launch_plan.Plan, x: torch.Tensor, y: torch.Tensor, rows: Rows = ()) -> None:
        """Tell the peers what comes, then run it. One call at a time: threads that share a group take turns.

        Made for speed: on a GPU this and what it calls is most of what a small collective costs the host.
        """
        turn = self._turn
        if turn.mine() or not turn.acquire(False):
            self._await_turn()
        try:
            if self._closed:
                raise GroupAborted(f"{self}: closed; make a new communicator")
            gpu = self._gpu
            if gpu is not None and gpu.raw_stream() != self._raw_stream:
                self._follow_stream(gpu)
            self._sequence = sequence = self._sequence + 1
            self._announce(sequence, chosen.record)
            lost = self._monitor.lost
            if lost is not None:
                self._monitor.died(lost)
                self._raise()
            chosen.count[0] += 1
            try:
                chosen.run(x, y, chosen.numel, (sequence & 0x7FFFFFFF) << 32 | chosen.fingerprint, rows)
            except BaseException as error:
                self._not_launched(error)
                raise
            chosen.tally.total += chosen.weight
        finally:
            turn.release()
        if self.simulated:
            self.check()

    def _await_turn(self) -> None:
        if self._turn.mine():
            raise InvalidArgument(
                f"{self}: a call inside another call of the same thread; a signal handler or a destructor makes it: "
                "let it set a flag instead"
            )
        if not self._turn.acquire(timeout=self._timeout):
            raise CollectiveTimeout(f"{self}: timeout after {self._timeout:g} s: another thread's call still runs")

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        self._await_turn()
        try:
            if self._closed:
                raise GroupAborted(f"{self}: closed; make a new communicator")
            if self._gpu is not None:
                self._follow_stream(self._gpu)
            yield
        finally:
            self._turn.release()

    def _follow_stream(self, gpu: Gpu) -> None:
        """Order this call after the last one if the caller has changed streams: there is one pair of mailboxes."""
        if gpu.capturing():
            return
        stream = gpu.stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream, self._raw_stream = stream, gpu.raw_stream()

    def _guarded(self, run: Callable[[], None]) -> None:
        """Run a kernel; whatever stops this rank in the middle of it (Ctrl-C above all) is told to the others."""
        try:
            run()
        except BaseException as error:
            self._not_launched(error)
            raise
        if self.simulated:
            self.check()

    def _wait(self, timeout: float) -> None:
        if self._gpu is not None and not self._gpu.capturing():
            event = self._gpu.recorded(self._stream)
            end = time.monotonic() + timeout
            while not event.query():
                self.check()
                if time.monotonic() > end:
                    raise CollectiveTimeout(f"{self}: timeout after {timeout:g} s: the stream has not finished")
                time.sleep(2e-5)
        self.check()

    def _quiet(self) -> bool:
        """Let kernels in flight end before their memory goes, and tell those to leave that cannot end by themselves."""
        if self._turn.mine():  # a signal handler closes the group in the middle of a call
            self._monitor.give_up(self._fault(GroupAborted, f"rank {self.rank} closed the group during a call"))
            return False
        if not self._turn.acquire(False):  # another thread is in a call
            self._monitor.give_up(self._fault(GroupAborted, f"rank {self.rank} closed the group during a call"))
            if not self._turn.acquire(timeout=_LEAVE_SECONDS):
                return False
        try:
            if self._gpu is None or self._stream is None:
                return True
            with self._gpu.here():
                return self._left_stream()
        finally:
            self._turn.release()

    def _left_stream(self) -> bool:
        try:
            self._wait(self._timeout)
            return True
        except TricommError:
            self._words[layout.ABORT] = 1
        end = time.monotonic() + _LEAVE_SECONDS
        while not self._stream.query():
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True


@atexit.register
def _close_all() -> None:
    for comm in list(_live):
        if comm._pid == os.getpid():
            log.warning("%s was not closed; closing it at exit", comm)
            comm.close()
