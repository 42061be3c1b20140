"""Messages between two ranks: send and recv, with tags and from any source.

    x -> send -> slots of the pair in the receiver's memory -> recv -> y

They are not collectives: only the two ranks take part, and neither the epoch nor the sequence number of the collectives
advances. Each half of a message is described in the control page, so that a rank that waits in vain can name the
messages that are pending instead.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tricomm import arguments
from tricomm.core import launch_plan
from tricomm.core.calls.collectives import Tensor, check_root
from tricomm.core.entry_guard import guarded
from tricomm.core.faults import Faults
from tricomm.core.group import Group
from tricomm.core.launcher import Launcher, decided
from tricomm.core.planner import Planner
from tricomm.core.watch.monitor import Monitor
from tricomm.core.work import Work
from tricomm.deadline import poll
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.kernel_launch import BoundKernel
from tricomm.metrics.counters import KERNELS, Activity, Tally, weight
from tricomm.metrics.flight_document import ENDED, NUMBER, WHAT, Entry, begun
from tricomm.options import seconds
from tricomm.policy import selection
from tricomm.policy.backend_choice import BackendChoice
from tricomm.policy.selection import Choice
from tricomm.store.control import Descriptor, Fault

_TAGS = 1 << 32
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a message, bound to a shape, a peer and a tag."""

    run: BoundKernel
    facts: int  # fingerprint of the facts that both halves share, except for the tag
    numel: int  # raw elements
    record: Descriptor  # without the numbers of a message
    choice: Choice
    tally: Tally
    weight: int  # of a message, in the tally of calls


class PointToPoint:
    """The messages of one group."""

    def __init__(
        self, group: Group, faults: Faults, planner: Planner, launcher: Launcher, monitor: Monitor, activity: Activity
    ) -> None:
        self.group, self.faults, self.launcher = group, faults, launcher
        self._planner, self._activity = planner, activity
        self._gpu = group.gpu
        self._messages = 0
        self._sent: Counter[tuple[int, int]] = Counter()  # by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._unread: dict[int, FromAny] = {}  # by the word of the control page that will hold the source of a message
        unmet = self._unmet
        describers = monitor.in_flight.describers
        describers[layout.PENDING] = lambda peer, got: unmet(peer, "has another tag, and no room")
        unlike = "has this tag and is not what is asked for"
        describers[layout.MESSAGE_MISMATCH] = lambda peer, got: unmet(peer, unlike)
        group.control.doing = self.running

    def send(self, x: Tensor, dst: int, tag: int = 0, *, protocol: str | None = None, async_op: bool = False) -> Any:
        """As `Communicator.send`."""
        self._check_peer(dst, "send dst")
        source = self.faults.checked(x, "send")
        self._message("send", arguments.allocated("send", source.contiguous), dst, tag, protocol)
        return self.launcher.finish(None, async_op)

    def recv(
        self, x: Tensor, src: int | None = None, tag: int = 0, *, protocol: str | None = None, async_op: bool = False
    ) -> Any:
        """As `Communicator.recv`."""
        if src is None:
            self._check_any()
        else:
            self._check_peer(src, "recv src")
        target = self.faults.checked(x, "recv")
        arguments.check_writable(target, "recv")
        into = target
        if not target.is_contiguous():
            into = arguments.allocated("recv", torch.empty_like, target, memory_format=torch.contiguous_format)
        number, entry = self._message("recv", into, -1 if src is None else src, tag, protocol)
        if into is not target:
            target.copy_(into)
        if src is not None:
            return self.launcher.finish(src, async_op)
        work = FromAny(self, number, tag, entry)
        self._unread[number % layout.RECV_SOURCE_WORDS] = work
        return work if async_op else work.wait()

    def _check_peer(self, rank: Any, what: str) -> None:
        group = self.group
        check_root(rank, group.world_size, what)
        if rank == group.rank:
            raise InvalidArgument(f"{what}={rank}: a rank sends no messages to itself; copy the tensor")
        if not group.arena.bases[rank]:
            if (why := group.routes.no_memory) is not None:
                raise InvalidArgument(
                    f"{what}={rank}: messages go through memory that the group shares: {why}; "
                    'use the backend "tricomm" of torch.distributed, or split() off ranks that share memory'
                )
            raise InvalidArgument(
                f"{what}={rank}: rank {group.rank} and rank {rank} do not reach each other's memory on these devices' "
                'links; go through a rank that both reach, or use the backend "tricomm" of torch.distributed'
            )

    def _check_any(self) -> None:
        group = self.group
        if not any(base for rank, base in enumerate(group.arena.bases) if rank != group.rank):
            why = group.routes.no_kernels or "there is no other rank"
            raise InvalidArgument(f"recv: no rank can send a message to rank {group.rank}: {why}")

    def _message(
        self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None
    ) -> tuple[int, Entry | None]:
        """Launch one half of a message. Returns its number among this rank's messages, and its entry of the flight
        recorder."""
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < _TAGS:
            raise InvalidArgument(f"{kind}: tag={tag!r}: an integer from 0 to 2^32 - 1 is needed")
        if self._gpu is not None and self._gpu.capturing():
            raise InvalidArgument(
                f"{kind}: a message cannot be captured: a replay during another message of the pair would not be seen; "
                "capture a collective, or send outside of the graph"
            )
        half = self._half(kind, x, peer, tag, protocol)
        with self.launcher.held():
            number = self._messages + 1
            older = self._unread.pop(number % layout.RECV_SOURCE_WORDS, None)
            if older is not None:
                older.keep()
            self._messages = number
            self._sent[peer, tag] += kind == "send"
            record = replace(half.record, sequence=number, fingerprint=self._sent[peer, tag])
            self.group.control.own().announce_message(record)
            place = self._place(record, peer, tag)
            entry = self._recorded(record, place)

            trace = self.launcher.trace
            with trace.shown(record, partial(decided, half.choice, "eager"), x, place) if trace.on else _NOTHING:
                self.launcher.run(lambda: half.run(x, x, half.numel, number << 32 | half.facts))
            if entry is not None and self._gpu is None:
                entry[ENDED] = time.time_ns()
            half.tally.total += half.weight
            if kind == "recv" and peer >= 0:
                self.received(peer, tag)
            return number, entry

    def _place(self, message: Descriptor, peer: int, tag: int) -> int:
        """The place of a message among the messages to or from `peer` with `tag`, if known; else its number."""
        if message.collective == "send":
            return self._sent[peer, tag]
        return self._received[peer, tag] + 1 if peer >= 0 else message.sequence

    def _recorded(self, message: Descriptor, place: int) -> Entry | None:
        """The flight recorder's entry of a message."""
        recorder = self.group.recorder
        if not recorder.on:
            return None
        entry = begun(place, message)
        recorder.add(entry)
        return entry

    def received(self, source: int, tag: int, entry: Entry | None = None) -> None:
        """Note that a message has been received, for the description of pending messages. `entry` of the flight
        recorder gets the source."""
        self._received[source, tag] += 1
        if entry is not None:
            entry[NUMBER], entry[WHAT] = self._received[source, tag], replace(entry[WHAT], root=source)

    def source(self, number: int) -> int:
        """The rank from which message `number` came: a receive from any rank, which has completed."""
        return int(self.group.words[layout.RECV_SOURCE + number % layout.RECV_SOURCE_WORDS])

    def _half(self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None) -> Half:
        aligned = x.data_ptr() % 16 == 0
        key = (kind, x.dtype, x.numel(), aligned, protocol, peer, tag)
        half: Half | None = self._planner.prepared.get(key)
        if half is None:
            half = self._bind(kind, x, peer, tag, protocol)
            self._planner.keep(key, half)
        return half

    def _bind(self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None) -> Half:
        if x.dtype not in arguments.DTYPES:
            known = ", ".join(dtype.name for dtype in arguments.DTYPES.values())
            raise InvalidArgument(f"{kind}: no kernel takes {x.dtype}; there is {known}")
        site = self._planner.site
        nbytes = x.numel() * x.itemsize
        choice = selection.choose(site, kind, nbytes, None, protocol)
        route = BackendChoice(KERNELS, f"{choice.kernel}: {choice.reason}")
        self._planner.router.log(route, (kind, x.dtype, "none", nbytes))
        kernel = registry.find(kind, choice.algorithm, choice.protocol)
        dtype, aligned = arguments.DTYPES[x.dtype], x.data_ptr() % 16 == 0
        # To receive from any rank, one block serves all queues: several could not agree on a source.
        grid = choice.blocks if peer >= 0 else 1
        constexprs = launch_plan.constexprs(site, choice, kernel) | {"ALIGNED": aligned}
        more = (peer, tag) if kind == "send" else (peer, tag, choice.blocks)
        run = self._planner.load(kernel.function, grid, constexprs, dtype.bits, aligned, more)
        facts = arguments.fingerprint("message", dtype.name, x.numel(), choice.protocol, choice.block, choice.blocks)
        tally = self._activity.tally(kind, choice.algorithm, choice.protocol, nbytes)
        shape = dtype.name, "one_shot", choice.protocol, x.numel(), peer, grid, "eager"
        record = Descriptor(0, 0, kind, f"tag {tag}", *shape)
        return Half(run, facts, x.numel() * dtype.lanes, record, choice, tally, weight(nbytes))

    def unread(self) -> list[int]:
        """The ranks that have not received all messages of this rank."""
        if self.group.suspended:
            self.faults.raise_refused()
        group, memory = self.group, self.group.layout
        shape = (group.world_size, memory.queues, layout.QUEUE_STATE // 8)
        lines = group.arena.tensor(group.rank, memory.queue_states, shape, torch.int64).cpu()
        return [rank for rank in range(group.world_size) if any(map(layout.unacknowledged, lines[rank].tolist()))]

    def acknowledged(self, seconds: float) -> bool:
        """True if all messages have been acknowledged; waits for `seconds` at most.

        The acknowledgement of a message that is received later is written to this rank's memory, which on a GPU would
        be freed.
        """
        if self.group.simulated or self.group.routes.no_kernels is not None:
            return True
        clock = time if self._gpu is None else self._gpu.clock
        return poll(lambda: not self.unread(), seconds, 1e-3, clock=clock)

    # Messages in words, for faults

    def _unmet(self, peer: int, what: str) -> Fault:
        text = f"what rank {peer} has sent {what}; {self.describe(int(self.group.words[layout.MESSAGE]), peer)}"
        return self.faults.of(CollectiveMismatch, text, peer)

    def running(self, rank: int) -> str:
        """The message that a rank is sending or receiving, in words; empty if there is none."""
        control = self.group.control
        words = control.page(rank).device_words()
        number = int(words[layout.MESSAGE])
        if number == int(words[layout.MESSAGE_ENDED]):
            return ""
        return next((m.text() for m in control.page(rank).messages() if m.sequence == number), f"message {number}")

    def describe(self, message: int, peer: int = -1) -> str:
        """In words, the message for which this rank waits, and the messages that have arrived instead."""
        control, rank = self.group.control, self.group.rank
        mine = next((m for m in control.page(rank).messages() if m.sequence == message), None)
        if mine is None:
            return f"rank {rank} was in message {message}"
        text = f"rank {rank} was in {mine.text()}"
        if mine.collective == "send":
            theirs = [m for m in control.page(mine.root).messages() if m.collective == "recv"]
            last = f"last asked for {theirs[-1].text()}" if theirs else "has not asked for a message lately"
            return f"{text}; rank {mine.root} {last}"
        peer = mine.root if peer < 0 else peer
        sources = [peer] if peer >= 0 else [r for r in range(self.group.world_size) if r != rank]
        pending = [f"from rank {r}: {', '.join(self._pending(r)) or 'nothing'}" for r in sources]
        return f"{text}; pending {'; '.join(pending)}"

    def _pending(self, source: int) -> list[str]:
        """The messages from `source` that this rank has not received, among the last eight that `source` sent."""
        messages = self.group.control.page(source).messages()
        sent = [m for m in messages if m.collective == "send" and m.root == self.group.rank]
        return [
            f"{m.op}, dtype={m.dtype}, count={m.count} [{m.protocol}]"
            for m in sent
            if m.fingerprint > self._received[source, int(m.op.removeprefix("tag "))]
        ]


class FromAny(Work):
    """A receive from any rank; the source is known when it has completed."""

    def __init__(self, messages: PointToPoint, number: int, tag: int, entry: Entry | None) -> None:
        gpu = messages.group.gpu
        event = gpu.recorded() if gpu is not None else None
        super().__init__(messages.faults, messages.launcher.guard, None, event)
        self._messages, self._number, self._tag, self._entry = messages, number, tag, entry
        self._source: int | None = None

    @guarded
    def wait(self, timeout: float | None = None) -> int:
        """Wait on the host, and return the source's rank; raises as `Work.wait` does."""
        self._wait_for(self._messages.group.timeout if timeout is None else seconds(timeout, "timeout"))
        self.keep()
        return self.result()

    @guarded
    def result(self) -> int:
        """The source's rank. Raises the group's fault, and `InvalidArgument` if the message has not arrived yet."""
        if self._source is None:
            if not self.is_completed():
                raise InvalidArgument("recv: this message has not arrived yet; call wait() first")
            self.keep()
        return self._source  # type: ignore[return-value]

    def keep(self) -> None:
        """Read and keep the source, before its word is used by another message."""
        if self._source is None:
            self._wait_on_host(self._messages.group.timeout)
            self._faults.check()
            self._source = self._messages.source(self._number)
            self._messages.received(self._source, self._tag, self._entry)
