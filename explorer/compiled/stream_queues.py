"""Streams, events and graphs of a simulated GPU. They order work as CUDA does, and no further.

A launch is enqueued, and host code runs on. The head of a stream begins as soon as all work before it has ended; a
dependent launch (programmatic stream serialization) as soon as each block of the kernel before it has signalled or
ended, also past events, because CUDA does not say that they end the overlap. The scheduler chooses which kernel takes
the next step. Happens-before is passed on as tokens of `Ordering`: from host code to the work that it enqueues, along a
stream, and from a recorded event to the work that waits for it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from tricomm.errors import InvalidArgument
from tricomm.explorer.compiled.module_table import KernelLaunch

Ended = Callable[[BaseException | None], None]


class Executor(Protocol):
    """Runs kernels."""

    def start(self, launch: KernelLaunch, ended: Ended, signalled: Callable[[], None]) -> None:
        """Make the launch's threads runnable; `ended` is called when all have run, with the first error or None, and
        `signalled` when launches that depend on this one may begin."""


class Ordering(Protocol):
    """Tracks happens-before. A token stands for everything that has happened before one moment."""

    def host(self, rank: int) -> Any:
        """The token of this rank's host code at this moment."""

    def learn(self, rank: int, token: Any) -> None:
        """Host code has waited until the work of `token` ended."""

    def join(self, one: Any, other: Any) -> Any:
        """The token for both; None stands for nothing."""

    def operation(self, rank: int, after: Any) -> AbstractContextManager[Callable[[], Any]]:
        """A context manager for a stream's operation. It yields a function that returns the token of its end."""


class NoOrders:
    """For executions without a detector."""

    def host(self, rank: int) -> None:
        return None

    def learn(self, rank: int, token: Any) -> None:
        pass

    def join(self, one: Any, other: Any) -> None:
        return None

    def operation(self, rank: int, after: Any) -> AbstractContextManager[Callable[[], Any]]:
        return nullcontext(lambda: None)


@dataclass(eq=False)
class Mark:
    """One record of an event. `nodes`: in a capture, the nodes that it comes after."""

    done: bool = False
    order: Any = None
    capture: Capture | None = None
    nodes: frozenset[int] = frozenset()


@dataclass(eq=False)
class StreamItem:
    """An item of a stream. `begin(after, ended)` starts it, and calls `ended(error, token)` when it has ended.

    `ready` says whether it may begin; `known` is the token of host code at the moment of enqueueing; `launch`: of a
    kernel; `event`: a record or a wait, which separates no kernels; `ends` are told the token at its end.
    """

    begin: Callable[[Any, Callable[[BaseException | None, Any], None]], None]
    known: Any
    ready: Callable[[], bool] = lambda: True
    launch: KernelLaunch | None = None
    event: bool = False
    ends: list[Callable[[Any], None]] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """A node of a captured graph: a launch or an operation, and the nodes that it comes after."""

    launch: KernelLaunch | None
    operation: Callable[[], None] | None
    behind: frozenset[int]


@dataclass(eq=False)
class Capture:
    """A graph while it is captured: `last` has, by stream, the nodes that its next one comes after."""

    origin: StreamQueue
    nodes: list[Node] = field(default_factory=list)
    last: dict[StreamQueue, frozenset[int]] = field(default_factory=dict)

    def add(self, queue: StreamQueue, launch: KernelLaunch | None, operation: Callable[[], None] | None) -> None:
        self.nodes.append(Node(launch, operation, self.last[queue]))
        self.last[queue] = frozenset({len(self.nodes) - 1})

    def joined(self) -> bool:
        """True if the origin has joined all other streams of the capture."""
        reached, left = set(), list(self.last[self.origin])
        while left:
            if (number := left.pop()) not in reached:
                reached.add(number)
                left += self.nodes[number].behind
        return len(reached) == len(self.nodes)


class StreamQueue:
    """A stream: enqueued work runs in order.

    order    the token of all that has ended; `waited`, of the events among it
    running  the items that have begun and not ended; `last`: the one that began last and is no event
    """

    def __init__(self, handle: int, streams: Streams) -> None:
        self.handle = handle
        self.capture: Capture | None = None
        self.order: Any = None
        self.waited: Any = None
        self.running: list[StreamItem] = []
        self.last: StreamItem | None = None
        self.work: deque[StreamItem] = deque()
        self._streams = streams

    @property
    def idle(self) -> bool:
        return not self.work and not self.running

    def launch(self, launch: KernelLaunch) -> None:
        if self.capture is not None:
            self.capture.add(self, launch, None)
            return

        def begin(after: Any, ended: Callable[[BaseException | None, Any], None]) -> None:
            launch.after = after
            self._streams.executor.start(launch, lambda error: ended(error, launch.end), self._streams.advance)

        self._put(begin, launch=launch)

    def record(self) -> Mark:
        if self.capture is not None:
            return Mark(capture=self.capture, nodes=self.capture.last[self])
        return self._put_event()

    def wait(self, mark: Mark) -> None:
        if mark.capture is not None:
            if self.capture not in (None, mark.capture):
                raise InvalidArgument("two captures of graphs cannot wait for each other (an event of another capture)")
            self.capture = mark.capture
            self.capture.last[self] = self.capture.last.get(self, frozenset()) | mark.nodes
            return
        if self.capture is not None:
            raise InvalidArgument(
                "a stream that is being captured cannot wait for an event that was recorded outside of the capture"
            )
        self._put_event(mark)

    def _put_event(self, awaited: Mark | None = None) -> Mark:
        """A mark that is done when all before this place has ended; what follows waits for `awaited`."""
        join, mark = self._streams.orders.join, Mark()

        def begin(after: Any, ended: Callable[[BaseException | None, Any], None]) -> None:
            left, token = len(self.running), after  # `running` includes this item
            if awaited is not None:
                self.waited = join(self.waited, awaited.order)

            def one(end: Any) -> None:
                nonlocal left, token
                left, token = left - 1, join(token, end)
                if not left:
                    mark.done, mark.order = True, token
                    ended(None, token)

            for item in self.running[:-1]:
                item.ends.append(one)
            one(None if awaited is None else awaited.order)

        self._put(begin, lambda: awaited is None or awaited.done, event=True)
        return mark

    def then(self, look: Callable[[], None]) -> None:
        """Call `look` in the order of the stream. The call orders nothing, and no launch waits for it."""

        def looked(token: Any = None) -> None:
            with self._streams.at_work():
                look()

        if self.idle:
            looked()
        else:
            (self.work or self.running)[-1].ends.append(looked)

    def replay(self, nodes: list[Node]) -> None:
        if self.capture is not None:
            raise InvalidArgument("a graph cannot be replayed on a stream that is being captured")
        self._put(lambda after, ended: _Replay(nodes, self._streams, after, ended).advance())

    def _put(self, begin: Any, ready: Callable[[], bool] = lambda: True, **more: Any) -> None:
        self._streams.refuse()
        self._streams.raise_error()
        self.work.append(StreamItem(begin, self._streams.orders.host(self._streams.rank), ready, **more))
        self._streams.advance()

    def advance(self) -> bool:
        """Begin the next item if it can; True if it has."""
        if not self.work or not self.work[0].ready():
            return False
        item, launch, join = self.work[0], self.work[0].launch, self._streams.orders.join
        before = self.last.launch if self.last is not None and launch is not None and launch.dependent else None
        if self.running and not item.event and (before is None or not before.signalled):
            return False
        self.work.popleft()
        self.running.append(item)
        order, self.last = self.order, self.last if item.event else item
        if launch is not None and before is not None:
            launch.before, order = (before,), join(before.handed, self.waited)
        item.begin(join(order, item.known), lambda error, token: self._ended(item, error, token))
        return True

    def _ended(self, item: StreamItem, error: BaseException | None, token: Any) -> None:
        self.running.remove(item)
        self.order = self._streams.orders.join(self.order, token)
        for end in item.ends if error is None else ():
            end(token)
        self._streams.ended(error)


class _Replay:
    """A replay of a graph. A node begins when the nodes before it have ended. Along a programmatic edge, from a kernel
    to a dependent launch, it begins when that kernel has signalled."""

    def __init__(self, nodes: list[Node], streams: Streams, after: Any, ended: Any) -> None:
        self._nodes, self._streams, self._after, self._ended = nodes, streams, after, ended
        self._left = dict(enumerate(nodes))
        self._launches: dict[int, KernelLaunch] = {}
        self._ends: dict[int, Any] = {}
        self._advancing = False

    def advance(self) -> None:
        if self._advancing:  # a node that ends at once
            return
        self._advancing = True
        while able := [n for n, node in self._left.items() if self._may_begin(node)]:
            for number in able:
                self._begin(number, self._left.pop(number))
        self._advancing = False
        if len(self._ends) == len(self._nodes):
            self._ended(None, self._joined(self._ends.values()))

    def _may_begin(self, node: Node) -> bool:
        early = {number for number, launch in self._depends_on(node).items() if launch.signalled}
        return node.behind - early <= self._ends.keys()

    def _depends_on(self, node: Node) -> dict[int, KernelLaunch]:
        """The launches at the other ends of the node's programmatic edges."""
        if node.launch is None or not node.launch.dependent:
            return {}
        return {number: self._launches[number] for number in node.behind & self._launches.keys()}

    def _joined(self, tokens: Iterable[Any]) -> Any:
        return functools.reduce(self._streams.orders.join, tokens, self._after)

    def _begin(self, number: int, node: Node) -> None:
        before = self._depends_on(node)
        after = self._joined(before[n].handed if n in before else self._ends[n] for n in node.behind)
        if node.operation is not None:
            with self._streams.orders.operation(self._streams.rank, after) as end:
                with self._streams.at_work():
                    node.operation()
                self._ends[number] = end()
        elif node.launch is not None:
            launch = self._launches[number] = node.launch.again()
            launch.after, launch.before = after, tuple(before.values())
            self._streams.executor.start(launch, lambda error: self._node_ended(number, launch, error), self.advance)

    def _node_ended(self, number: int, launch: KernelLaunch, error: BaseException | None) -> None:
        self._ends[number] = launch.end
        if error is not None:
            self._ended(error, None)
        else:
            self.advance()


class Streams:
    """The streams of one rank's device.

    executor   runs the kernels
    orders     tracks happens-before
    changed    called when an item of work has ended, because host code may continue
    refuse     called before work is enqueued; raises an error if the caller may not enqueue
    error      what a kernel has raised; nothing runs after that, as after a fault on a GPU
    working    True while a stream runs torch's operations, even if host code has made it advance
    """

    def __init__(
        self,
        rank: int,
        executor: Executor,
        orders: Ordering,
        changed: Callable[[], None],
        refuse: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.executor, self.orders, self._changed, self.refuse = rank, executor, orders, changed, refuse
        self.error: BaseException | None = None
        self.queues: dict[int, StreamQueue] = {}
        self.working = False
        self._advancing = False
        self.queue(0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.working = True
        try:
            yield
        finally:
            self.working = False

    def queue(self, handle: int) -> StreamQueue:
        """The stream of a handle; 0 is the default one."""
        if handle not in self.queues:
            self.queues[handle] = StreamQueue(handle, self)
        return self.queues[handle]

    def new(self) -> StreamQueue:
        return self.queue(max(self.queues) + 1 if len(self.queues) > 1 else 0x5000 + 64 * self.rank)

    @property
    def idle(self) -> bool:
        return all(queue.idle for queue in self.queues.values())

    @property
    def capturing(self) -> bool:
        return any(queue.capture is not None for queue in self.queues.values())

    def begin_capture(self, queue: StreamQueue) -> None:
        if queue.capture is not None:
            raise InvalidArgument("this stream is being captured already")
        queue.capture = Capture(queue, last={})
        queue.capture.last[queue] = frozenset()

    def end_capture(self, queue: StreamQueue) -> list[Node]:
        """End the capture and return the graph's nodes. Raises `InvalidArgument` if another stream of the capture has
        not been joined."""
        capture = queue.capture
        if capture is None or capture.origin is not queue:
            raise InvalidArgument("no capture has begun on this stream")
        for other in self.queues.values():
            if other.capture is capture:
                other.capture = None
        if not capture.joined():
            raise InvalidArgument(
                "a stream that was drawn into the capture of a graph has not been joined: the stream that the capture "
                "began on must wait for it before the end"
            )
        return capture.nodes

    def advance(self) -> None:
        """Begin whatever can begin."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while any([queue.advance() for queue in list(self.queues.values())]):
                pass
        finally:
            self._advancing = False

    def ended(self, error: BaseException | None) -> None:
        if error is not None and self.error is None:
            self.error = error
            for queue in self.queues.values():
                queue.work.clear()
        if self.error is None:
            self.advance()
        self._changed()

    def abandon(self) -> None:
        """Drop all work that has not run, so that nothing waits for it."""
        self.error = None
        for queue in self.queues.values():
            queue.work.clear()
            queue.running, queue.last, queue.capture = [], None, None

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error
