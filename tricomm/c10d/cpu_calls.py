"""The CPU calls of a c10d group: the ranks compare each call, and then make it, in its turn.

    CpuCalls.run -> CallQueue -> helper thread: compare -> the kernels, or messages over the group's connections

The calls of callbacks use messages even if kernels run the program's calls: callbacks may run in a different order on
each rank, and messages are matched by tag, not by order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from tricomm.c10d import message_collectives
from tricomm.c10d.call_guard import NOTHING_SENT, comes_from_handler
from tricomm.c10d.call_queue import CallQueue, Turn
from tricomm.c10d.call_recording import GroupRecorders
from tricomm.c10d.call_records import CallContext, CallRecords
from tricomm.c10d.capabilities import GroupCapabilities, GroupConfig
from tricomm.c10d.fallback_backends import Backends
from tricomm.c10d.group_calls import GroupCall
from tricomm.core.entry_guard import name_refusal
from tricomm.errors import CollectiveTimeout, GroupAborted, InvalidArgument, TricommError
from tricomm.metrics.counters import GLOO, count_fallback


class Owner(Protocol):
    """The part of a `Dispatcher` that its calls use. Only a call refers to it, because a reference cycle would keep the
    connections of a dropped group open.

    has_cpu_kernels whether kernels may run a call on the CPU
    run_by_kernels  runs a call by the kernels if they cover it; returns whether they do
    check_not_lost  raises if the group is lost
    interrupted     aborts the group
    decided         the keys of a call for a profiler: its route, and its kernel
    """

    @property
    def has_cpu_kernels(self) -> bool: ...
    def run_by_kernels(self, call: GroupCall) -> bool: ...
    def check_not_lost(self, what: str) -> None: ...
    def interrupted(self, error: BaseException) -> None: ...
    def decided(self, call: GroupCall) -> dict[str, Any]: ...


class CpuCalls:
    """Runs the CPU calls of a group."""

    def __init__(
        self, config: GroupConfig, agreed: GroupCapabilities, backends: Backends, recorders: GroupRecorders
    ) -> None:
        self._config, self._agreed, self._backends = config, agreed, backends
        self._text = str(config)
        recorder, self._trace = recorders.of("cpu"), recorders.trace
        self._queue = CallQueue(config.name, config.ranks, self._text, recorder)
        self._recording = recorder.on
        self._records = CallRecords(config.world_size, str(config))

    def run(self, batch: list[GroupCall], owner: Owner) -> Any:
        """Run `batch` in its turn; returns a handle for all of it.

        The caller's thread runs a synchronous call that is next, unless kernels may run it, because an interrupt would
        stop them in the middle.
        """
        result = [x for call in batch for x in call.result]
        inference = torch.is_inference_mode_enabled() or any(
            x.is_inference() for call in batch for x in (*call.inputs(), *call.outputs(), *call.keep)
        )

        def action(turn: Turn) -> None:
            self._in_turn(batch, turn, inference, owner)

        here = not owner.has_cpu_kernels
        made: Any = None
        shown: Any = None
        if self._recording or self._trace.on:
            made = batch[0].made if len(batch) == 1 else [call.made for call in batch]
            if self._trace.on:
                shown = partial(self._trace.shown, made, partial(owner.decided, batch[0]), batch[0].x)
        return self._queue.run(action, self._text, result, batch[0].async_op, owner.interrupted, here, made, shown)

    def between_calls(self, step: Callable[[], None], what: str, owner: Owner) -> None:
        """Run `step` in its turn among the program's calls; raises `InvalidArgument` in a callback of a future."""

        def run(turn: Turn) -> None:
            if turn.line.name:
                raise InvalidArgument(f"{self._text}: {what} in a callback of a future; wait for the future first")
            step()

        self._queue.run(run, f"{self._text}: {what}", [], False, owner.interrupted)

    def drain(self, seconds: float, owner: Owner) -> None:
        """Wait for the program's earlier calls. Raises `CollectiveTimeout` after `seconds`, `InvalidArgument` in a
        callback of a future."""
        with suppress(GroupAborted):  # the group is lost, and its calls have ended
            work = self._queue.run(self._refuse_callback, self._text, [], True, owner.interrupted)
            if not work.over.wait(seconds):
                raise CollectiveTimeout(f"{self._text}: timeout after {seconds:g} s: earlier calls still run")
            if isinstance(error := work.exception(), InvalidArgument):
                raise error

    def _refuse_callback(self, turn: Turn) -> None:
        if turn.line.name:
            raise InvalidArgument(f"{self._text}: shrink in a callback of a future; wait for the future first")

    def refuse(self, error: GroupAborted) -> None:
        """End the calls that have not begun with `error`: the group is aborted."""
        self._queue.refuse(error)

    def close(self) -> None:
        """Let calls that are running end, and refuse later ones; idempotent."""
        self._queue.close()

    def _in_turn(self, batch: list[GroupCall], turn: Turn, inference: bool, owner: Owner) -> None:
        owner.check_not_lost(batch[0].collective)
        # Not recorded by autograd. Tensors that were made in inference mode can be written only in inference mode.
        if inference == torch.is_inference_mode_enabled():
            with torch.no_grad():
                self._in_modes(batch, turn, owner)
        else:
            with torch.inference_mode(inference), torch.no_grad():
                self._in_modes(batch, turn, owner)

    def _in_modes(self, batch: list[GroupCall], turn: Turn, owner: Owner) -> None:
        problem = self._problem(batch)
        try:
            self._move(batch, turn, owner, problem)
        except TricommError:
            raise
        except Exception as error:
            if getattr(error, NOTHING_SENT, False):
                name_refusal(error)
                raise
            owner.interrupted(error)  # the other ranks wait for this one
            if comes_from_handler(error):
                raise
            raise GroupAborted(f"{self._text}, call {turn}: failed, and the group is lost: {error}") from error
        try:
            for call in batch:
                call.finish()
        except Exception as error:  # on this rank alone, after the last message
            setattr(error, NOTHING_SENT, not comes_from_handler(error))
            raise

    def _problem(self, batch: list[GroupCall]) -> Exception | None:
        """Prepare the calls; returns why this rank cannot make them."""
        try:
            for call in batch:
                call.prepare()
                message_collectives.check(call)
        except Exception as error:
            if comes_from_handler(error):
                raise
            setattr(error, NOTHING_SENT, True)
            return error
        return None

    def _move(self, batch: list[GroupCall], turn: Turn, owner: Owner, problem: Exception | None) -> None:
        context = self._context(batch[0], turn)
        in_callback = bool(turn.line.name)
        if self._agreed.check:
            records = CallRecords(self._config.world_size, self._text) if in_callback else self._records
            records.write(batch, turn, problem)
            context.unchecked = records
            if problem is not None or (owner.has_cpu_kernels and not in_callback):
                context.exchange([], [])
        elif problem is not None:
            raise problem
        for call in batch:
            if in_callback and call.wire is not None:
                raise InvalidArgument(
                    f"{self._text}: wire={call.wire!r} in a callback of a future, whose calls no kernel runs"
                )
            if in_callback:
                count_fallback(GLOO, call.collective, call.nbytes)
            if in_callback or not owner.run_by_kernels(call):
                used = context if call is batch[0] else self._context(call, turn)
                try:
                    message_collectives.run(used, call)
                except Exception as error:
                    if used.unchecked is None or comes_from_handler(error):
                        raise
                    setattr(error, NOTHING_SENT, True)  # the other ranks still wait for the record
                    used.unchecked.write(batch, turn, error)
                    used.exchange([], [])

    def _context(self, call: GroupCall, turn: Turn) -> CallContext:
        """The connections, until the time limit of `call`."""
        limit = (call.timeout or self._config.timeout).total_seconds()
        transport = self._backends.transport
        assert transport is not None, "a group that serves the CPU has connections"
        end = time.monotonic() + limit
        return CallContext(transport, end, lambda: f"{self._text}, call {turn} ({call.text()})", turn)
