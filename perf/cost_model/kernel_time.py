"""Models the time of a kernel from its bytes and from the number of times that its ranks wait for each other.

    time = launch - overlap + (hops - barriers) * hop + barriers * barrier
         + the longer of bytes to and from peers / links and bytes in own memory / memory

Only dependent launches in a graph overlap, because the host makes single launches too late. A barrier of an NVLS kernel
also has an alias fence, unless the kernel works on handles. The bytes, hops and barriers are the registry's, which
`devtools.traffic` counts. The latencies and bandwidths are in `perf.cost_model.machines`. None of these kernels has
been measured: `tricomm predict --check` compares the model with published times of kernels of the same shape.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import text_table, units
from tricomm.perf.cost_model import machines, published
from tricomm.perf.cost_model.machines import MACHINES, MachineSpec
from tricomm.perf.cost_model.published_time import PublishedTime
from tricomm.perf.parsing import parse_name
from tricomm.policy import selection
from tricomm.policy.selection import Choice

_THREADS, _WORDS = 512, 16  # threads of the block to which `MachineSpec.block` refers; bytes of a thread's access
_HEADER = ("gpu", "W", "kernel", "mode", "bytes", "measured", "model", "error", "source")
_FEW = 5
_CLOSE = 0.05  # rounding of a published time: some are whole microseconds, of about 20
_CUBE_LINKS = 4 / 6  # a DGX-1V's six links lead to four peers, and a message takes one of two that lead to the same


@dataclass(frozen=True)
class TimeShares:
    """Microseconds of a call by limit; they add up to its time.

    latency          launch, time to the first push, hops, polls, end: the time of a call with one tile per block
    bytes in flight  the other tiles of a block, one after another; shorter with more blocks or larger tiles
    links            bytes that wait for a link
    barriers         of all ranks: fences, hops, polls
    memory           the part of the time of accesses to the GPU's own memory that exceeds the time of the links
    """

    latency: float = 0.0
    bytes_in_flight: float = 0.0
    links: float = 0.0
    barriers: float = 0.0
    memory: float = 0.0

    @property
    def limit(self) -> str:
        """The name of the largest share."""
        shares = asdict(self)
        return max(shares, key=lambda name: shares[name]).replace("_", " ")

    def text(self) -> str:
        """The name of the largest share, and its percentage of the time."""
        shares = asdict(self)
        return f"{self.limit} {max(shares.values()) / sum(shares.values()):.0%}"


@dataclass(frozen=True)
class Prediction:
    """The time of one call in microseconds and its parts: `waits` for peers and launches, which include `barriers`;
    `wire`, the links; and accesses to this GPU's `memory`, which overlap `wire`. `narrow`: the grid limits the
    bandwidth of `wire`, not the links."""

    waits: float
    wire: float
    memory: float
    barriers: float = 0.0
    narrow: bool = False

    @property
    def time_us(self) -> float:
        return self.waits + max(self.wire, self.memory)

    @property
    def shares(self) -> TimeShares:
        links, flight = (0.0, self.wire) if self.narrow else (self.wire, 0.0)
        more = max(0.0, self.memory - self.wire)
        return TimeShares(self.waits - self.barriers, flight, links, self.barriers, more)


def predict(
    machine: MachineSpec,
    kernel: Kernel,
    world_size: int,
    nbytes: float,
    mode: str = "graph",
    blocks: int | None = None,
    warps: int = _THREADS // 32,
    share: float = 1.0,
) -> Prediction:
    """The time of one call of `nbytes` of input per rank (of a root's if there is one), on the busiest rank.

    `mode` is graph (many calls in a CUDA graph) or eager. `blocks` and `warps` are the grid and its blocks; None is
    enough for the links. `share` is the part of the kernel's bytes to peers that is sent (another kernel's flags may
    cost less).
    """
    sent = float(units.moved(kernel, world_size)) * nbytes * share
    kind = kernel.kind
    own = (1 + kind.rows_out(world_size) / kind.rows_in(world_size)) * nbytes + _again(kernel, world_size, sent, nbytes)
    if kernel.collective in collective_specs.FUSED:
        own += 2 * nbytes  # the residual, and the norm
    aliases = kernel.multicast and not kernel.zero_copy
    barriers = kernel.barriers * (machine.barrier + (machine.alias_fence if aliases else 0.0))
    more = machine.eager if mode == "eager" else 0.0
    waits = machine.launch + more + (kernel.hops - kernel.barriers) * machine.hop + barriers
    wire, narrow = sent / _links(machine, kernel) / 1e3, 0.0
    if blocks is not None:
        # The first words of each thread to a peer are in flight during the hop.
        further = max(0.0, sent - 32 * warps * blocks * _WORDS * (world_size - 1))
        narrow = further / (blocks * machine.block * min(1.0, 32 * warps / _THREADS)) / 1e3
    return Prediction(waits, max(wire, narrow), own / machine.memory / 1e3, barriers, narrow > wire)


def launching(machine: MachineSpec, dependent: bool, mode: str) -> MachineSpec:
    """`machine` with the launch time of `mode`: a dependent launch in a graph begins sooner."""
    return replace(machine, launch=machine.launch - machine.overlap) if dependent and mode == "graph" else machine


def choice(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> Choice:
    """The grid that a communicator would launch without a tuned table; not of a fused kernel, whose grid has rows."""
    site = machines.facts(machine, world_size, kernel.needs_cube)
    if kernel.zero_copy:
        return selection.choose(site, kernel.collective, nbytes, zero_copy=(kernel.algorithm,))
    return selection.choose(site, kernel.collective, nbytes, kernel.algorithm, kernel.protocol, "graph")


def is_dependent(machine: MachineSpec, kernel: Kernel, world_size: int, nbytes: int) -> bool:
    """True if a communicator here would make the call by a dependent launch; the kernel is as for `choice`."""
    try:
        return machines.is_dependent(machine, world_size, choice(machine, kernel, world_size, nbytes).blocks)
    except InvalidArgument:  # this Triton does not compile the kernel
        return False


def _again(kernel: Kernel, world_size: int, sent: float, nbytes: float) -> float:
    """Bytes of own memory in addition to input and output: arrived data is read again, the input is staged for NVLS.
    A kernel that reads and writes in place by multimem has none."""
    if kernel.switched is None:
        return sent
    if kernel.zero_copy:
        return 0.0
    arrived = min(sent, float(kernel.written(world_size)) * nbytes)
    return arrived + (nbytes if kernel.read(world_size) else 0)


def _links(machine: MachineSpec, kernel: Kernel) -> float:
    """The bandwidth that a kernel reaches on the links. Raises `InvalidArgument` without the switch it needs."""
    if kernel.multicast and machine.no_switch:
        raise InvalidArgument(f"{kernel.name}: {machine.no_switch}")
    if kernel.multicast:
        return machine.multicast
    return machine.kernels * (_CUBE_LINKS if kernel.needs_cube else 1.0)


def kernels(machine: MachineSpec, collective: str, world_size: int, wire: str = "") -> list[Kernel]:
    """The kernels that such GPUs can run and that this Triton compiles for them; of quantising kernels only that of
    `wire`. On a cube mesh only some kernels run, because not all pairs are linked.

    Raises `InvalidArgument` if there is none.
    """
    usable = [k for k in _linked(machine, collective, world_size, wire) if why_not(machine, k) is None]
    if not usable:
        raise InvalidArgument(
            f"{collective}: 8 {machine.name} are a hybrid cube mesh, and no kernel of it goes around the links that "
            "this lacks; ask for all_reduce, all_gather or fewer ranks"
        )
    return usable


def left_out(machine: MachineSpec, collective: str, world_size: int, wire: str = "") -> dict[str, str]:
    """By name, why `kernels` leaves out kernels that could use these links."""
    linked = _linked(machine, collective, world_size, wire)
    return {k.name: reason for k in linked if (reason := why_not(machine, k)) is not None}


def why_not(machine: MachineSpec, kernel: Kernel) -> str | None:
    """None if such GPUs have what `kernel` needs and this Triton compiles it for them, else the reason."""
    if kernel.multicast and machine.no_switch:
        return machine.no_switch
    return kernel.why_not_compiled(machine.capability)


def _linked(machine: MachineSpec, collective: str, world_size: int, wire: str) -> list[Kernel]:
    cube = machine.cube and world_size == registry.CUBE_RANKS
    known = registry.of(collective, world_size, multicast=True, wire=True)
    return [k for k in known if k.needs_cube == cube and k.wire in ("", wire)]


def limit(machine: MachineSpec, collective: str, world_size: int, nbytes: int) -> float:
    """A lower bound for any kernel, in microseconds: the fewest bytes that must be sent, over the links' bandwidth."""
    return float(units.least(collective, world_size)) * nbytes / machine.links / 1e3


def find(name: str) -> MachineSpec:
    """The machine of that name; raises `InvalidArgument` with the nearest ones."""
    return MACHINES[parse_name(name.lower(), tuple(MACHINES), "gpu")]


@dataclass(frozen=True)
class Checked:
    """A published measurement and the model's answer."""

    row: PublishedTime
    time_us: float

    @property
    def error(self) -> float:
        """0.1 if the model's time is ten per cent above the measured one."""
        return self.time_us / self.row.time_us - 1


def check() -> list[Checked]:
    """Every published measurement of a kernel shaped like one of ours."""
    checked = []
    for row in published.MEASUREMENTS:
        call = partial(predict, MACHINES[row.gpu], row.kernel, row.world_size, row.nbytes, row.mode)
        call = partial(call, share=row.share)
        time = (call(blocks=row.grid.blocks, warps=row.grid.warps) if row.grid else call()).time_us
        checked.append(Checked(row, time + row.more_us))
    return checked


def median_error(rows: list[Checked]) -> float:
    """The median of the errors' sizes."""
    return median(abs(row.error) for row in rows)


def biases(rows: list[Checked]) -> dict[int, float]:
    """The median signed error of the rows of Hopper, for each decade of sizes that has five rows or more."""
    decades: dict[int, list[float]] = {}
    for row in rows:
        if MACHINES[row.row.gpu].capability == 90:
            decades.setdefault(10 ** (len(str(row.row.nbytes)) - 1), []).append(row.error)
    return {nbytes: median(errors) for nbytes, errors in sorted(decades.items()) if len(errors) >= _FEW}


def losses(rows: list[Checked], one_implementation: bool = False) -> list[float]:
    """For each size with several published kernels: how much slower the kernel that is fastest in the model is than the
    really fastest one, as a fraction; 0 if the model is right.

    Kernels of one size are compared if they are in one publication (of one machine and one method) or, with
    `one_implementation`, of one implementation in it.
    """
    groups: dict[tuple[object, ...], list[Checked]] = {}
    for checked in rows:
        row = checked.row
        who = row.source if one_implementation else row.publication
        key = (row.gpu, row.world_size, row.collective, row.nbytes, row.mode, who)
        groups.setdefault(key, []).append(checked)
    # The faster of two implementations of one kernel.
    best = [{(each.row.kernel, each.row.sync): each for each in sorted(g, key=_slowest_first)} for g in groups.values()]
    several = [list(group.values()) for group in best if len(group) > 1]
    return [_fastest(group).row.time_us / min(each.row.time_us for each in group) - 1 for group in several]


def _slowest_first(checked: Checked) -> float:
    return -checked.row.time_us


def _fastest(group: list[Checked]) -> Checked:
    return min(group, key=lambda each: each.time_us)


def report(rows: list[Checked]) -> list[str]:
    """The table of modelled and published times, and how often the order of kernels is right."""
    lines = ["# model: predicted, not measured; 'measured' is others' hardware and kernels; * gave a constant"]
    lines += text_table.lines(_HEADER, map(_cells, rows), right=("W", "bytes", "measured", "model", "error"))
    free = [row for row in rows if not row.row.calibrates]
    lines.append(
        f"median error {median_error(rows):.0%} of {len(rows)} rows, "
        f"{median_error(free):.0%} of the {len(free)} that gave no constant"
    )
    if held := [row for row in rows if row.row.held_out]:
        lines.append(f"median error {median_error(held):.0%} of the {len(held)} rows to which nothing was fitted")
    if decades := biases(rows):
        by_size = (f"{bias:+.0%} from {nbytes} B" for nbytes, bias in decades.items())
        lines.append("bias on Hopper by size: " + ", ".join(by_size))
    return [*lines, *_orders(rows, "publication"), *_orders(rows, "implementation")]


def _orders(rows: list[Checked], one: str) -> list[str]:
    lost = losses(rows, one == "implementation")
    if not lost:
        return []
    close = sum(loss <= _CLOSE for loss in lost)
    return [
        f"fastest kernel right at {lost.count(0)} of {len(lost)} sizes at which one {one} has several kernels, "
        f"at most {_CLOSE:.0%} slower than the fastest at {close}, at worst {max(lost):.0%}"
    ]


def to_json(rows: list[Checked]) -> dict[str, Any]:
    """The rows of `report`, and the median error. `measured_us` are the published times."""
    results = [
        {**asdict(each.row), "measured_us": each.row.time_us, "time_us": each.time_us, "error": each.error}
        for each in rows
    ]
    return {"schema": 1, "predicted": True, "median_error": median_error(rows), "results": results}


def _cells(checked: Checked) -> tuple[object, ...]:
    row = checked.row
    kernel = row.kernel.name + ("*" if row.calibrates else "")
    times = (f"{row.time_us:.1f}", f"{checked.time_us:.1f}", f"{checked.error:+.0%}")
    return row.gpu, row.world_size, kernel, row.mode, row.nbytes, *times, row.source
