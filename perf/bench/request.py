"""The settings of a benchmark, which are checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tricomm import env
from tricomm.core.fused import fused_call
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.collectives.registry import Kernel
from tricomm.kernels.dtypes import DTYPES, OPS, reduction
from tricomm.perf import parsing
from tricomm.perf.bench_row import OURS
from tricomm.perf.parsing import parse_name, parse_names
from tricomm.perf.units import DATA_COLLECTIVES

LIBRARIES = ("nccl", "gloo", "symm_mem", "flashinfer", "kraken")
FUSED_DTYPES = ("float32", "float16", "bfloat16")
MODES = ("eager", "graph", "kernel")
_SHIPPED = (*registry.KERNELS, *registry.MULTICAST, *registry.WIRE)
ALGORITHMS = tuple(dict.fromkeys(k.algorithm for k in _SHIPPED if k.collective in DATA_COLLECTIVES))
PROTOCOLS = tuple(dict.fromkeys(k.protocol for k in registry.KERNELS if k.collective in DATA_COLLECTIVES))


@dataclass(frozen=True)
class Case:
    """One collective of one type by a certain kernel; None leaves the choice to selection.

    `library` is tricomm, or the library that makes the call instead. `hidden` (elements of a row), `quantize` and
    `top_k` (experts' rows that are summed for a row) are those of an all_reduce_rms_norm.
    """

    collective: str
    algorithm: str | None
    protocol: str | None
    dtype: str = "float32"
    library: str = OURS
    hidden: int = 0
    quantize: str = ""
    top_k: int = 0


@dataclass(frozen=True)
class Settings:
    """A run: every case at every size in every mode. Sizes in bytes, `timeout` in seconds; `device` is auto, cpu or
    cuda.

    Mode `eager` is a launch a call, `graph` is a CUDA graph of one call, `kernel` a CUDA graph of many calls.
    """

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    op: str = "sum"
    modes: tuple[str, ...] = ("eager",)
    iters: int = 20
    warmup: int = 1
    check: bool = True
    device: str = "auto"
    timeout: float = 300.0

    @property
    def rows(self) -> int:
        """The number of rows, at most."""
        return len(self.cases) * len(self.sizes) * len(self.modes)

    def cases_of(self, collective: str, dtype: str) -> list[Case]:
        """The cases that are compared with each other."""
        return [case for case in self.cases if (case.collective, case.dtype) == (collective, dtype)]


def _reduces(collective: str) -> bool:
    """True for a plain collective that reduces."""
    return collective != FUSED and COLLECTIVES[collective].reduces


def parse_dtypes(text: str, op: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    """The types of a comma list; `all` stands for those that have `op`, if a collective reduces.

    Raises `InvalidArgument` for an unknown type or operation, and for a type without the operation.
    """
    parse_name(op, OPS, "op")
    if op != "sum" and not any(_reduces(name) for name in collectives):
        have = "has sums alone" if FUSED in collectives else "reduces nothing"
        raise InvalidArgument(f"op {op!r}: {', '.join(collectives)} {have}; leave it out")
    names = parse_names(text, tuple(DTYPES), "dtype", parsing.DTYPES)
    if FUSED in collectives:
        return parse_names(text, FUSED_DTYPES, f"dtype of {FUSED}", parsing.DTYPES)
    if not any(COLLECTIVES[name].reduces for name in collectives):
        return names
    if text == "all":
        names = tuple(name for name in names if op in DTYPES[name].ops)
    for name in names:
        reduction(DTYPES[name], op)
    return names


def cases(
    collectives: tuple[str, ...],
    algorithms: str | None,
    protocols: str | None,
    world_size: int,
    dtypes: tuple[str, ...] = ("float32",),
    against: tuple[str, ...] = (),
    row: tuple[int, str, int] = (0, "", 0),
) -> tuple[Case, ...]:
    """For every type: the shipped kernels of `collectives` in the comma lists (or `all`), then the libraries `against`.

    `row` is (hidden, quantize, top_k) of an all_reduce_rms_norm, whose unfused form is always measured with it. None
    for a list leaves that part to selection. Raises `InvalidArgument` if a collective has no such kernel, with the
    list of its kernels, and for rows that its call refuses.
    """
    allowed_algorithms = ALGORITHMS if algorithms is None else parse_names(algorithms, ALGORITHMS, "algorithm")
    allowed_protocols = PROTOCOLS if protocols is None else parse_names(protocols, PROTOCOLS, "protocol")
    chosen: list[Case] = []
    for collective in collectives:
        fused = collective == FUSED
        shipped = [(k.algorithm, k.protocol) for k in _shipped(collective, algorithms, world_size)]
        fits = [(a, p) for a, p in shipped if a in allowed_algorithms and p in allowed_protocols]
        if not fits:
            raise InvalidArgument(
                f"{collective}: no kernel fits algorithm {algorithms or 'any'}, protocol {protocols or 'any'}; "
                f"there is {', '.join(f'{a}/{p}' for a, p in shipped)}"
            )
        forced = [(a if algorithms is not None else None, p if protocols is not None else None) for a, p in fits]
        rows = row if fused else (0, "", 0)
        fused_call.check_row(*rows[:2])
        libraries = ("unfused", *against) if fused else against
        for dtype in dtypes:
            chosen += [Case(collective, a, p, dtype, OURS, *rows) for a, p in forced]
            chosen += [Case(collective, None, None, dtype, library, *rows) for library in libraries]
    return tuple(dict.fromkeys(chosen))


def left_out(
    collectives: tuple[str, ...], algorithms: str | None, protocols: str | None, world_size: int
) -> list[tuple[str, str]]:
    """(name, reason) for each combination of the comma lists for which `cases` has no kernel. Lists that are `all` or
    not given count as naming none."""
    named = (algorithms, ALGORITHMS, "algorithm"), (protocols, PROTOCOLS, "protocol")
    lists = [(None,) if text in (None, "all") else parse_names(text, known, kind) for text, known, kind in named]
    refused = []
    for collective in collectives:
        shipped = _shipped(collective, algorithms, world_size)
        for algorithm, protocol in product(*lists):
            reason = _why_not(collective, algorithm, protocol, shipped, world_size)
            if reason is not None:
                refused.append((f"{collective} {algorithm or 'any'}/{protocol or 'any'}", reason))
    return refused


def _shipped(collective: str, algorithms: str | None, world_size: int) -> list[Kernel]:
    ordered = env.batch_invariant()
    named = [name.strip() for name in (algorithms or "").split(",")]
    switch = "multicast" in named  # `all` leaves it out: few boxes have one
    wire = any(registry.wire_of(name) for name in named)  # `all` leaves them out: their results are rounded to few bits
    return [k for k in registry.of(collective, world_size, switch, wire) if k.rank_order or not ordered]


def _why_not(
    collective: str, algorithm: str | None, protocol: str | None, shipped: list[Kernel], world_size: int
) -> str | None:
    """None if there is such a kernel among `shipped`, else the reason."""

    def such(kernels: list[Kernel]) -> list[Kernel]:
        return [k for k in kernels if algorithm in (None, k.algorithm) and protocol in (None, k.protocol)]

    if such(shipped):
        return None
    others = such(registry.of(collective, registry.CUBE_RANKS, multicast=True, wire=True))
    if not others:
        return f"{collective} has no such kernel; there is {', '.join(f'{k.algorithm}/{k.protocol}' for k in shipped)}"
    ranks = others[0].why_not_ranks(world_size)
    return ranks or "it adds in another order than that of the ranks, and TRICOMM_BATCH_INVARIANT asks for that"
