"""Makes rows of a shipped table from modelled times: the fastest kernel of each size, and the fastest without it.

    python -m devtools.modelled_rows --gpu h100 --world-sizes 2,4,8 [--collective all_reduce] [--kept FILE]

Every kernel of a collective is compiled, and executed with the clock of `tricomm predict --from-code`, for sizes from
1 KiB to 64 MiB. A group may lack wide words (a Triton before 3.9), a switch that adds, or both: selection skips rows of
kernels that a group lacks, so the rows must choose well for each of the four kinds of groups. A change of kernel has to
be worth 3 % at its size, no kernel is taken again after another one, and a kernel with more requirements counts as 2 %
slower. Nothing is measured on a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from devtools import kept_rows
from devtools.kept_rows import KeptRows
from tricomm.errors import InvalidArgument
from tricomm.explorer.timing import from_code
from tricomm.kernels.collectives.registry import Kernel
from tricomm.perf import parsing
from tricomm.perf.cost_model import kernel_time

LABEL = "modelled from the compiled code, not measured"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")
SIZES = tuple(
    n << 10
    for n in (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 65536)
)
# longer calls take long to execute and are never chosen
_LONGEST = {"ll": 4 << 20, "ll128": 4 << 20, "simple": SIZES[-1]}
_LONGEST_ONE_SHOT = 1 << 20  # for an all-reduce
_CHANGE, _NEEDS_MORE = 1.03, 1.02
_AVOIDED = 1.0  # as if a call took e times as long; if rows of groups that have more leave no other way, it is done

Family = tuple[str, str]
Times = Mapping[Family, float]
TableRows = list[tuple[int | None, Family]]


def lacks(family: Family, missing: str) -> bool:
    """True if a group that lacks `missing` ("", "wide", "switch" or both) does not have this kernel."""
    algorithm, protocol = family
    return ("wide" in missing and protocol == "ll128") or ("switch" in missing and algorithm == "multicast")


GROUPS = ("", "wide", "switch", "wide switch")


def fastest(times: Mapping[int, Times]) -> dict[tuple[int, str], Family]:
    """The kernel to take, by size and by the missing features."""
    chosen: dict[tuple[int, str], Family] = {}
    for missing in GROUPS:
        allowed: dict[int, Times] = {}
        for nbytes in sorted(times):
            there = {family: time for family, time in times[nbytes].items() if not lacks(family, missing)}
            before = (chosen[nbytes, more] for more in GROUPS if (nbytes, more) in chosen)
            taken = next((family for family in before if family in there), None)  # the first row that fits decides
            allowed[nbytes] = there if taken is None else {taken: there[taken]}
        chosen |= {(nbytes, missing): family for nbytes, family in zip(allowed, _path(allowed), strict=True)}
    return chosen


def _path(times: Mapping[int, Times]) -> tuple[Family, ...]:
    """A kernel for each size: as fast as possible in all, if each change of kernel is worth at least 3 % at its size,
    and no kernel is taken again after another one. Between sizes that were modelled, a kernel's time has steps of a
    chunk, and a model is not as exact as a few per cent: a table that follows each of these is noise."""
    paths: dict[tuple[frozenset[Family], Family | None], tuple[float, tuple[Family, ...]]]
    paths = {(frozenset(), None): (0.0, ())}  # the best path for each set of kernels and last kernel
    for there in times.values():
        longer: dict[tuple[frozenset[Family], Family | None], tuple[float, tuple[Family, ...]]] = {}
        for (taken, last), (cost, path) in paths.items():
            for family, time in there.items():
                more = math.log(time * (_NEEDS_MORE if _needs_more(family) else 1))
                if last is not None and family != last:
                    more += _AVOIDED * (family in taken or there.get(last, math.inf) < _CHANGE * time)
                key = taken | {family}, family
                if cost + more < longer.get(key, (math.inf, ()))[0]:
                    longer[key] = cost + more, (*path, family)
        paths = longer
    return min(paths.values())[1]


def _needs_more(family: Family) -> bool:
    return family[1] == "ll128" or family[0] == "multicast"


def chosen_by(rows: TableRows, nbytes: int, missing: str) -> Family | None:
    """The kernel that selection takes from a table."""
    return next((f for most, f in rows if (most is None or nbytes <= most) and not lacks(f, missing)), None)


def table_rows(wanted: Mapping[tuple[int, str], Family]) -> TableRows:
    """(most bytes, kernel), in order: rows that choose as in `wanted`, as far as rows can, without superfluous ones."""
    sizes = sorted({nbytes for nbytes, _ in wanted})
    rows: TableRows = []
    for nbytes in sizes:
        most = None if nbytes == sizes[-1] else nbytes
        rows += [(most, family) for family in dict.fromkeys(wanted[nbytes, missing] for missing in GROUPS)]
    # A group takes the first kernel that it has, even if it wants a later one.
    wanted = {key: family for key in wanted if (family := chosen_by(rows, *key)) is not None}

    def right(some: TableRows) -> bool:
        return all(chosen_by(some, nbytes, missing) == family for (nbytes, missing), family in wanted.items())

    while True:
        fewer = next(filter(right, _shorter(rows)), None)
        if fewer is None:
            return rows
        rows = fewer


def _shorter(rows: TableRows) -> Iterator[TableRows]:
    """All ways to shorten the rows: drop one; or extend one over a later row of the same kernel, which is dropped."""
    for number in range(len(rows)):
        yield rows[:number] + rows[number + 1 :]
    for last, row in enumerate(rows):
        for number in range(last):
            if rows[number][1] == row[1]:
                yield [*rows[:number], row, *rows[number + 1 : last], *rows[last + 1 :]]


def worst(times: Mapping[int, Times], rows: TableRows) -> float:
    """How much slower the rows' choice is than the fastest kernel, at worst, as a fraction of the fastest kernel's
    time."""
    ratios = []
    for nbytes, each in times.items():
        for missing in GROUPS:
            family = chosen_by(rows, nbytes, missing)
            least = min(time for other, time in each.items() if not lacks(other, missing))
            ratios.append((each[family] if family is not None else float("inf")) / least)
    return max(ratios) - 1


def _modelled(gpu: str, collective: str, world_size: int, file: KeptRows) -> dict[int, dict[Family, float]]:
    machine = kernel_time.find(gpu)
    kernels = [k for k in kernel_time.kernels(machine, collective, world_size) if not k.zero_copy and not k.needs_cube]
    times: dict[int, dict[Family, float]] = {}
    for nbytes in SIZES:

        def row(nbytes: int = nbytes) -> dict[str, float]:
            some = [k for k in kernels if nbytes <= _longest(k)]
            return {k.name: from_code.predict(machine, k, world_size, nbytes).time_us for k in some}

        made = file.get(f"{gpu} {world_size} {collective} {nbytes}", row)
        times[nbytes] = {(k.algorithm, k.protocol): made[k.name] for k in kernels if k.name in made}
    return times


def _longest(kernel: Kernel) -> int:
    most = _LONGEST[kernel.protocol]
    return min(most, _LONGEST_ONE_SHOT) if (kernel.collective, kernel.algorithm) == ("all_reduce", "one_shot") else most


def _lines(gpu: str, collectives: Sequence[str], world_sizes: Sequence[int], file: KeptRows) -> Iterator[str]:
    for collective in collectives:
        for world_size in world_sizes:
            times = _modelled(gpu, collective, world_size, file)
            rows = table_rows(fastest(times))
            yield f"# {collective}, {world_size} ranks: at most {worst(times, rows):.1%} slower than the fastest"
            for most, (algorithm, protocol) in rows:
                row = {"collective": collective, "world_size": world_size, "max_bytes": most}
                yield json.dumps(row | {"algorithm": algorithm, "protocol": protocol}) + ","


@click.command()
@click.option("--gpu", default="h100", show_default=True, help="As of tricomm predict.")
@click.option("--world-sizes", default="2,4,8", show_default=True, help="Numbers of ranks.")
@click.option("--collective", default="all", show_default=True, help="all, or a list.")
@kept_rows.option
def main(gpu: str, world_sizes: str, collective: str, kept: Path | None) -> None:
    """Print rows of a shipped table, modelled from the compiled kernels."""
    try:
        file = KeptRows(kept)
        names = parsing.parse_names(collective, COLLECTIVES, "collective")
        ranks = [int(n) for n in parsing.parse_names(world_sizes, tuple(map(str, range(2, 17))), "world size")]
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"# {LABEL}; {gpu}")
    for line in _lines(gpu, names, ranks, file):
        click.echo(line)


if __name__ == "__main__":
    main()
