"""The settings of a benchmark, which are checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from tricomm import env
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, OPS, reduction
from tricomm.perf.bench_row import OURS
from tricomm.perf.parsing import parse_name, parse_names
from tricomm.perf.units import DATA_COLLECTIVES

LIBRARIES = ("nccl", "gloo", "symm_mem", "flashinfer")
FUSED_DTYPES = ("float32", "float16", "bfloat16")
MODES = ("eager", "graph", "kernel")
_SHIPPED = (*registry.KERNELS, *registry.MULTICAST)
ALGORITHMS = tuple(dict.fromkeys(k.algorithm for k in _SHIPPED if k.collective in DATA_COLLECTIVES))
PROTOCOLS = tuple(dict.fromkeys(k.protocol for k in registry.KERNELS if k.collective in DATA_COLLECTIVES))


@dataclass(frozen=True)
class Case:
    """One collective of one type with the kernel that is asked for; None leaves the choice to selection.

    `library` is tricomm, or the library that makes the call instead. `hidden` (elements of a row) and `quantize` are
    those of an all_reduce_rms_norm.
    """

    collective: str
    algorithm: str | None
    protocol: str | None
    dtype: str = "float32"
    library: str = OURS
    hidden: int = 0
    quantize: str = ""


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


def parse_dtypes(text: str, op: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    """The types of a comma list; `all` stands for those that have `op`, if a collective reduces.

    Raises `InvalidArgument` for an unknown type or operation, and for a type without the operation.
    """
    parse_name(op, OPS, "op")
    names = parse_names(text, tuple(DTYPES), "dtype")
    if FUSED in collectives:
        return parse_names(text, FUSED_DTYPES, f"dtype of {FUSED}")
    if not any(COLLECTIVES[name].reduces for name in collectives):
        return names
    if text == "all":
        names = tuple(name for name in names if op in DTYPES[name].ops)
    for name in names:
        reduction(DTYPES[name], op)
    return names


def cases(
    collectives: tuple[str, ...], algorithms: str | None, protocols: str | None, world_size: int,
    dtypes: tuple[str, ...] = ("float32",), against: tuple[str, ...] = (), row: tuple[int, str] = (0, ""),
) -> tuple[Case, ...]:  # fmt: skip
    """For every type: the shipped kernels of `collectives` in the comma lists (or `all`), then the libraries `against`.

    `row` is (hidden, quantize) of an all_reduce_rms_norm, beside which its unfused form is always measured. None for a
    list leaves that part to selection. Raises `InvalidArgument` if a collective has no such kernel, with the
    list of its kernels.
    """
    allowed_algorithms = ALGORITHMS if algorithms is None else parse_names(algorithms, ALGORITHMS, "algorithm")
    allowed_protocols = PROTOCOLS if protocols is None else parse_names(protocols, PROTOCOLS, "protocol")
    chosen: list[Case] = []
    for collective in collectives:
        ordered = env.batch_invariant()
        fused = collective == FUSED
        switch = "multicast" in (algorithms or "").split(",")  # not of all: few boxes have one
        kernels = [k for k in registry.of(collective, world_size, switch) if k.rank_order or not ordered]
        shipped = [(k.algorithm, k.protocol) for k in kernels]
        fits = [(a, p) for a, p in shipped if a in allowed_algorithms and p in allowed_protocols]
        if not fits:
            raise InvalidArgument(
                f"{collective}: no kernel fits algorithm {algorithms or 'any'}, protocol {protocols or 'any'}; "
                f"there is {', '.join(f'{a}/{p}' for a, p in shipped)}"
            )
        forced = [(a if algorithms is not None else None, p if protocols is not None else None) for a, p in fits]
        hidden, quantize = row if fused else (0, "")
        libraries = ("unfused", *against) if fused else against
        for dtype in dtypes:
            chosen += [Case(collective, a, p, dtype, OURS, hidden, quantize) for a, p in forced]
            chosen += [Case(collective, None, None, dtype, library, hidden, quantize) for library in libraries]
    return tuple(dict.fromkeys(chosen))
