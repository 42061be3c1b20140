"""What a benchmark run will do, worked out and refused before anything is started; and nccl-tests' formulas."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.kernels import collective_specs as facts
from tricomm.kernels.collectives import registry
from tricomm.kernels.dtypes import DTYPES, OPS, reduction

MAX_RANKS = 8
OURS = "tricomm"
LIBRARIES = ("nccl", "gloo", "symm_mem")
MODES = ("eager", "graph", "kernel")
COLLECTIVES = tuple(name for name in facts.COLLECTIVES if name != "barrier")
ALGORITHMS = tuple(dict.fromkeys(k.algorithm for k in registry.KERNELS if k.collective in COLLECTIVES))
PROTOCOLS = tuple(dict.fromkeys(k.protocol for k in registry.KERNELS if k.collective in COLLECTIVES))
_TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    """One collective of one type with the kernel that is asked for; None leaves the choice to selection.

    `library` is tricomm, or who makes the call instead.
    """

    collective: str
    algorithm: str | None
    protocol: str | None
    dtype: str = "float32"
    library: str = OURS


@dataclass(frozen=True)
class Settings:
    """A run: every case at every size in every mode. Sizes in bytes, `timeout` in seconds, `device` is auto, cpu or
    cuda. `eager` is a launch a call, `graph` a CUDA graph of one call, `kernel` one of many."""

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
        """How many rows there will be, at most."""
        return len(self.cases) * len(self.sizes) * len(self.modes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Settings:
        cases = tuple(Case(**case) for case in data["cases"])
        tuples = {name: tuple(data[name]) for name in ("sizes", "modes")}
        return Settings(**{**data, **tuples, "cases": cases})


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of `1K:1M:4` (first:last:factor) or of a comma list such as `1K,64K,1M`.

    Raises `InvalidArgument` for anything else, and for sizes below one byte or above 16 GiB.
    """
    if ":" not in text:
        sizes = [_bytes(part) for part in text.split(",")]
    else:
        parts = text.split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and not re.fullmatch(r"\d{1,6}", parts[2])):
            raise InvalidArgument(f"sizes {text!r}: first:last:factor is needed, like 1K:1M:4, or a comma list")
        first, last, factor = _bytes(parts[0]), _bytes(parts[1]), int(parts[2]) if len(parts) == 3 else 2
        if first > last or factor < 2:
            raise InvalidArgument(f"sizes {text!r}: first must not exceed last, and the factor is 2 or more")
        sizes = [first]
        while sizes[-1] * factor <= last:
            sizes.append(sizes[-1] * factor)
    return tuple(dict.fromkeys(sizes))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*(\d{1,12})\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 1 <= size <= 16 * _UNITS["G"]:
        raise InvalidArgument(f"size {text!r}: bytes from 1 to 16G are needed, with K, M or G for powers of 1024")
    return size


def parse_budget(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h`. Raises `InvalidArgument`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smh]?)", text.strip())
    seconds = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 0 < seconds <= 86400.0:
        raise InvalidArgument(f"budget {text!r}: a time like 90s, 5m or 1h is needed, of a day at most")
    return seconds


def parse_names(text: str, allowed: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names of a comma list, each of them in `allowed`; `all` stands for all. Raises `InvalidArgument`."""
    names = allowed if text == "all" else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    return tuple(one_name(name, allowed, what) for name in names)


def one_name(text: str, allowed: tuple[str, ...], what: str) -> str:
    """`text`, where it is one of `allowed`; raises `InvalidArgument` with the nearest and the list otherwise."""
    if text not in allowed:
        near = difflib.get_close_matches(text, allowed, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidArgument(f"{what} {text!r} is unknown{meant}; there is {', '.join(allowed)}")
    return text


def parse_dtypes(text: str, op: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    """The types of a comma list; `all` stands for those for which `op` is defined, where a collective reduces.

    Raises `InvalidArgument` for a type or an operation that is unknown, or that do not fit.
    """
    one_name(op, OPS, "op")
    names = parse_names(text, tuple(DTYPES), "dtype")
    if not any(facts.COLLECTIVES[name].reduces for name in collectives):
        return names
    if text == "all":
        names = tuple(name for name in names if op in DTYPES[name].ops)
    for name in names:
        reduction(DTYPES[name], op)
    return names


def cases(
    collectives: tuple[str, ...], algorithms: str | None, protocols: str | None, world_size: int,
    dtypes: tuple[str, ...] = ("float32",), against: tuple[str, ...] = (),
) -> tuple[Case, ...]:  # fmt: skip
    """Every shipped kernel of `collectives` for `world_size` ranks among the comma lists (or `all`), for every type;
    None leaves that part to selection. Then the libraries `against` which it is measured.

    Raises `InvalidArgument` where a collective has no such kernel, with the list of those that it has.
    """
    wanted = None if algorithms is None else parse_names(algorithms, ALGORITHMS, "algorithm")
    spoken = None if protocols is None else parse_names(protocols, PROTOCOLS, "protocol")
    found: list[Case] = []
    for collective in collectives:
        shipped = [(k.algorithm, k.protocol) for k in registry.of(collective, world_size)]
        fits = [(a, p) for a, p in shipped if wanted is None or a in wanted if spoken is None or p in spoken]
        if not fits:
            raise InvalidArgument(
                f"{collective}: no kernel fits algorithm {algorithms or 'any'}, protocol {protocols or 'any'}; "
                f"there is {', '.join(f'{a}/{p}' for a, p in shipped)}"
            )
        for dtype in dtypes:
            for a, p in fits:
                found.append(Case(collective, None if wanted is None else a, None if spoken is None else p, dtype))
            found += [Case(collective, None, None, dtype, library) for library in against]
    return tuple(dict.fromkeys(found))


def count(collective: str, size: int, itemsize: int, world_size: int) -> int:
    """Elements of a row for a row of the table of `size` bytes.

    As in nccl-tests the size is the larger one of input and output: of all rows where there is one for each rank,
    each a multiple of 16 bytes; at least one of them.
    """
    kind = facts.COLLECTIVES[collective]
    rows = max(kind.rows_in(world_size), kind.rows_out(world_size))
    if rows > 1:
        return max(1, size // rows // 16) * 16 // itemsize
    return max(1, size // itemsize)


def total_bytes(collective: str, elements: int, itemsize: int, world_size: int) -> int:
    """The size that a row prints, and S of its bandwidths."""
    kind = facts.COLLECTIVES[collective]
    return elements * itemsize * max(kind.rows_in(world_size), kind.rows_out(world_size))


def input_bytes(collective: str, elements: int, itemsize: int, world_size: int) -> int:
    """What selection and tables go by: a rank's input, of a root's where there is one."""
    return elements * itemsize * facts.COLLECTIVES[collective].rows_in(world_size)


def algorithm_bandwidth(size: int, microseconds: float) -> float:
    """S / t in 1e9 bytes per second."""
    return size / microseconds / 1e3 if microseconds > 0 else 0.0


def bus_factor(collective: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (world_size - 1) / world_size
