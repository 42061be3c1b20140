"""Faults between the two levels of a group, and between its nodes.

    kernels' group of a node  <->  the whole group, here
    the whole group, here     <->  the other nodes, through the store, by one rank of each node

The watcher's thread looks at a bridge as it does at a group. Store calls run on a thread that can be left behind:
without the store the nodes still see closed connections and their own time limits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from tricomm import errors
from tricomm.core.levels.across import Across
from tricomm.core.monitor import Monitor, different
from tricomm.policy.levels import Parts
from tricomm.store.bounded_store import BoundedThread
from tricomm.store.control import ControlPage, Fault, RankState
from tricomm.store.node_reports import NodeReports

ROUND_SECONDS = 0.5  # between two looks at the store
SILENT_SECONDS = 2.0  # of a node whose connection has failed
GRACE_SECONDS = 3.0  # for the reason of a failed connection to arrive
_SECONDS_PER_NODE = 1e-3
_COMPARE_SECONDS = 0.25
_CLOSE_SECONDS = 1.0  # for the store to take the last report
_MOST_COMPARED = 64  # nodes; beyond that only the next one
_SHARED = {"CollectiveMismatch", "CollectiveTimeout", "PeerDied", "PeerStalled"}
_MARK = "[from outside this node, "
_BEAT, _CALL = "beat", "call"


@dataclass
class Side:
    """A group as the bridge sees it: its control page and its monitor."""

    control: ControlPage
    monitor: Monitor


@dataclass
class _Heard:
    """What one round at the store has brought: the failure, the next node's heartbeat, and the waiting calls of other
    nodes, as number, fingerprint, late ranks there, and description."""

    failure: tuple[int, str, str] | None = None
    beat: int | None = None
    calls: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)


class Bridge:
    """One rank's bridge. `outer` is the whole group, `inner` that of its part; `reports` is None if all ranks are on
    one node, which see each other's pages. `stall` is in seconds."""

    def __init__(
        self, outer: Side, inner: Side, parts: Parts, across: Across, reports: NodeReports | None, stall: float
    ) -> None:
        self.fault: Fault | None = None
        self.stopped, self.looked = False, 0.0
        self.entered = 0  # calls of the part before the running one
        self._outer, self._inner, self._parts, self._across = outer, inner, parts, across
        self._reports, self._stall = reports, stall
        self._rank = outer.control.rank
        self._part, self._position = parts.of[self._rank], parts.position(self._rank)
        self._members = parts.members(self._part)
        self._next = (self._part + 1) % parts.count
        self._thread = BoundedThread("tricomm-nodes")
        self._lock = threading.RLock()  # a signal handler may close the group while this thread looks
        self._pending: Future[_Heard] | None = None
        # One store serves all nodes: it is asked less often the more they are.
        self._period = max(ROUND_SECONDS, parts.count * _SECONDS_PER_NODE)
        self._due, self._beats, self._told = 0.0, 0, False
        self._beat, self._silent, self._since = (
            0,
            0.0,
            0.0,
        )  # of the next node: number, its age, time since the last look
        self._fault_since: float | None = None
        self._slow: dict[int, str] = {}  # nodes that are in the running call, and their ranks that are late
        self._late_since: float | None = None
        self._failed_since: float | None = None

    # For the watcher

    def busy(self) -> bool:
        return self._outer.monitor.busy()

    def beat(self) -> None:
        pass

    def look(self, tick: float) -> None:
        """Carry faults from one group to the other; periodically ask the other nodes."""
        with self._lock:
            self._since += tick
            self._carry()
            if self._reports is not None and self._outer.monitor.fault is None:
                self._heard()
                self._failed_connection()
                self._carry()
            if self._reports is not None:
                self._round(self._reports)

    def _carry(self) -> None:
        outer, inner = self._outer.monitor, self._inner.monitor
        if outer.fault is None and outer.channels[0].elapsed > _COMPARE_SECONDS and inner.fault is None:
            inner.diverging(inner.channels[0])
        if outer.fault is None and inner.fault is not None:
            outer.abort(self._outward(inner.fault))
        if outer.fault is not None and inner.fault is None:
            fault = outer.fault
            inner.abort(Fault(fault.kind, fault.culprit, fault.sequence, f"{_MARK}{fault.kind}] {fault.text}"))

    def _outward(self, fault: Fault) -> Fault:
        """A fault of the part's group in terms of the whole one."""
        if _MARK in fault.text:
            kind, _, text = fault.text.partition(_MARK)[2].partition("] ")
            return Fault(kind, fault.culprit, fault.sequence, text)
        if fault.kind == errors.CollectiveMismatch.__name__ and (calls := self._different_calls()) is not None:
            return Fault(fault.kind, calls[0], self._outer.control.sequence(self._rank), calls[1])
        culprit = self._members[fault.culprit] if fault.culprit < len(self._members) else self._rank
        text = (
            f"rank {culprit}, of {self._parts.named(self._part)}, whose ranks are numbered from 0 in what follows: "
            f"{fault.text}"
        )
        return Fault(fault.kind, culprit, self._outer.control.sequence(self._rank), text)

    def _different_calls(self) -> tuple[int, str] | None:
        """A rank of this part whose call of the whole group differs from this rank's, and both in words."""
        control, number = self._inner.control, self.entered + 1
        mine = control.called(self._position, number)
        for position, rank in enumerate(self._members):
            theirs = control.called(position, number)
            if mine is not None and theirs is not None and mine.fingerprint != theirs.fingerprint:
                return rank, different(self._rank, mine.text(), rank, theirs.text())
        return None

    def _late(self) -> list[int]:
        """The ranks of this part that have not entered the running call."""
        sequence = self._inner.control.sequence
        return [rank for position, rank in enumerate(self._members) if sequence(position) <= self.entered]

    # Other nodes

    def reporter(self) -> bool:
        """Whether this rank speaks for its node: the first that runs and has not closed the group."""
        control = self._inner.control
        try:
            return all(
                control.state(other) == RankState.CLOSED or not control.alive(other) for other in range(self._position)
            )
        except errors.GroupAborted:  # it is being closed
            return False

    def _round(self, reports: NodeReports) -> None:
        now, fault = time.monotonic(), self._outer.monitor.fault
        pressing = fault is not None and not self._told
        if self._pending is not None or not (pressing or now >= self._due) or (fault is not None and self._told):
            return
        self._fault_since = self._fault_since or (now if fault is not None else None)
        waited = self._fault_since is not None and now - self._fault_since > self._period
        if not self.reporter() and not waited:  # the reporter may be the one that is stopped
            return
        self._due = now + self._period
        self._told = fault is not None
        self._beats += 1
        number, waits = self._beats, self._outer.monitor.channels[0].elapsed > _COMPARE_SECONDS
        self._pending = self._thread.start(lambda: self._ask(reports, fault, number, waits))

    def _ask(self, reports: NodeReports, fault: Fault | None, beat: int, waits: bool) -> _Heard:
        """On the store's thread."""
        heard = _Heard()
        if fault is not None:
            shared = fault.kind in _SHARED
            text = fault.text if shared else f"rank {fault.culprit} aborted the group: {fault.text}"
            reports.fail(fault.culprit, fault.kind if shared else errors.GroupAborted.__name__, text)
            return heard
        reports.write(_BEAT, self._part, beat)
        heard.failure = reports.failure()
        theirs = reports.read(_BEAT, self._next)
        heard.beat = theirs.step if theirs is not None else None
        if waits:
            mine = self._outer.control.last(self._rank)
            if mine is not None:
                said = f"{mine.fingerprint}|{', '.join(map(str, self._late()))}|{mine.text()}"
                reports.write(_CALL, self._part, mine.sequence, said.encode()[:1024])
            few = self._parts.count <= _MOST_COMPARED
            for part in range(self._parts.count) if few else (self._next,):
                theirs = reports.read(_CALL, part) if part != self._part else None
                if theirs is not None:
                    fingerprint, late, text = (theirs.payload.decode(errors="replace").split("|", 2) + ["", ""])[:3]
                    heard.calls[part] = theirs.step, int(fingerprint) if fingerprint.isdigit() else 0, late, text
        return heard

    def _heard(self) -> None:
        """Judge what the last round has brought."""
        pending = self._pending
        if pending is None or not pending.done():
            return
        self._pending = None
        since, self._since = min(self._since, 2 * self._period), 0.0  # while the store was gone nothing was heard
        if pending.exception() is not None:  # the next round asks again
            return
        heard = pending.result()
        if heard.failure is not None:
            self._adopt(*heard.failure)
            return
        self._silent = self._silent + since if heard.beat == self._beat else 0.0
        self._beat = heard.beat or 0
        if self._beat and self._silent > self._stall + 4 * self._period:  # one of its ranks reports first
            text = (
                f"{self._parts.named(self._next)} shows no sign of life for {self._silent:.1f} s (limit "
                f"{self._stall:g} s): stopped, starved or cut off"
            )
            self._abort(errors.PeerStalled.__name__, self._parts.members(self._next)[0], text)
            return
        mine, waits = self._outer.control.last(self._rank), self._outer.monitor.channels[0].elapsed > 0
        if mine is not None:
            self._slow = {part: late for part, (number, _, late, _) in heard.calls.items() if number >= mine.sequence}
            for part, (number, fingerprint, _, text) in heard.calls.items():
                if waits and number == mine.sequence and fingerprint != mine.fingerprint:
                    other = self._parts.members(part)[0]
                    said = different(self._rank, mine.text(), other, text)
                    self._abort(errors.CollectiveMismatch.__name__, other, said)
                    return

    def _adopt(self, culprit: int, kind: str, text: str) -> None:
        """Abort the group for what another node has published."""
        self._told = True
        self._abort(kind if kind in _SHARED else errors.GroupAborted.__name__, culprit, text)

    def _abort(self, kind: str, culprit: int, text: str) -> None:
        self._outer.monitor.abort(Fault(kind, culprit, self._outer.control.sequence(self._rank), text))

    def _failed_connection(self) -> None:
        """Abort for an error of NCCL's own, after a grace in which another node may tell the reason."""
        error = self._across.error()
        if error is None:
            return
        now = time.monotonic()
        self._failed_since = self._failed_since or now
        if now - self._failed_since > GRACE_SECONDS:
            self._abort(errors.GroupAborted.__name__, self._rank, error)

    # For the rank's own thread

    def explain(self, error: str) -> None:
        """A connection to another node has failed: wait for the reason, and abort the group with that, or else with
        what can be seen from here."""
        monitor, began = self._outer.monitor, time.monotonic()
        _, before = self._said()
        silent: list[int] = []
        while monitor.fault is None and time.monotonic() - began < GRACE_SECONDS and not silent:
            time.sleep(0.02)
            self.look(0.0)
            if monitor.fault is None and time.monotonic() - began > SILENT_SECONDS:
                failure, now = self._said()
                if failure is not None:
                    self._adopt(*failure)
                silent = [part for part, beat in before.items() if now.get(part) == beat and part != self._part]
        if silent:
            named = "; ".join(self._parts.named(part) for part in silent)
            text = f"{named} closed its connections and has given no sign of life since: {error}"
            self._abort(errors.PeerDied.__name__, self._parts.members(silent[0])[0], text)
        else:
            self._abort(errors.GroupAborted.__name__, self._rank, f"a connection to another node failed: {error}")

    def _said(self) -> tuple[tuple[int, str, str] | None, dict[int, int]]:
        """The failure in the store, and the nodes' beats; nothing if it does not answer."""
        reports, thread = self._reports, BoundedThread("tricomm-nodes")
        if reports is None:
            return None, {}

        def read() -> tuple[tuple[int, str, str] | None, dict[int, int]]:
            few = self._parts.count <= _MOST_COMPARED
            said = {part: reports.read(_BEAT, part) for part in range(self._parts.count if few else 0)}
            return reports.failure(), {part: beat.step for part, beat in said.items() if beat is not None}

        try:
            return thread.run(read, "nodes' beats", 1.0)
        except Exception:  # any of the store's own
            return None, {}
        finally:
            thread.close()

    def unseen(self) -> str | None:
        """Which ranks have not entered the call whose time is over; None: another rank of this node will say."""
        late = self._late()
        if late:
            return f"rank(s) {', '.join(map(str, late))} of this node have not entered the call"
        now = time.monotonic()
        self._late_since = self._late_since or now
        if not self.reporter() and now - self._late_since < 1.5 * self._period:
            return None
        away = [part for part in range(self._parts.count) if part != self._part and part not in self._slow]
        named = [self._parts.named(part) for part in away]
        named += [f"rank(s) {ranks} of node {part}" for part, ranks in self._slow.items() if ranks]
        return f"all ranks of this node have entered the call; not seen in it: {'; '.join(named) or 'no other node'}"

    def close(self) -> None:
        """Say why the group was lost, if no rank has yet, or that this node has ended, if this rank speaks for it."""
        reports, fault, last = self._reports, self._outer.monitor.fault, self._pending
        if reports is not None and fault is not None and not self._told:
            self._told = True
            last = self._thread.start(lambda: self._ask(reports, fault, 0, False))
        elif reports is not None and fault is None and self.reporter():
            last = self._thread.start(lambda: self._ended(reports))
        if last is not None:
            wait([last], _CLOSE_SECONDS)
        self._thread.close()

    def _ended(self, reports: NodeReports) -> _Heard:
        """On the store's thread."""
        reports.write(_BEAT, self._part, 0)
        return _Heard()
