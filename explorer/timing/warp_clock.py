"""The clock of a warp. It tells when each instruction is issued, and what the time was spent on."""

from __future__ import annotations

from dataclasses import dataclass

from tricomm.explorer.timing.instruction_costs import InstructionCost, KernelCosts

# Parts of a critical path's time.
#   start  before the first store of payload to a peer, or the first load from a peer
#   wire   waiting for a link
#   hop    waiting for a store on its way to a peer, or for a load on its way there and back
#   poll   from the arrival of a store until the loop that polls for it is left
#   fence  waiting until earlier stores are visible to the fence's scope
#   work   all other time before the last poll
#   tail   all other time after the last poll
PARTS = ("start", "wire", "hop", "poll", "fence", "work", "tail")
START, WIRE, HOP, POLL, FENCE, WORK, TAIL = range(len(PARTS))
SCHEDULERS = 4  # warp schedulers of an SM


class Path:
    """The critical path that led to a clock's time: microseconds by part, which add up to that time."""

    __slots__ = ("label", "mark", "parts", "tail")

    def __init__(self, parts: list[float], mark: float, label: int, tail: float = 0.0) -> None:
        self.parts, self.mark, self.label = parts, mark, label
        self.tail = tail  # the part of `work` before the last poll

    def copy(self) -> Path:
        return Path(self.parts.copy(), self.mark, self.label, self.tail)

    def goes_on(self, now: float, label: int) -> None:
        """Charge the time until `now` to the current label. Time after it is charged to `label`."""
        self.parts[self.label] += now - self.mark
        self.mark, self.label = now, label

    def adds(self, part: int, until: float) -> None:
        """Charge the time from the last charged moment to `until` to `part`."""
        self.parts[part] += until - self.mark
        self.mark = until

    def ended(self, now: float) -> list[float]:
        """The parts of the whole path. Work after the last poll is its tail."""
        path = self.copy()
        path.goes_on(now, WORK)
        path.parts[TAIL] = path.parts[WORK] - path.tail
        path.parts[WORK] = path.tail
        return path.parts


@dataclass
class SharedChain:
    """The load chain of a block's shared memory, as one location: a read depends on all earlier writes."""

    data: int = 0
    order: int = 0


class LoadChain:
    """For each register of a warp, the number of dependent round trips to memory, until the first push to a peer.

    A load that misses L1 is a round trip. It depends on an earlier one for one of two reasons:

    data     its address, or the address or value of the push, needs the earlier result.
    order    an in-order instruction before it (a store, a branch, a barrier) needs the earlier result. `floor` is the
             number by program order alone.
    """

    __slots__ = ("_data", "_order", "_shared", "floor")

    def __init__(self, registers: int, shared: SharedChain) -> None:
        self._data, self._order = [0] * registers, [0] * registers
        self._shared, self.floor = shared, 0

    def passes(self, cost: InstructionCost) -> None:
        """Update the chain for an instruction that computes, stores, or issues a load."""
        data, order = self.before(cost)
        if cost.shared:
            shared = self._shared
            if cost.writes:
                data, order = max(data, shared.data), max(order, shared.order)
            else:
                shared.data, shared.order = max(data, shared.data), max(order, shared.order)
        for n in cost.writes:
            self._data[n], self._order[n] = data, order
        if cost.ordered:
            self.floor = order

    def loads(self, cost: InstructionCost) -> None:
        """Count a round trip for the load of an instruction for which `passes` has been called."""
        for n in cost.writes:
            self._data[n] += 1
            self._order[n] += 1

    def before(self, cost: InstructionCost) -> tuple[int, int]:
        """The round trips before an instruction: (those that its operands depend on, those by program order)."""
        reads = cost.reads
        data = max((self._data[n] for n in reads), default=0)
        return data, max(self.floor, max((self._order[n] for n in reads), default=0))


class WarpClock:
    """The clock of one warp: `time` in microseconds. Instructions up to `at` have been issued.

    chain          the chain of the warp's loads; None after the block's first push
    first_push     `LoadChain.before` of the warp's first push; None before that push
    system_fences  number of fences at system scope that the warp has passed
    issued         issue slots that the warp has taken outside of polls
    """

    def __init__(self, costs: KernelCosts, warps: int, cycle: float, shared: SharedChain) -> None:
        self._costs, self._table = costs, costs.costs
        # The warps of a block run the same code at the same time, and share the schedulers of the SM.
        self._slot = cycle * max(1.0, warps / SCHEDULERS)
        self._ready = [0.0] * costs.registers
        self.time = 0.0
        self._at = self._end = 0
        self.path = Path([0.0] * len(PARTS), 0.0, START)
        self.pushed = False
        self.polling: int | None = None
        self.looked: dict[int, float] = {}  # in the present polling loop: the time of each instruction's last poll
        self.waited = -1.0  # arrival of the last store that this warp has polled for
        self.fresh = False  # True if it has read that store since the last barrier of its block
        self._fetched = -1.0  # when the latest load from a peer arrives
        self.chain: LoadChain | None = LoadChain(costs.registers, shared)
        self.first_push: tuple[int, int] | None = None
        self.system_fences = 0
        self.issued = 0.0

    def enter(self, block: int) -> None:
        """Finish the previous basic block, and enter block `block`."""
        costs = self._costs
        self._run(self._end)
        self._at, self._end = costs.starts[block], costs.ends[block]
        polling = costs.polling[block]
        if polling != self.polling:
            self._leave_poll()
            self.polling = polling
            if polling is not None:
                self.path.goes_on(self.time, POLL)

    def _leave_poll(self) -> None:
        if self.polling is not None:
            self.path.goes_on(self.time, START if not self.pushed else WORK)
            self.path.tail = self.path.parts[WORK]
            self.looked.clear()

    def issue(self, index: int) -> float:
        """Run up to and including instruction `index`. Returns the time at which it is issued, with its operands
        ready."""
        if not self._at <= index < self._end:
            return self.time
        self._run(index)
        cost = self._table[index]
        when = max([self.time, *(self._ready[n] for n in cost.reads)])
        self._run(index + 1)
        return when

    def _run(self, end: int) -> None:
        """Run the instructions before `end`. ptxas moves an instruction of a basic block past later ones that do not
        need it. So a late operand stalls the warp only if its reader cannot be moved: a store, a barrier, a fence or a
        branch."""
        ready, slot, time, chain = self._ready, self._slot, self.time, self.chain
        for cost in self._table[self._at : end]:
            start = time
            for n in cost.reads:
                if ready[n] > start:
                    start = ready[n]
            for n in cost.writes:
                ready[n] = start + cost.latency
            if cost.ordered and start > time:
                self._stalls(time, start)
                time = start
            time += slot * cost.slots
            if chain is not None:
                chain.passes(cost)
        if self.polling is None:
            self.issued += sum(cost.slots for cost in self._table[self._at : end])
        self.time = time
        self._at = max(end, self._at)

    def _stalls(self, now: float, until: float) -> None:
        if self._fetched > now:
            label = self.path.label
            self.path.goes_on(now, HOP)
            self.path.goes_on(min(self._fetched, until), label)

    def delivers(self, index: int, when: float, fetched: bool = False, near: bool = False) -> None:
        """The data that instruction `index` loads arrives at time `when`. `fetched`: from a peer; `near`: from L1."""
        if self.chain is not None and not near:
            self.chain.loads(self._table[index])
        for n in self._table[index].writes:
            self._ready[n] = when
        if fetched:
            self._fetched = max(self._fetched, when)

    def stands(self, until: float) -> None:
        """Stall the warp: nothing is issued before `until`."""
        self.time = max(self.time, until)

    def depends(self) -> None:
        """The wait of a dependent launch. All before it has overlapped with the previous kernel, which takes longer."""
        self._ready = [min(ready, self.time) for ready in self._ready]
        self.path.mark = self.time

    def fence(self, until: float, part: int = FENCE) -> None:
        """Stall the warp until `until`, as `stands`, because of a fence."""
        label = self.path.label
        self.path.goes_on(self.time, part)
        self.stands(until)
        self.path.goes_on(self.time, label)

    def pushes(self, index: int) -> None:
        """Instruction `index` is a push: a store of payload to a peer, or a load of payload from a peer."""
        if self.chain is not None:
            self.first_push = self.chain.before(self._table[index])
        self.push()

    def push(self) -> None:
        """Note that the block has made its first push."""
        self.pushed, self.chain = True, None
        if self.path.label == START:
            self.path.goes_on(max(self.time, self.path.mark), WORK)

    def ends(self) -> None:
        self._run(self._end)
        self._leave_poll()
        self.polling = None


class BarrierJoin:
    """The warps of a block at one barrier. All leave it with the latest clock, and with the path that this clock
    depends on."""

    __slots__ = ("time", "_floor", "_path", "_waited")

    def __init__(self) -> None:
        self.time, self._waited, self._floor = -1.0, -1.0, 0
        self._path: Path | None = None

    def arrives(self, clock: WarpClock) -> None:
        # The warp that polled for the latest store since the last barrier determines the path; if none polled, the
        # slowest.
        waited = clock.waited if clock.fresh else -1.0
        if (waited, clock.time) > (self._waited, self.time) or self._path is None:
            self._path, self._waited = clock.path.copy(), waited
            self._path.goes_on(clock.time, self._path.label)
        self.time = max(self.time, clock.time)
        if clock.chain is not None:
            self._floor = max(self._floor, clock.chain.floor)

    def leaves(self, clock: WarpClock, latency: float) -> None:
        assert self._path is not None
        clock.path, clock.fresh = self._path.copy(), False
        if clock.pushed and clock.path.label == START:
            clock.path.label = WORK
        clock.time = self.time + latency
        if clock.chain is not None:
            clock.chain.floor = self._floor
