"""The order of a group's calls on the CPU, and the worker threads that all groups of a process share.

All ranks hand their collectives to Gloo, or to the kernels, in one order, so a group's calls run one after another.
They run on worker threads and not in the caller's: `async_op=True` never blocks, a caller that waits can be
interrupted, and overlapping groups may be used in different orders.

    caller: CallQueue.run -> inbox -> the leader, one of the workers -> it runs the call, another one leads -> inbox

One worker runs the asynchronous calls of all groups as long as they make progress. If one of them blocks for longer
than `_PATIENCE_SECONDS` while other groups have calls to run, one more worker starts, up to `_MOST_BLOCKED`. A caller
that waits blocks its own thread anyway, so its call gets a worker at once. The workers end when the last group does.

Interpreted kernels run one at a time in a process. If two ranks ran the kernels of two groups in different orders, each
would wait for the other, so the calls of groups over the kernels (`one_at_a_time`) run in the order in which they were
made, across all of these groups.

A future's callbacks belong to its call: the calls that they make (as PowerSGD's do) run at once, before those in the
queue. A callback may wait for a call in the queue and so never return: the queue goes on without it after a moment.

Only the leader touches the state of the queues, and callers only put messages into the inbox. So a caller holds no
lock, and an interrupt in the caller's thread cannot leave one taken.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tricomm.c10d.work_handles import FinishedWork, Latch, PendingWork
from tricomm.errors import GroupAborted

_PATIENCE_SECONDS = 0.1  # for an asynchronous call that blocks, while other groups have calls to run
_CALLBACK_SECONDS = 1.0  # for callbacks, while their group has calls to run
_MOST_BLOCKED = 8  # asynchronous calls that block at once
_DRAIN_SECONDS = 2.0
_IDLE_SECONDS = 2.0
log = logging.getLogger("tricomm")
_Message = tuple[str, "CallQueue | None", Any]
_numbers = itertools.count()


@dataclass(eq=False)
class _QueuedCall:
    number: int  # in the order of this process
    action: Callable[[], None]
    work: PendingWork
    waited_for: bool  # the caller waits in `run`
    nested: bool  # the caller is a callback of another call


@dataclass(eq=False)
class _RunningCall:
    """A call that a thread runs, or whose callbacks it runs."""

    group: CallQueue
    call: _QueuedCall
    thread: threading.Thread
    callbacks_since: float = 0.0  # monotonic; 0: the call itself runs
    abandoned: bool = False


class CallQueue:
    """Runs one group's calls in the order in which they were made.

    `one_at_a_time`: its calls run alone among those of all such groups.
    """

    def __init__(self, name: str, one_at_a_time: bool = False) -> None:
        self._name, self.one_at_a_time = name, one_at_a_time
        self._closed = self._used = False
        self.refusal: GroupAborted | None = None  # for the calls that are still in the queue
        self.current: _RunningCall | None = None
        self.calls: deque[_QueuedCall] = deque()  # the leader's, as are the next two
        self.ready_since = 0.0
        self.drained: Latch | None = None
        _workers.queues.add(self)

    def run(
        self, action: Callable[[], None], what: str, result: list[Any], async_op: bool,
        interrupted: Callable[[BaseException], None] = lambda error: None,
    ) -> Any:  # fmt: skip
        """Run `action` in its turn; returns a handle, which is finished if the caller waits.

        `interrupted(error)` is called if a foreign exception (Ctrl-C above all) ends a wait for the call.
        """
        if self._closed:
            raise GroupAborted(f"{what}: the group was destroyed; make a new one")
        current = self.current
        if current is not None and current.thread is threading.current_thread():  # a callback
            with torch.no_grad():
                action()
            return FinishedWork(result)
        work = PendingWork(what, result, interrupted)
        self._used = True
        nested = threading.current_thread() in _workers.threads
        _workers.put(("call", self, _QueuedCall(next(_numbers), action, work, not async_op, nested)))
        if not async_op:
            work.wait()
        return work

    def close(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Take no more calls. Those in the queue get `seconds` to end, and are then refused. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._used:  # without a message: no thread may start at the end of a process
            _workers.release(self)
            return
        drained, current = Latch(), self.current
        _workers.put(("close", self, drained))
        if current is None or current.thread is not threading.current_thread():
            drained.wait(seconds)
        self.refusal = GroupAborted(f"{self._name}: the group was destroyed; make a new one")
        _workers.put(("refuse", self, None))
        _workers.release(self)


class WorkerThreads:
    """The worker threads of a process. They start with the first call."""

    def __init__(self) -> None:
        self.queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._leading = threading.Lock()  # taken by workers only
        self._ready: list[CallQueue] = []
        self._runs: set[_RunningCall] = set()
        self.threads: set[threading.Thread] = set()

    def put(self, message: _Message) -> None:
        self._inbox.put(message)
        if not self.threads:
            self._start()

    def release(self, group: CallQueue) -> None:
        """Forget `group`; after the last one, wait a moment for the threads to end."""
        self.queues.discard(group)
        if self.queues or threading.current_thread() in self.threads:
            return
        self._inbox.put(("wake", None, None))
        end = time.monotonic() + 0.5
        for thread in list(self.threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="tricomm-worker", daemon=True).start()

    def _serve(self) -> None:
        me = threading.current_thread()
        self.threads.add(me)
        while (run := self._lead()) is not None:
            self._run(run)
            del run  # a thread that waits must not keep the last call's tensors
        self.threads.discard(me)
        if not self.threads and not self._inbox.empty():  # a message came while this thread, the last one, ended
            self._start()

    def _run(self, run: _RunningCall) -> None:
        error: BaseException | None = run.group.refusal
        if error is None:
            try:
                with torch.no_grad():  # a call moves data; autograd has no part in it
                    run.call.action()
            except Exception as failure:
                error = failure
            except BaseException as failure:
                error = GroupAborted(f"the call was ended by {type(failure).__name__}: {failure}")
        run.callbacks_since = time.monotonic()
        try:
            run.call.work.finish(error)
        except Exception:  # for example of a future that its user has completed: the next calls must run
            log.exception("the handle of a call could not be completed")
        self._inbox.put(("done", run.group, run))

    # The leader's part

    def _lead(self) -> _RunningCall | None:
        """Wait for a call that may run now; None if this thread is not needed any more."""
        with self._leading:
            idle = time.monotonic() + _IDLE_SECONDS
            while True:
                now = time.monotonic()
                self._abandon_callbacks(now)
                group = self._choose(now)
                if group is not None:
                    return self._begin(group)
                spare = len(self.threads) > len(self._runs) + 1
                if not self.queues and not self._runs and not self._ready and self._inbox.empty():
                    return None
                if spare and now > idle:
                    return None
                try:
                    message = self._inbox.get(timeout=_PATIENCE_SECONDS if self._ready or self._runs else _IDLE_SECONDS)
                except queue.Empty:
                    continue
                self._handle(*message)
                del message

    def _handle(self, kind: str, group: CallQueue | None, what: Any) -> None:
        if group is None:
            return
        if kind == "call":
            group.calls.append(what)
        elif kind == "close":
            group.drained = what
        elif kind == "refuse" and group.current is not None:  # it has not ended in time, and the others wait behind it
            self._abandon(group.current)
        elif kind == "done":
            self._runs.discard(what)
            if group.current is what:
                group.current = None
        self._make_ready(group)

    def _make_ready(self, group: CallQueue) -> None:
        if group.current is not None:
            return
        if group.calls and group not in self._ready:
            group.ready_since = time.monotonic()
            self._ready.append(group)
        elif not group.calls and group.drained is not None:
            group.drained.open()

    def _choose(self, now: float) -> CallQueue | None:
        ready = [group for group in self._ready if not group.one_at_a_time] + self._next_alone()
        blocking = sum(not run.call.waited_for and not run.abandoned for run in self._runs)
        for group in ready:
            if not blocking or group.calls[0].waited_for or group.refusal is not None:
                return group
        if blocking < _MOST_BLOCKED:
            return next((g for g in ready if now - g.ready_since >= _PATIENCE_SECONDS), None)
        return None

    def _next_alone(self) -> list[CallQueue]:
        """The group, if any, whose call is the next of those that run one at a time."""
        waiting = [group for group in self._ready if group.one_at_a_time]
        alone = [run for run in self._runs if run.group.one_at_a_time and not run.abandoned]
        if not waiting or not all(run.callbacks_since for run in alone):
            return []
        nested = [group for group in waiting if group.calls[0].nested]
        if nested or alone:
            return nested[:1]
        return [min(waiting, key=lambda group: group.calls[0].number)]

    def _begin(self, group: CallQueue) -> _RunningCall:
        self._ready.remove(group)
        run = group.current = _RunningCall(group, group.calls.popleft(), threading.current_thread())
        self._runs.add(run)
        if len(self.threads) <= len(self._runs):
            self._start()  # the next leader
        return run

    def _abandon_callbacks(self, now: float) -> None:
        for run in list(self._runs):
            since = run.callbacks_since
            awaited = run.group.calls or run.group.one_at_a_time and any(group.one_at_a_time for group in self._ready)
            if since and now - since > _CALLBACK_SECONDS and run.group.current is run and awaited:
                self._abandon(run)
                self._make_ready(run.group)

    def _abandon(self, run: _RunningCall) -> None:
        run.abandoned, run.group.current = True, None


_workers = WorkerThreads()


def _in_forked_child() -> None:
    """A fork copies no threads. The groups are unusable here; nothing may wait for their workers."""
    global _workers
    for group in list(_workers.queues):
        group._closed = True
    _workers = WorkerThreads()


os.register_at_fork(after_in_child=_in_forked_child)


@atexit.register
def _close_all() -> None:
    # A daemon thread that comes back from C++ into a finalized interpreter would take the process down.
    end = time.monotonic() + _DRAIN_SECONDS
    for group in list(_workers.queues):
        group.close(max(0.0, end - time.monotonic()))
