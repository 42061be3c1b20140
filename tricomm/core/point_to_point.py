"""Messages between two ranks: send and recv, with tags and from any source.

    x -> send -> slots of the pair in the receiver's memory -> recv -> y

They are no collectives: only the two ranks take part, and neither the epoch nor the sequence number of the collectives
moves. What was said about a message lies in the control page, so that whoever waits in vain can name what is there
instead.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from tricomm import arguments
from tricomm.core import launch_plan
from tricomm.core.collectives import Collectives, Tensor
from tricomm.core.entry_guard import guarded
from tricomm.core.work import Work
from tricomm.errors import CollectiveMismatch, InvalidArgument
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch.kernel_launch import BoundKernel
from tricomm.metrics import routes
from tricomm.metrics.counters import Tally, weight
from tricomm.policy import selection
from tricomm.store.control import Descriptor, Fault

_TAGS = 1 << 32


@dataclass(frozen=True)
class Bound:
    """One half of a message, bound to a shape, a peer and a tag."""

    run: BoundKernel
    facts: int  # what both halves must have in common, but for the tag
    numel: int  # raw elements
    kind: str
    dtype: str
    protocol: str
    count: int
    grid: int
    tally: Tally
    weight: int  # what a message adds to the tally


class Messages(Collectives):
    """Adds messages between two ranks to the collectives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._messages = 0
        self._halves: dict[tuple[Any, ...], Bound] = {}
        self._sent: Counter[tuple[int, int]] = Counter()  # by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._unread: dict[int, FromAny] = {}  # by the word of the control page that will say whose a message was

    @guarded
    def send(
        self, x: Tensor, dst: int, tag: int = 0, *, protocol: str | None = None, async_op: bool = False
    ) -> Any:  # fmt: skip
        """Send `x` to rank `dst`, whose `recv` gives the same shape, dtype and tag. Returns None.

        Up to four short messages of a tag are away when this has run, whether or not the receiver has asked for them;
        what finds no free slot ends with its receiver, so two ranks that send each other more than that must not both
        send first. On a GPU it is enqueued on the current stream: calls behind it wait for its end.

        Raises `InvalidArgument` for a rank that is none or this one, a tag that is not from 0 to 2^32 - 1, and while a
        CUDA graph is captured.
        """
        self._check_peer(dst, "send dst")
        source = self._input(x, "send").contiguous()
        self._message("send", source, dst, tag, protocol)
        return self._finish(None, async_op)

    @guarded
    def recv(
        self, x: Tensor, src: int | None = None, tag: int = 0, *, protocol: str | None = None, async_op: bool = False
    ) -> Any:
        """Receive into `x` what rank `src` (None: any rank) sends with this `tag`. Returns the source's rank.

        Messages of one rank and one tag arrive in the order in which they were sent. One with another tag may be
        received first, as long as those before it fit into the slots of the pair. From any rank, those are looked at
        from the lowest on. On a GPU the host waits for the source if `src` is None; with `async_op=True` the `Work`
        gives it.

        Raises `InvalidArgument` as `send` does; `CollectiveMismatch` where what was sent has this tag and another
        dtype or size, or has other tags and leaves no room for more; `CollectiveTimeout` that names what is pending.
        """
        if src is None:
            self._check_any()
        else:
            self._check_peer(src, "recv src")
        target = self._input(x, "recv")
        arguments.check_writable(target, "recv")
        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        number = self._message("recv", into, -1 if src is None else src, tag, protocol)
        if into is not target:
            target.copy_(into)
        if src is not None:
            return self._finish(src, async_op)
        work: Work = self._finish(None, True)
        found = self._unread[number % layout.RECV_SOURCE_WORDS] = FromAny(self, work, number, tag)
        return found if async_op else found.wait()

    def _check_peer(self, rank: Any, what: str) -> None:
        self._check_root(rank, what)
        if rank == self.rank:
            raise InvalidArgument(f"{what}={rank}: a rank sends no messages to itself; copy the tensor")
        if not self._arena.bases[rank]:
            raise InvalidArgument(
                f"{what}={rank}: rank {self.rank} and rank {rank} do not reach each other's memory on these devices' "
                'links; go through a rank that both reach, or use the backend "tricomm" of torch.distributed'
            )

    def _check_any(self) -> None:
        if not any(base for rank, base in enumerate(self._arena.bases) if rank != self.rank):
            why = self._routes.no_kernels or "there is no other rank"
            raise InvalidArgument(f"recv: no rank can send a message to rank {self.rank}: {why}")

    def _message(self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None) -> int:
        """Launch one half of a message; returns its number among this rank's."""
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < _TAGS:
            raise InvalidArgument(f"{kind}: tag={tag!r}: an integer from 0 to 2^32 - 1 is needed")
        if self._gpu is not None and self._gpu.capturing():
            raise InvalidArgument(
                f"{kind}: a message cannot be captured: a replay beside another message of the pair would not be seen; "
                "capture a collective, or send outside of the graph"
            )
        bound = self._half(kind, x, peer, tag, protocol)
        with self._my_turn():
            number = self._messages + 1
            older = self._unread.pop(number % layout.RECV_SOURCE_WORDS, None)
            if older is not None:
                older.keep()
            self._messages = number
            self._sent[peer, tag] += kind == "send"
            self._control.announce_message(
                Descriptor(
                    number, self._sent[peer, tag], kind, f"tag {tag}", bound.dtype, "one_shot", bound.protocol,
                    bound.count, peer, bound.grid, "eager",
                )
            )  # fmt: skip
            if self.counted:
                routes.counter(routes.KERNELS, kind)[0] += 1
            self._guarded(lambda: bound.run(x, x, bound.numel, number << 32 | bound.facts))
            bound.tally.total += bound.weight
            if kind == "recv" and peer >= 0:
                self.received(peer, tag)
            return number

    def received(self, source: int, tag: int) -> None:
        """Note for what is said of pending messages that one has been taken."""
        self._received[source, tag] += 1

    def told(self, number: int) -> int:
        """Whose the message `number`, from any rank, was; where that has run."""
        return int(self._words[layout.RECV_SOURCE + number % layout.RECV_SOURCE_WORDS])

    def _half(self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None) -> Bound:
        aligned = x.data_ptr() % 16 == 0
        key = (kind, x.dtype, x.numel(), aligned, protocol, peer, tag)
        found = self._halves.get(key)
        if found is None:
            while len(self._halves) >= 1024:
                self._halves.pop(next(iter(self._halves)))
            found = self._halves[key] = self._bind_half(kind, x, peer, tag, protocol, aligned)
        return found

    def _bind_half(
        self, kind: str, x: torch.Tensor, peer: int, tag: int, protocol: str | None, aligned: bool
    ) -> Bound:  # fmt: skip
        if x.dtype not in arguments.DTYPES:
            known = ", ".join(dtype.name for dtype in arguments.DTYPES.values())
            raise InvalidArgument(f"{kind}: no kernel takes {x.dtype}; there is {known}")
        choice = selection.choose(self._site, kind, x.numel() * x.itemsize, None, protocol)
        kernel = registry.find(kind, choice.algorithm, choice.protocol)
        dtype = arguments.DTYPES[x.dtype]
        # From any rank one block serves all channels: blocks could not agree on a source.
        grid = choice.blocks if peer >= 0 else 1
        constexprs = launch_plan.constexprs(self._site, choice, kernel) | {"ALIGNED": aligned}
        more = (peer, tag) if kind == "send" else (peer, tag, choice.blocks)
        run = self._runtime.bind(
            kernel.function, grid, constexprs, dtype.bits, aligned, more, self._group, self._timeout
        )
        facts = arguments.fingerprint("message", dtype.name, x.numel(), choice.protocol, choice.block, choice.blocks)
        nbytes = x.numel() * x.itemsize
        tally = self._activity.tally(kind, choice.algorithm, choice.protocol, nbytes)
        return Bound(
            run, facts, x.numel() * dtype.lanes, kind, dtype.name, choice.protocol, x.numel(), grid, tally,
            weight(nbytes),
        )  # fmt: skip

    def unread(self) -> list[int]:
        """Ranks that have not taken all of what this one has sent them."""
        where = self._layout
        shape = (self.world_size, where.channels, layout.CHANNEL_STATE // 8)
        lines = self._arena.tensor(self.rank, where.channel_states, shape, torch.int64).cpu()
        return [rank for rank in range(self.world_size) if any(map(layout.unacknowledged, lines[rank].tolist()))]

    def _settled(self, seconds: float) -> bool:
        """A message that is taken later is acknowledged here: on a GPU, into memory that would be gone."""
        end = time.monotonic() + seconds
        while not self.simulated and self._routes.no_kernels is None and self.unread():
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True

    # What a message waits for

    def _diagnose(self) -> None:
        status = int(self._words[layout.STATUS])
        peer, code = (status >> 8) & 0xFF, status & 0xFF
        if code not in (layout.PENDING, layout.MESSAGE_MISMATCH):
            return super()._diagnose()
        unlike = code == layout.MESSAGE_MISMATCH
        what = "has this tag and is not what is asked for" if unlike else "has another tag, and no room"
        text = f"what rank {peer} has sent {what}; {self._describe(int(self._words[layout.MESSAGE]), peer)}"
        self._monitor.give_up(Fault(CollectiveMismatch.__name__, peer, self._sequence, text))

    def _describe(self, message: int, peer: int = -1) -> str:
        """What this rank's half of a message waits for, and what is there instead."""
        mine = next((m for m in self._control.messages(self.rank) if m.sequence == message), None)
        if mine is None:
            return f"rank {self.rank} was in message {message}"
        text = f"rank {self.rank} was in {mine.text()}"
        if mine.collective == "send":
            theirs = [m for m in self._control.messages(mine.root) if m.collective == "recv"]
            last = f"last asked for {theirs[-1].text()}" if theirs else "has not asked for a message lately"
            return f"{text}; rank {mine.root} {last}"
        peer = mine.root if peer < 0 else peer
        sources = [peer] if peer >= 0 else [r for r in range(self.world_size) if r != self.rank]
        pending = [f"from rank {r}: {', '.join(self._pending(r)) or 'nothing'}" for r in sources]
        return f"{text}; pending {'; '.join(pending)}"

    def _pending(self, source: int) -> list[str]:
        """What `source` has sent to this rank and this rank has not received, of its last eight messages."""
        sent = [m for m in self._control.messages(source) if m.collective == "send" and m.root == self.rank]
        return [
            f"{m.op}, dtype={m.dtype}, count={m.count} [{m.protocol}]"
            for m in sent
            if m.fingerprint > self._received[source, int(m.op.removeprefix("tag "))]
        ]


class FromAny(Work):
    """A message from any rank: who it was is known when it has run."""

    def __init__(self, comm: Messages, work: Work, number: int, tag: int) -> None:
        super().__init__(comm, None, work._event)
        self._messages, self._number, self._tag = comm, number, tag
        self._source: int | None = None

    @guarded
    def wait(self, timeout: float | None = None) -> int:
        """Wait on the host, and return the source's rank; raises as `Work.wait` does."""
        self._wait_for(self._comm._timeout if timeout is None else timeout)
        self.keep()
        return self.result()

    @guarded
    def result(self) -> int:
        """The source's rank. Raises the group's fault, and `InvalidArgument` where the message has not arrived yet."""
        if self._source is None:
            if not self.is_completed():
                raise InvalidArgument("recv: this message has not arrived yet; call wait() first")
            self.keep()
        return self._source  # type: ignore[return-value]

    def keep(self) -> None:
        """Read who it was, before the word that says so serves another message."""
        if self._source is None:
            self._wait_on_host(self._comm._timeout)
            self._comm.check()
            self._source = self._messages.told(self._number)
            self._messages.received(self._source, self._tag)
