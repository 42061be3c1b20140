"""Bytes that every kernel moves between ranks, counted from its own accesses: python -m devtools.traffic

Each rank is a process whose kernels are interpreted; every load, store and atomic that falls into another rank's arena
is counted, headers apart. The counts are exact and say the same about a GPU; there is no time in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import click
import numpy as np

from tricomm.kernels.collectives import registry
from tricomm.perf import units
from tricomm.perf.workers import talk

WORLDS = (2, 3, 4)


@dataclass(frozen=True)
class Moved:
    """Bytes one rank moved in one call of `nbytes` input (of the root's where there is one): to and from peers'
    mailboxes, in their headers, and of all that over the link to each rank."""

    collective: str
    algorithm: str
    protocol: str
    world_size: int
    rank: int
    nbytes: int
    written: int
    read: int
    headers: int
    links: tuple[int, ...] = ()
    simulated: bool = True

    @property
    def kernel(self) -> registry.Kernel:
        return registry.find(self.collective, self.algorithm, self.protocol)

    @property
    def formula(self) -> Fraction:
        """Bytes written and read as the registry promises them."""
        return units.moved(self.kernel, self.world_size) * self.nbytes

    @property
    def ratio(self) -> float:
        """Bytes moved over bytes promised; both directions must fit on their own, or it is infinite."""
        promised = (self.kernel.written(self.world_size) * self.nbytes, self.kernel.read(self.world_size) * self.nbytes)
        if any(p == 0 and found for p, found in zip(promised, (self.written, self.read), strict=True)):
            return float("inf")
        return float((self.written + self.read) / self.formula)

    @property
    def optimum(self) -> Fraction:
        """The least that the busiest rank must send without in-network reduction, whatever the links."""
        return units.least(self.collective, self.world_size) * self.nbytes


class Counter:
    """An observer that counts accesses to `peers`, (first address, bytes) of each arena, headers apart.

    Headers are what lies in one of `flags`, (offset, end) in an arena.
    """

    def __init__(self, peers: list[tuple[int, int]], *flags: tuple[int, int]) -> None:
        self._peers, self._flags = peers, flags
        self.written = self.read = self.headers = 0
        self.links = [0] * len(peers)

    def __call__(self, kind: str, addresses: np.ndarray[Any, Any], itemsize: int) -> None:
        for number, (base, nbytes) in enumerate(self._peers):
            inside = addresses[(addresses >= base) & (addresses < base + nbytes)].astype(np.int64) - base
            flags = sum(int(((inside >= a) & (inside < b)).sum()) for a, b in self._flags) * itemsize
            data = inside.size * itemsize - flags
            self.headers += flags
            self.links[number] += flags + data
            if kind == "load":
                self.read += data
            else:
                self.written += data


def count(world_size: int, nbytes: int, timeout: float = 120.0) -> Iterator[Moved]:
    """Run every kernel once on `world_size` ranks with `nbytes` of input each and yield what each rank moved; on eight
    ranks those of a cube mesh only. A message goes from rank 0 to rank 1, and is rank 0's.

    `nbytes` must be a multiple of 16 W for the formulas to be exact. Raises `RankFailed`.
    """
    for rank, record in talk("devtools.traffic_rank", world_size, {"nbytes": nbytes}, timeout):
        record.pop("what")
        record["links"] = tuple(record["links"])
        yield Moved(world_size=world_size, rank=rank, nbytes=nbytes, **record)


@click.command()
@click.option("--nbytes", type=int, help="Input bytes per rank, a multiple of 16 W [default: 3072 W].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(nbytes: int | None, as_json: bool) -> None:
    """Print what every kernel moves on its busiest rank, for 2, 3 and 4 ranks (8 for those of a cube mesh), against
    the formula and the optimum."""
    found = [moved for w in (*WORLDS, registry.CUBE_RANKS) for moved in count(w, nbytes or 3072 * w)]
    if as_json:
        records = [{**asdict(m), "ratio": m.ratio, "optimum": float(m.optimum)} for m in found]
        click.echo(json.dumps(records, indent=1))
        return
    click.echo("# bytes to and from peers per rank and call, counted under Triton's interpreter (simulated: true)")
    click.echo(
        f"{'kernel':<44}{'W':>3}{'input':>9}{'written':>9}{'read':>9}{'formula':>9}{'ratio':>7}{'optimum':>9}"
        f"{'x opt.':>7}{'headers':>9}{'hops':>6}"
    )
    for key in dict.fromkeys(_key(m) for m in found):
        m = max((m for m in found if _key(m) == key), key=lambda m: m.written + m.read)
        moved = m.written + m.read
        click.echo(
            f"{m.kernel.name:<44}{m.world_size:>3}{m.nbytes:>9}{m.written:>9}{m.read:>9}{float(m.formula):>9.0f}"
            f"{m.ratio:>7.2f}{float(m.optimum):>9.0f}{moved / float(m.optimum):>7.2f}{m.headers:>9}{m.kernel.hops:>6}"
        )


def _key(moved: Moved) -> tuple[str, int]:
    return moved.kernel.name, moved.world_size


if __name__ == "__main__":
    main()
