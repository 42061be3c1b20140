"""The kernels that tricomm ships, by (collective, algorithm, protocol), with their costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib import import_module
from typing import Any

from tricomm import gone
from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs, multimem, wide_words
from tricomm.kernels.collective_specs import Collective
from tricomm.kernels.layout import Layout

Cost = Callable[[int], Fraction]
_LL, _LL128 = Fraction(2), Fraction(4, 3)  # bytes on the links per byte of payload
CUBE_RANKS = 8
_FIRST_FP8 = 89  # conversions to and from e4m3
_QUANTIZED = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Kernel:
    """One shipped kernel: the function of its name, compiled for `protocol`.

    `written` and `read` are functions of the world size: the bytes that the busiest rank writes to and reads from
    peers, per byte of its input (per byte of the message if there is a root), without headers, for types of 32 bits or
    more. `hops` counts dependent one-way messages, `barriers` the barriers among them. `switched`, with NVLS: the bytes
    in the busier direction of a GPU's links, which differ from the bytes of its accesses. `wire`: how it quantises on
    the links, one of `WIRES`; the costs of such a kernel are for 32-bit elements.
    """

    collective: str
    algorithm: str
    protocol: str
    written: Cost
    read: Cost
    hops: int
    barriers: int
    zero_copy: bool = False
    switched: Cost | None = None
    wire: str = ""

    @property
    def name(self) -> str:
        if self.collective == "barrier":
            return self.collective
        if self.pairwise:
            return f"{self.collective}_{self.protocol}"
        return f"{self.collective}_{self.algorithm}_{'zero_copy' if self.zero_copy else self.protocol}"

    @cached_property
    def function(self) -> Any:
        """The device code: `all_reduce_one_shot` of `all_reduce_one_shot.py`. Imported on first use."""
        collective = "all_reduce_rows" if self.collective in collective_specs.FUSED else self.collective
        algorithm = "two_shot_quantized" if self.wire else self.algorithm
        file = collective if self.pairwise or collective == "barrier" else f"{collective}_{algorithm}"
        module = import_module(f"tricomm.kernels.collectives.{file}")
        return getattr(module, f"{file}_zero_copy" if self.zero_copy else file)

    @property
    def fixed(self) -> dict[str, Any]:
        """The constexprs of `Specialization` that follow from the kernel's name."""
        values = {"LL": self.protocol != "simple", "WIDE": self.wide, "SWITCH": self.multicast}
        return values | ({"WIRE": self.codes, "GATHER": self.wire != self.codes} if self.wire else {})

    @property
    def codes(self) -> str:
        """The type of the codes that it sends, fp8 or int8; empty if it does not quantise."""
        return self.wire.removesuffix("_gather")

    @property
    def kind(self) -> Collective:
        """Shapes of the collective's input and output."""
        return collective_specs.find(self.collective)

    @property
    def reduces(self) -> bool:
        return self.kind.reduces

    @property
    def needs_cube(self) -> bool:
        """True for a kernel that runs over a hybrid cube mesh of eight ranks only."""
        return self.algorithm.startswith("hybrid_cube_mesh")

    @property
    def rank_order(self) -> bool:
        """True if it reduces in rank order. Kernels of a cube mesh do not, because they add the sums of two quads, nor
        do NVLS kernels, because the switch chooses the order.

        In rank order `reduction.py` accumulates each element from rank 0 on and rounds it once, so its bits depend on
        nothing else. In a quantised call they also depend on the other elements of its block.
        """
        return not (self.reduces and (self.needs_cube or self.multicast or self.wire))

    @property
    def multicast(self) -> bool:
        """True for a kernel that needs memory with a multicast address (`kernels/multimem.py`)."""
        return self.algorithm == "multicast"

    @property
    def wide(self) -> bool:
        """True for a kernel of wide words, which not every compiler and GPU has (`wide_words.why_not`)."""
        return self.protocol == "ll128"

    @property
    def words_per_thread(self) -> int:
        """The fewest 64-bit words of a tile (for `ll128` wide words) per thread. An access through the switch has two
        words: with fewer, two threads would make the same access, and in place the second one would add a sum again.
        """
        return 2 if self.wide or self.multicast else 1

    def why_not_compiled(self, architecture: int) -> str | None:
        """None if this Triton compiles it for `architecture` (90 for sm_90), else the reason."""
        if self.codes == "fp8" and architecture < _FIRST_FP8:
            return f"sm_{architecture} has no e4m3 conversions: use sm_{_FIRST_FP8} or newer, or wire=int8"
        if self.wide:
            return wide_words.why_not(architecture)
        return multimem.why_not(architecture) if self.multicast else None

    def why_not_ranks(self, world_size: int) -> str | None:
        """None if `world_size` ranks can run it, else the reason."""
        if self.needs_cube and world_size != CUBE_RANKS:
            return f"a hybrid cube mesh has {CUBE_RANKS} ranks, not {world_size}"
        if self.pairwise and world_size < 2:
            return f"a message has a sender and a receiver, so 2 ranks at least, not {world_size}"
        return None

    def why_not_reduced(self, element: str, op: str) -> str | None:
        """None if it reduces `element` by `op`, as `dtypes.reduction` names them, else the reason."""
        if self.wire:
            return why_not_wire(element, op)
        return multimem.why_not_reduced(element, op) if self.reduces and self.multicast else None

    @property
    def in_place(self) -> bool:
        """True for a kernel that writes the result into the symmetric memory of all ranks."""
        return self.zero_copy and self.algorithm in ("two_shot", "multicast")

    @property
    def pairwise(self) -> bool:
        """True for one half of a message between two ranks."""
        return self.collective in collective_specs.MESSAGES

    @property
    def staged(self) -> bool:
        """Whether peers read a rank's staged input; then all buffers of a parity form one staging area."""
        return not self.zero_copy and not self.multicast and self.read(2) > 0

    @property
    def shards(self) -> int | None:
        """The number of shards into which a message is divided; 0: one per rank; None: it is not divided."""
        divided = "two_shot" in self.algorithm or (self.multicast and self.collective == "all_reduce")
        return None if not divided else 4 if self.needs_cube else 0

    def chunk_words(self, world_size: int, plan: Layout) -> int:
        """The most 64-bit words of a row that one epoch carries, if the kernel divides a call into chunks."""
        part = plan.buffer_words(self.algorithm, self.protocol, self.collective)
        shards = 1 if self.shards is None else self.shards or world_size
        return part * (world_size if self.staged else shards)


def why_not_wire(element: str, op: str) -> str | None:
    """None if an all-reduce of `element` by `op` can be quantised on the links, else the reason."""
    if element not in _QUANTIZED:
        return f"{element} is not quantised; {', '.join(_QUANTIZED)} are"
    return None if op in ("sum", "avg") else f"op {op!r} is not quantised; sum and avg are"


def wire_of(algorithm: str | None) -> str:
    """The member of `WIRES` whose kernel is named `algorithm`; empty if there is none."""
    return next((kernel.wire for kernel in WIRE if kernel.algorithm == algorithm), "")


def _none(world_size: int) -> Fraction:
    return Fraction(0)


def _peers(world_size: int) -> Fraction:
    return Fraction(world_size - 1)


def _shards(world_size: int) -> Fraction:
    return Fraction(2 * (world_size - 1), world_size)


def _rows(world_size: int) -> Fraction:
    return Fraction(world_size - 1, world_size)


def _all(world_size: int) -> Fraction:
    return Fraction(world_size)


def _switched(world_size: int) -> Fraction:
    return Fraction(world_size + 1, world_size)


def _once(world_size: int) -> Fraction:
    return Fraction(1 if world_size > 1 else 0)


def _fixed(value: Fraction) -> Cost:
    return lambda world_size: value


def _times(factor: Fraction, cost: Cost) -> Cost:
    return lambda world_size: factor * cost(world_size)


def algorithm_of(wire: str) -> str:
    """The name of the algorithm that quantises by `wire`, one of `WIRES`."""
    return f"two_shot_{wire}"


def _flagged(collective: str, algorithm: str, cost: Cost, hops: int) -> tuple[Kernel, Kernel]:
    """The costs under `ll` and `ll128` of `cost` bytes of payload."""
    return (
        Kernel(collective, algorithm, "ll", _times(_LL, cost), _none, hops, 0),
        Kernel(collective, algorithm, "ll128", _times(_LL128, cost), _none, hops, 0),
    )


def _pushed(collective: str, cost: Cost) -> tuple[Kernel, ...]:
    """The entries, one for each protocol, of a kernel that pushes."""
    return (*_flagged(collective, "one_shot", cost, 1), Kernel(collective, "one_shot", "simple", cost, _none, 1, 1))


_CUBE, _CUBE_TWO_SHOT, _CUBE_ROWS = _fixed(Fraction(4)), _fixed(Fraction(7, 4)), _fixed(Fraction(7))

KERNELS = (
    *_flagged("all_reduce", "one_shot", _peers, 1),
    Kernel("all_reduce", "one_shot", "simple", _none, _peers, 3, 1),
    *_flagged("all_reduce", "two_shot", _shards, 2),
    Kernel("all_reduce", "two_shot", "simple", _shards, _none, 2, 2),
    *_flagged("all_reduce", "hybrid_cube_mesh", _CUBE, 2),
    Kernel("all_reduce", "hybrid_cube_mesh", "simple", _CUBE, _none, 2, 2),
    Kernel("all_reduce", "hybrid_cube_mesh_two_shot", "simple", _CUBE_TWO_SHOT, _none, 3, 3),
    *_flagged("all_gather", "one_shot", _peers, 1),
    Kernel("all_gather", "one_shot", "simple", _none, _peers, 3, 1),
    *_flagged("all_gather", "hybrid_cube_mesh", _CUBE_ROWS, 2),
    Kernel("all_gather", "hybrid_cube_mesh", "simple", _CUBE_ROWS, _none, 2, 2),
    *_pushed("reduce_scatter", _rows),
    *_pushed("broadcast", _peers),
    Kernel("broadcast", "two_shot", "simple", _shards, _none, 2, 2),
    *_pushed("reduce", _once),
    *_pushed("gather", _once),
    *_pushed("scatter", _rows),
    *_pushed("all_to_all", _rows),
    *_pushed("all_to_all_v", _rows),
    Kernel("barrier", "one_shot", "simple", _none, _none, 1, 1),
)

# Over symmetric memory, without a staging copy: in place by two shots, else by one.
ZERO_COPY = (
    Kernel("all_reduce", "one_shot", "simple", _none, _peers, 4, 2, zero_copy=True),
    Kernel("all_reduce", "two_shot", "simple", _rows, _rows, 5, 2, zero_copy=True),
    Kernel("all_gather", "one_shot", "simple", _none, _peers, 4, 2, zero_copy=True),
    Kernel("reduce_scatter", "one_shot", "simple", _none, _rows, 4, 2, zero_copy=True),
)

# Through the switch, over memory with a multicast address.
MULTICAST = (
    Kernel("all_reduce", "multicast", "simple", _rows, _rows, 4, 2, switched=_switched),
    Kernel("all_gather", "multicast", "simple", _peers, _none, 1, 1, switched=_all),
    Kernel("reduce_scatter", "multicast", "simple", _none, _rows, 3, 1, switched=_fixed(Fraction(1))),
    Kernel("broadcast", "multicast", "simple", _peers, _none, 1, 1, switched=_fixed(Fraction(1))),
)

# The same over symmetric memory, of which input and output have multicast addresses.
MULTICAST_ZERO_COPY = (
    Kernel("all_reduce", "multicast", "simple", _rows, _rows, 5, 2, zero_copy=True, switched=_switched),
)

WIRES = ("fp8", "int8", "fp8_gather")


def quantized_cost(wire: str, protocol: str = "simple", itemsize: int = 4) -> Cost:
    """`written` of the kernel that quantises by `wire`: in both legs or only in the second, elements of `itemsize`
    bytes become 8 bits each, with a scale of 16 bits per block of 128. Under `ll128` the scales for 768 bytes of codes
    take one wide word, or two if elements have 16 bits."""
    if protocol == "ll128":
        return _times(_LL128 * (1 + Fraction(1, 16 * itemsize)) / itemsize, _shards)
    codes = Fraction(130, 128 * itemsize)
    return _times((1 + codes) / 2 if wire.endswith("_gather") else codes, _shards)


def _quantised(wire: str, protocol: str) -> Kernel:
    cost, barriers = quantized_cost(wire, protocol), 2 if protocol == "simple" else 0
    return Kernel("all_reduce", algorithm_of(wire), protocol, cost, _none, 2, barriers, wire=wire)


# Quantised on the links: plain codes, and codes in words with flags.
WIRE = (*(_quantised(wire, "simple") for wire in WIRES), *(_quantised(wire, "ll128") for wire in ("fp8", "int8")))

# With an epilogue of rows: RMSNorm, optionally quantised, or a user's function.
FUSED = tuple(
    kernel
    for name in collective_specs.FUSED
    for kernel in (*_flagged(name, "one_shot", _peers, 1), *_flagged(name, "two_shot", _shards, 2))
)

# Between two ranks; costs of the busier rank.
MESSAGES = (
    Kernel("send", "one_shot", "ll", _times(_LL, _once), _none, 1, 0),
    Kernel("send", "one_shot", "simple", _once, _none, 1, 0),
    Kernel("recv", "one_shot", "ll", _none, _none, 1, 0),
    Kernel("recv", "one_shot", "simple", _none, _none, 1, 0),
)

ALL = (*KERNELS, *ZERO_COPY, *MULTICAST, *MULTICAST_ZERO_COPY, *WIRE, *MESSAGES)

_BY_KEY = {(k.collective, k.algorithm, k.protocol, k.zero_copy): k for k in (*ALL, *FUSED)}


def of(collective: str, world_size: int, multicast: bool = False, wire: bool = False) -> list[Kernel]:
    """The kernels of `collective` for `world_size` ranks. Cube-mesh kernels need eight, NVLS kernels `multicast`
    memory. `wire` adds those that quantise on the links, which a call or an option has to request."""
    cube = world_size == CUBE_RANKS
    known = (*KERNELS, *(MULTICAST if multicast else ()), *FUSED, *MESSAGES, *(WIRE if wire else ()))
    return [k for k in known if k.collective == collective and (cube or not k.needs_cube)]


def name_of(algorithm: str | None, protocol: str | None) -> str:
    """The kernel as a caller has named it; the caller may leave out algorithm or protocol."""
    return "/".join(filter(None, (algorithm, protocol))) or "any"


def find(collective: str, algorithm: str, protocol: str, zero_copy: bool = False) -> Kernel:
    """The kernel of that name; raises `InvalidArgument`, which lists the kernels that exist."""
    kernel = _BY_KEY.get((collective, algorithm, protocol, zero_copy))
    if kernel is None:
        gone.refuse(f"algorithm={algorithm!r}")
        known = ", ".join(f"{a}/{p}" for c, a, p, z in _BY_KEY if c == collective and z == zero_copy)
        raise InvalidArgument(f"{collective}: there is no {algorithm}/{protocol} kernel; there is {known or 'none'}")
    return kernel
