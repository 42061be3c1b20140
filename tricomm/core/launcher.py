"""Runs the plan of a call: one call at a time, announced to the peers, in stream order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import time_ns
from typing import Any

import torch
from torch.autograd import profiler

from tricomm.core.entry_guard import Guard
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launch_plan import LaunchPlan
from tricomm.core.watch import call_states
from tricomm.core.watch.monitor import Monitor
from tricomm.core.work import Work
from tricomm.deadline import TimeSource, poll
from tricomm.errors import GroupAborted, InvalidArgument, TricommError
from tricomm.gpu import Gpu
from tricomm.kernels import layout
from tricomm.kernels.launch.kernel_launch import Again, Rows
from tricomm.metrics.call_trace import CallTrace
from tricomm.metrics.flight_document import Entry, Made
from tricomm.policy.selection import Choice
from tricomm.store.control import PackedDescriptor

_ENDED = layout.ENDED
LEAVE_SECONDS = 5.0  # for a kernel that has been aborted, a peer that has to receive messages, and the end of NCCL


def decided(choice: Choice, mode: str) -> dict[str, Any]:
    """The keys of a call for a profiler: its kernel, and the row of a table that selected it (-1: the caller)."""
    return {
        "Mode": mode,
        "Route": choice.route,
        "Algorithm": choice.counted_as,
        "Protocol": choice.protocol,
        "Blocks": choice.blocks,
        "Table": choice.table,
        "Table row": -1 if choice.row is None else choice.row,
        "Reason": choice.reason,
    }


def _settle(living: weakref.ref[Group], entries: list[Entry]) -> None:
    if (group := living()) is not None:
        call_states.on_gpu(entries, group.flags, group.layout, group.world_size)


class Launcher:
    """Launches the calls of one group.

    lock       held by the thread whose call is being made
    guard      of all public calls
    sequence   number of the latest collective; calls of all ranks with the same number belong together
    captured   whether a CUDA graph holds a call of this group
    trace      shows the calls to a profiler
    several    whether calls were made on several streams; from then on an event follows each eager call, which may
               prevent the overlap of dependent launches
    """

    def __init__(self, group: Group, faults: Faults, monitor: Monitor) -> None:
        self.lock = group.runtime.call_lock()
        self.guard = Guard(self.lock, faults.interrupted)
        self.sequence = 0
        self.captured = self.several = False
        self._group, self._faults, self._monitor = group, faults, monitor
        self._gpu, self._simulated = group.gpu, group.simulated
        self._announce = group.control.announcer()
        recorder = group.recorder
        self.trace = CallTrace(recorder)
        self._shows = self.trace.by_default
        self._record: Any = recorder.numbered if recorder.on else None
        self._records = len(recorder.numbered)
        recorder.settle = call_states.on_cpu if self._simulated else partial(_settle, weakref.ref(group))
        self._stream: Any = None  # of the last eager call, and its handle
        self._raw_stream: int | None = None
        self._last: Any = None  # the event after the last eager call; None if something may have been launched after it

    def launch(
        self,
        plan: LaunchPlan,
        x: torch.Tensor,
        y: torch.Tensor,
        rows: Rows = (),
        again: Again | None = None,
        addresses: Sequence[int] = (),
    ) -> None:
        """Announce the call to the peers, then run it: through `again` if there is one, over the memory at `addresses`.
        Threads that share a group take turns.

        Optimised for speed: on a GPU this is most of a small collective's host time.
        """
        lock = self.lock
        if lock.mine() or not lock.acquire(False):
            self._wait_for_lock()
        try:
            if self._group.refusing:
                self._faults.raise_refused()
            gpu = self._gpu
            if gpu is not None:
                stream = gpu.raw_stream()
                if stream != self._raw_stream and plan.mode == "eager":
                    self._follow_stream(gpu)
            self.sequence = sequence = self.sequence + 1
            self._announce(sequence, plan.record)
            if (record := self._record) is not None:
                entry = sequence, plan.record, time_ns(), self._group.flags[_ENDED]
                record[sequence % self._records] = entry
            lost = self._monitor.lost
            if lost is not None:
                self._faults.raise_lost(lost)
            try:
                number = sequence & 0x7FFFFFFF
                if profiler._is_profiler_enabled or self._shows:
                    self._show(
                        partial(plan.run, x, y, plan.numel, number << 32 | plan.fingerprint, rows)
                        if again is None
                        else partial(again, addresses, number, stream),
                        plan,
                        x,
                        rows,
                    )
                elif again is None:
                    plan.run(x, y, plan.numel, number << 32 | plan.fingerprint, rows)
                else:
                    again(addresses, number, stream)
            except BaseException as error:
                self._faults.not_launched(error)
                raise
            if rows and record is not None:
                record[sequence % self._records] = *entry, 0, (x.shape, y.shape)
            plan.tally.total += plan.weight
            if self.several and plan.mode == "eager" and gpu is not None:
                self._last = gpu.recorded(self._stream)
        finally:
            lock.release()
        if self._simulated:
            self._faults.check()
            if record is not None:
                record[sequence % self._records] = *entry, time_ns(), (x.shape, y.shape)

    def _show(self, launch: Callable[[], None], plan: LaunchPlan, x: torch.Tensor, rows: Rows) -> None:
        """Launch a collective inside an event of the profiler, as torch's operators do, so that the profiler links its
        kernel."""
        what: Any = plan.record
        how, tensor = partial(decided, plan.choice, plan.mode), None if plan.choice.collective == "barrier" else x
        if plan.choice.collective == "all_to_all_v":
            row = x[0].numel() if len(x) else 0
            splits = [row * n for n in rows[0]], [row * n for n in rows[1]]
            what = Made("all_to_all_v", "none", x.dtype, x.numel(), -1, (), splits)
        with self.trace.shown(what, how, tensor, self.sequence):
            launch()

    def run(self, kernel: Callable[[], None]) -> None:
        """Run a kernel that is no collective, with the lock held; if an exception ends it, the other ranks are told."""
        try:
            kernel()
        except BaseException as error:
            self._faults.not_launched(error)
            raise
        if self._simulated:
            self._faults.check()

    @contextmanager
    def held(self, while_suspended: bool = False) -> Iterator[None]:
        """A context manager that holds the call lock for a call that is no collective, which is ordered after the last
        call."""
        self._wait_for_lock()
        try:
            if self._group.closed or self._group.suspended is not while_suspended:
                self._faults.raise_refused()
            if self._gpu is not None and not self._gpu.capturing():
                self._follow_stream(self._gpu)
            self._last = None
            yield
        finally:
            self.lock.release()

    def _wait_for_lock(self) -> None:
        group = self._group
        if self.lock.mine():
            raise InvalidArgument(
                f"{group}: a call inside another call of the same thread; a signal handler or a destructor makes it: "
                "let it set a flag instead"
            )
        if not self.lock.acquire(timeout=group.timeout):
            raise self._faults.late(group.timeout, "another thread's call still runs")

    def _follow_stream(self, gpu: Gpu) -> None:
        """Order this call, which is not captured, after the last one if the caller has changed streams, because the
        calls share the mailboxes. It waits only for the last call if an event follows that call and no graph with calls
        may have been replayed since; otherwise for all work that is queued on the other stream."""
        stream = gpu.stream()
        if self._stream is not None and self._stream != stream:
            if self._last is None or self.captured:
                stream.wait_stream(self._stream)
            else:
                self._last.wait(stream)
            self.several = True
        self._stream, self._raw_stream = stream, gpu.raw_stream()

    def finish(self, result: Any, async_op: bool) -> Any:
        """`result`, or a `Work` of it if `async_op`."""
        if not async_op:
            return result
        event, gpu, known = None, self._gpu, self._stream
        if gpu is not None:  # reuses the object for the stream of the last eager call
            event = gpu.recorded(known if known is not None and known.cuda_stream == gpu.raw_stream() else None)
        return Work(self._faults, self.guard, result, event)

    # Calls that all ranks make by another backend

    def announce(self, descriptor: PackedDescriptor, made: tuple[Any, ...]) -> None:
        """Announce a call that all ranks make by another backend, so that a rank with a different call is detected."""
        self._faults.check_usable()
        with self.held():
            self.sequence += 1
            self._announce(self.sequence, descriptor)
            if self._record is not None:
                self._record[self.sequence % self._records] = self.sequence, made, time_ns(), None

    def withdraw(self, calls: int) -> None:
        """Withdraw the last `calls` that were announced, because they were refused before anything was sent."""
        with self.held():
            self.sequence -= calls
            self._group.recorder.withdraw(self.sequence)

    # The end of calls

    def wait(self, timeout: float) -> None:
        """Wait for the calls on the current stream; raises the group's fault, or `CollectiveTimeout`."""
        if self._gpu is not None and not self._gpu.capturing():
            event = self._gpu.recorded(self._stream)
            if not poll(event.query, timeout, 2e-5, meanwhile=self._faults.check, clock=self._gpu.clock):
                raise self._faults.late(timeout, "the stream has not finished")
        self._faults.check()

    def drained(self) -> bool:
        """Wait for kernels in flight before their memory is freed, and abort kernels that do not finish; False if one
        does not end."""
        text = f"rank {self._group.rank} closed the group during a call"
        if self.lock.mine():  # a signal handler closes the group in the middle of a call
            self._faults.abort(GroupAborted, text)
            return False
        if not self.lock.acquire(False):  # another thread is in a call
            self._faults.abort(GroupAborted, text)
            if not self.lock.acquire(timeout=LEAVE_SECONDS):
                return False
        try:
            if self._gpu is None or self._stream is None:
                return True
            with self._gpu.here():
                return self._left_stream(self._gpu.clock)
        finally:
            self.lock.release()

    def _left_stream(self, clock: TimeSource) -> bool:
        try:
            self.wait(self._group.timeout)
            return True
        except TricommError:
            self._group.words[layout.ABORT] = 1
        return poll(self._stream.query, LEAVE_SECONDS, 1e-3, clock=clock)
