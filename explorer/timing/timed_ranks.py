"""Runs blocks of all ranks on the PTX machine, in the order of their warps' clocks: a discrete-event simulation.

Each warp runs until its next access to global memory and continues when no other event is earlier. A store to a peer is
performed when it arrives. So a poll reads what has arrived at its warp's time, and loops as often as on a GPU.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

from tricomm.errors import TricommError
from tricomm.explorer.ptx.access import Array, ThreadAccess
from tricomm.explorer.ptx.blocks import BlockState
from tricomm.explorer.ptx.instructions import Instruction
from tricomm.explorer.timing.instruction_costs import KernelCosts
from tricomm.explorer.timing.memory_traffic import LoadsInFlight, granules, moved
from tricomm.explorer.timing.timed_links import RankQueues
from tricomm.explorer.timing.warp_clock import HOP, POLL, WIRE, BarrierJoin, Path, SharedChain, WarpClock
from tricomm.perf.cost_model.machines import Latencies

HOST = -1
_LINE, _GRANULE = 7, 9  # log2 of the bytes of a line of L1, and of the granularity of recorded arrivals
_BARRIER_CYCLES = 20.0
_INVALIDATE_CYCLES = 30.0  # of CCTL.IVALL after an acquire


class OwnedMemory(NamedTuple):
    """Memory of a rank or the host, from `base`. `cold`: not in L2 when a call begins. `control`: no payload."""

    base: int
    nbytes: int
    rank: int
    cold: bool = False
    control: bool = False


class StepsExceeded(TricommError):
    """A simulation has more events than any call needs."""


class Events:
    """The pending events, in order of time."""

    MOST = 20_000_000

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0
        self.hub = getcurrent()

    def at(self, time: float, action: Callable[[], Any]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def sleep(self, time: float) -> None:
        """Suspend the calling greenlet until no earlier event is left."""
        if self._heap and self._heap[0][0] < time:
            self.at(time, getcurrent().switch)
            self.hub.switch()

    def run(self) -> None:
        while self._heap:
            if self._count > self.MOST:
                raise StepsExceeded(f"the simulation of this call takes more than {self.MOST} events")
            _, _, action = heapq.heappop(self._heap)
            action()


@dataclass
class TimedRank:
    """The state that is common to the warps of a rank's block.

    chain    the chain of their shared memory (`SharedChain`)
    written  bytes of payload stored to peers; `read`: loaded from peers; `headers`: bytes of control words, both ways
    """

    rank: int
    queues: RankQueues
    lines: set[int] = field(default_factory=set)
    local_acks: float = 0.0
    acks: float = 0.0
    host_acks: float = 0.0
    arrivals: dict[int, tuple[float, Path]] = field(default_factory=dict)
    meetings: dict[tuple[int, int], BarrierJoin] = field(default_factory=dict)
    pushed: bool = False
    blocked: list[tuple[Callable[[], bool], Any]] = field(default_factory=list)
    loads: dict[int, LoadsInFlight] = field(default_factory=dict)  # of payload, by basic block
    chain: SharedChain = field(default_factory=SharedChain)
    written: int = 0
    read: int = 0
    headers: int = 0


class TimedRanks:
    """One block of each rank. `places` tells which rank an address belongs to."""

    def __init__(self, costs: KernelCosts, queues: list[RankQueues], places: list[OwnedMemory]) -> None:
        self.costs, self.events = costs, Events()
        self.times: Latencies = queues[0].times
        self.states = [TimedRank(rank, each) for rank, each in enumerate(queues)]
        self.places = sorted(places, key=lambda place: place.base)
        self._bases = [place.base for place in self.places]
        self.clocks: list[list[WarpClock]] = [[] for _ in queues]
        self._left = 0

    def place(self, address: int) -> OwnedMemory:
        return self.places[bisect_right(self._bases, address) - 1]

    def run(self, blocks: list[BlockState]) -> None:
        """Run the block of each rank to its end. Raises `StepsExceeded`, and what a unit raises."""
        errors: list[BaseException] = []
        for rank, block in enumerate(blocks):
            for unit in block.units:
                clock = WarpClock(self.costs, len(block.units), self.times.us(1.0), self.states[rank].chain)
                self.clocks[rank].append(clock)
                around = WarpSurroundings(self, self.states[rank], clock)

                def body(unit: Any = unit, around: Any = around) -> None:
                    try:
                        unit(around)
                        around.clock.ends()
                    except Exception as error:
                        errors.append(error)

                self._left += 1
                self.events.at(0.0, greenlet(body, self.events.hub).switch)
        self.events.run()
        if errors:
            raise errors[0]

    def scarcest(self) -> LoadsInFlight | None:
        """The loads with the least bandwidth, of the basic blocks that load a tenth of a rank's payload or more."""
        candidates = []
        for state in self.states:
            total = sum(loads.total for loads in state.loads.values())
            candidates += [loads for loads in state.loads.values() if loads.total >= total / 10]
        return min(candidates, key=lambda loads: loads.most / loads.latency, default=None)

    def chain(self) -> tuple[int, int] | None:
        """Round trips to memory before the first push, by data and by order (`LoadChain`), each for the warp with the
        most; None if no rank pushes."""
        pushes = [clock.first_push for clocks in self.clocks for clock in clocks if clock.first_push is not None]
        return (max(data for data, _ in pushes), max(order for _, order in pushes)) if pushes else None

    def system_fences(self) -> int:
        """The number of system fences that a warp has passed, for the warp with the most."""
        return max(clock.system_fences for clocks in self.clocks for clock in clocks)

    def issued(self) -> float:
        """The number of machine instructions of a block's warps, outside of polls, for the rank with the most."""
        return max(sum(clock.issued for clock in clocks) for clocks in self.clocks)

    def path(self) -> list[float]:
        """The critical path to the end of the last warp, in microseconds by part."""
        last = max((clock for clocks in self.clocks for clock in clocks), key=lambda clock: clock.time)
        return last.path.ended(last.time)


class WarpSurroundings:
    """The `Surroundings` of one warp. They turn its accesses and barriers into times."""

    def __init__(self, ranks: TimedRanks, state: TimedRank, clock: WarpClock) -> None:
        self.ranks, self.state, self.clock = ranks, state, clock
        self._index, self._events, self._times = ranks.costs.index, ranks.events, ranks.times
        self._rounds: dict[int, int] = {}
        self._member, self._there = -1, 0.0
        self._came: list[tuple[float, float]] = []

    def passes(self, block: int) -> None:
        self.clock.enter(block)

    def nanotime(self) -> int:
        return int(1e3 * self.clock.time)

    def access(self, access: ThreadAccess) -> None:
        index = self._index[id(access.instruction)]
        if access.instruction.opcode == "multimem":
            self._by_switch(access, index)
            return
        now = self.clock.issue(index)
        if access.sem in ("release", "acq_rel"):
            self._fence(access.scope or "sys")
            now = self.clock.time
        self._events.sleep(now)
        there = now
        first = self.ranks.place(int(access.addresses[0]))
        last = self.ranks.place(int(access.addresses[-1]))
        if access.kind == "load":
            there = self._load(access, index, first, now)
        elif access.kind != "store":
            access.perform(None)
            there = now + self._times.us(self._times.l2)
            self.clock.delivers(index, there)
        elif first is last or len(access.addresses) == 1:
            self._store(access, index, first, None)
        else:
            owners = np.array([self.ranks.place(int(address)).base for address in access.addresses])
            for base in dict.fromkeys(owners.tolist()):
                self._store(access, index, self.ranks.place(base), owners == base)
        if access.sem in ("acquire", "acq_rel"):
            self.state.lines.clear()
            self.clock.stands(max(self.clock.time, there) + self._times.us(_INVALIDATE_CYCLES))

    def _by_switch(self, access: ThreadAccess, index: int) -> None:
        """One access of a `multimem` instruction, which accesses each rank's memory in turn but is issued once."""
        state, peers = self.state, [each.queues for each in self.ranks.states]
        self._member = (self._member + 1) % len(peers)
        nbytes = moved(access)
        if self._member == 0:
            now = self.clock.issue(index)
            self._events.sleep(now)
            if access.kind == "load":
                self._there = state.queues.reduces(peers, nbytes, now)
                state.read += len(access.addresses) * access.width * len(peers)
                self._flies(index, nbytes, now, self._there)
            else:
                self._came = state.queues.multicasts(peers, nbytes, now)
                state.written += len(access.addresses) * access.width
            state.pushed = True
            self.clock.pushes(index)
        if access.kind == "load":
            access.perform(None)
            if self._member == len(peers) - 1:
                self.clock.delivers(index, self._there, True, False)
        else:
            self._goes(access, self.ranks.states[self._member], *self._came[self._member], None)

    def _load(self, access: ThreadAccess, index: int, place: OwnedMemory, now: float) -> float:
        """The time at which the loaded data can be used."""
        clock, state, times = self.clock, self.state, self._times
        nbytes = moved(access)
        access.perform(None)
        fetched, near = place.rank not in (state.rank, HOST), False
        if fetched:
            if place.control:
                state.headers += len(access.addresses) * access.width
            else:
                state.read += len(access.addresses) * access.width
                if not state.pushed:
                    state.pushed = True
                    clock.pushes(index)
            there = state.queues.fetches(self.ranks.states[place.rank].queues, nbytes, now)
            self._flies(index, nbytes, now, there)
        elif access.sem is None:
            there, near = self._weak_load(access, index, place, now)
        else:
            there = state.queues.port_in.carries(nbytes, now) + times.us(times.l2)
            self._sees(access, index, now)
        clock.delivers(index, there, fetched, near)
        return there

    def _weak_load(self, access: ThreadAccess, index: int, place: OwnedMemory, now: float) -> tuple[float, bool]:
        """(the time at which the data can be used, whether it was in L1)."""
        state, times, nbytes = self.state, self._times, moved(access)
        lines = granules(access, _LINE)
        if all(line in state.lines for line in lines):
            return now + times.us(times.l1), True
        state.lines.update(lines)
        there = state.queues.port_in.carries(nbytes, now) + times.us(times.memory if place.cold else times.l2)
        if place.cold:
            there = max(there, state.queues.memory.carries(nbytes, now))
        if nbytes >= 128:  # payload, not a word of a table
            self._flies(index, nbytes, now, there)
        return there, False

    def _flies(self, index: int, nbytes: float, now: float, until: float) -> None:
        block = self.ranks.costs.flow.block_of(index)
        self.state.loads.setdefault(block, LoadsInFlight()).add(nbytes, now, until)

    def _sees(self, access: ThreadAccess, index: int, now: float) -> None:
        """A load that polls. If a store has arrived since the previous poll, the critical path becomes the store's."""
        clock, state = self.clock, self.state
        before = clock.looked.get(index)
        clock.looked[index] = now
        if before is None or clock.polling is None:
            return
        newest = max(
            (state.arrivals[g] for g in granules(access, _GRANULE) if g in state.arrivals),
            key=lambda arrival: arrival[0],
            default=None,
        )
        if newest is not None and newest[0] > max(before, clock.waited):
            clock.waited, clock.fresh, path = newest[0], True, newest[1].copy()
            path.adds(POLL, now)
            path.label = POLL
            clock.path = path

    def _store(self, access: ThreadAccess, index: int, place: OwnedMemory, chosen: Array | None) -> None:
        clock, state, times = self.clock, self.state, self._times
        now = clock.time
        nbytes = moved(access, chosen)
        if place.rank in (state.rank, HOST):
            access.perform(chosen)
            done = state.queues.port_out.carries(nbytes, now)
            if place.cold:
                state.queues.memory.carries(nbytes, now)
            if place.rank == HOST:
                state.host_acks = max(state.host_acks, done + times.host)
            else:
                state.local_acks = max(state.local_acks, done + times.us(times.l2))
            return
        peer = self.ranks.states[place.rank]
        threads = len(access.addresses) if chosen is None else int(np.count_nonzero(chosen))
        if place.control:
            state.headers += threads * access.width
        else:
            state.written += threads * access.width
            state.pushed = True
            clock.pushes(index)
        arrival, through = state.queues.sends(peer.queues, threads * access.width, now)
        self._goes(access, peer, arrival, through, chosen)

    def _goes(
        self, access: ThreadAccess, peer: TimedRank, arrival: float, through: float, chosen: Array | None
    ) -> None:
        """Let a store arrive at a peer's memory later."""
        clock, state = self.clock, self.state
        state.acks = max(state.acks, arrival + state.queues.one_way)
        path = clock.path.copy()
        path.goes_on(clock.time, path.label)
        path.adds(WIRE, through)
        path.adds(HOP, arrival)
        keys = granules(access, _GRANULE, chosen)

        def arrives() -> None:
            access.perform(chosen)
            for key in keys:
                peer.arrivals[key] = (arrival, path)

        self._events.at(arrival, arrives)

    def fence(self, sem: str, scope: str, threads: Array, instruction: Instruction) -> None:
        self.clock.issue(self._index[id(instruction)])
        if sem == "alias":
            self._fence_aliases()
        else:
            self._fence(scope)

    def _fence_aliases(self) -> None:
        """An alias fence, MEMBAR.SC.SYS in machine code: a system fence, but with a trip to a peer and back only if
        stores are in flight."""
        state, clock, links, answer = self.state, self.clock, self.state.queues, self._times.us(self._times.l2)
        own = clock.time + max(links.fence - 2 * links.one_way, answer)
        clock.fence(max(own, max(state.local_acks, state.acks, state.host_acks) + answer))

    def _fence(self, scope: str) -> None:
        """Wait until the other threads of the scope can read all stores of the block, and L2 has answered."""
        if scope in ("cta", "cluster"):
            return
        state, clock, answer = self.state, self.clock, self._times.us(self._times.l2)
        clock.system_fences += scope == "sys"
        until = max(clock.time, state.local_acks) + answer
        if scope == "sys":
            links = state.queues
            usual = clock.time + max(links.fence, 2 * links.one_way + answer)
            until = max(until, clock.time + links.fence, max(state.acks, state.host_acks) + answer)
            clock.fence(min(usual, until))
            clock.fence(until, WIRE)  # earlier bytes are still on the links
        else:
            clock.fence(until)

    def arrive(self, number: int, threads: Array, instruction: Instruction) -> None:
        self.clock.issue(self._index[id(instruction)])
        round_ = self._rounds[number] = self._rounds.get(number, 0) + 1
        key = (number, round_)
        if key not in self.state.meetings:
            self.state.meetings[key] = BarrierJoin()
            self.state.meetings.pop((number, round_ - 2), None)
        self.state.meetings[key].arrives(self.clock)

    def wait(self, until: Callable[[], bool], instruction: Instruction) -> None:
        if not until():
            self.state.blocked.append((until, getcurrent()))
            self._events.hub.switch()

    def barrier(self, number: int, threads: Array, instruction: Instruction) -> None:
        meeting, state = self.state.meetings[number, self._rounds[number]], self.state
        meeting.leaves(self.clock, self._times.us(_BARRIER_CYCLES))
        if state.pushed and not self.clock.pushed:
            self.clock.push()
        ready = [(until, one) for until, one in state.blocked if until()]
        if ready:
            state.blocked = [each for each in state.blocked if each not in ready]
            for _, one in ready:
                self._events.at(meeting.time, one.switch)

    def wait_for_launches(self, threads: Array, instruction: Instruction) -> None:
        self.clock.issue(self._index[id(instruction)])
        self.clock.depends()

    def launch_dependents(self) -> None: ...

    def warp_barrier(self, threads: Array, instruction: Instruction) -> None: ...
