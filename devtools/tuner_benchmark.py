"""Compares the tuner's search with the best candidate and with a grid search, on simulated boxes.

    python -m devtools.tuner_benchmark

The boxes are the cost model with unknown errors and noise; no time here is a measurement.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import click

from tricomm.kernels import layout
from tricomm.perf import text_table
from tricomm.perf.cost_model import kernel_time
from tricomm.perf.cost_model.machines import MACHINES
from tricomm.perf.tuner import search
from tricomm.perf.tuner.coordinator import predicted_us
from tricomm.perf.tuner.points import Candidate, Point, points, pool
from tricomm.perf.tuner.successive_halving import BudgetExceeded, Measure

BOXES = (("h100", 8), ("h100", 4), ("a100", 8), ("b200", 2), ("v100", 8), ("pcie4", 4))
SIZES = tuple(1 << n for n in range(10, 25, 2))
EXHAUSTIVE = 10  # samples that a grid takes of each candidate
SHARE = 0.1  # the budget of the search, as a fraction of the grid's samples
_JITTER, _OUTLIERS, _DRIFT = 0.02, 0.03, 0.03


@dataclass
class MadeUpBox:
    """The cost model of a machine, distorted in ways that the search's prior does not know, with noise.

    The time of each family has its own factor, which drifts with size. Shapes have effects that the model does not
    cover. Samples have jitter, outliers, and a slow drift of the whole machine. `measured` counts samples.
    """

    gpu: str
    world_size: int
    seed: int
    measured: int = 0
    _draw: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._machine = MACHINES[self.gpu]
        self._layout = layout.plan(self.world_size, 64 << 20)
        self._true: dict[tuple[Point, Candidate], float] = {}

    def pool(self, point: Point) -> list[Candidate]:
        """All candidates."""
        kernels = kernel_time.kernels(self._machine, point.collective, self.world_size)
        return pool(kernels, self._layout, layout.MAX_BLOCKS, cpu=False)

    def prior(self, point: Point, candidate: Candidate) -> float:
        """The time of the cost model, in microseconds."""
        return predicted_us(self._machine, self.world_size, point, candidate)

    def true(self, point: Point, candidate: Candidate) -> float:
        """Microseconds without noise."""
        key = (point, candidate)
        if key not in self._true:
            self._true[key] = self.prior(point, candidate) * math.exp(self._bend(point, candidate))
        return self._true[key]

    def _bend(self, point: Point, candidate: Candidate) -> float:
        size = math.log2(point.nbytes + 1)
        whole = (point.group, candidate.family)
        family = 0.25 * self._fixed(whole) + 0.1 * math.sin(size / 4 + 7 * self._fixed("phase", whole))
        tile = abs(math.log2(candidate.tile) - 8.5 - size / 12 - self._fixed("tile", whole))
        warps = abs(math.log2(candidate.warps) - 2.5 - self._fixed("warps", whole))
        crowd = 0.03 * max(0.0, math.log2(candidate.blocks) - max(0.0, size - 12) - 1 - self._fixed("blocks", whole))
        return family + 0.03 * tile + 0.04 * warps + crowd

    def _fixed(self, *what: object) -> float:
        """A normally distributed number that depends only on the box and on `what`."""
        text = repr((self.gpu, self.world_size, self.seed, what)).encode()
        return random.Random(hashlib.sha256(text).digest()).gauss(0, 1)

    def sample(self, point: Point, candidate: Candidate) -> float:
        """One noisy measurement."""
        self.measured += 1
        drift = 1 + _DRIFT * math.sin(self.measured / 300)
        noise = math.exp(self._draw.gauss(0, _JITTER))
        if self._draw.random() < _OUTLIERS:
            noise *= self._draw.uniform(1.5, 4.0)
        return self.true(point, candidate) * drift * noise

    def measure(self, point: Point, candidates: Sequence[Candidate], repeats: int) -> dict[Candidate, list[float]]:
        """As `successive_halving.Measure`: samples the candidates in turns."""
        times: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for _ in range(repeats):
            for candidate in candidates:
                times[candidate].append(self.sample(point, candidate))
        return times


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome for one box: numbers of samples, and by how much the chosen candidates are slower than the best of
    all, at worst and on average. `grid_worst` is the worst of the grid's choices, which noise also misleads."""

    box: str
    points: int
    candidates: int
    exhaustive: int
    measured: int
    worst: float
    mean: float
    grid_worst: float

    @property
    def share(self) -> float:
        return self.measured / self.exhaustive


def run(gpu: str, world_size: int, seed: int, share: float = SHARE) -> SearchOutcome:
    """Search a box with `share` of the samples of a grid."""
    box, todo = MadeUpBox(gpu, world_size, seed), points(("all_reduce", "all_gather"), (16,), ("graph",), SIZES)
    grid = sum(len(box.pool(point)) for point in todo) * EXHAUSTIVE
    chosen = search.search(todo, box.pool, _first(box), box.prior, _bounded(box, int(grid * share)))
    measured = box.measured
    regrets = [_regret(box, d.point, d.best) for d in chosen]
    missing = len(todo) - len(chosen)
    grid_regrets = [_regret(box, point, _grid_choice(box, point)) for point in todo]
    return SearchOutcome(
        f"{world_size} x {gpu}",
        len(todo),
        grid // EXHAUSTIVE,
        grid,
        measured,
        math.inf if missing else max(regrets),
        math.inf if missing else sum(regrets) / len(regrets),
        max(grid_regrets),
    )


def _first(box: MadeUpBox) -> Callable[[Point], Candidate]:
    return lambda point: box.pool(point)[0]


def _bounded(box: MadeUpBox, most: int) -> Measure:
    def measure(point: Point, candidates: Sequence[Candidate], repeats: int) -> dict[Candidate, list[float]]:
        if box.measured + repeats * len(candidates) > most:
            raise BudgetExceeded
        return box.measure(point, candidates, repeats)

    return measure


def _grid_choice(box: MadeUpBox, point: Point) -> Candidate:
    times = box.measure(point, box.pool(point), EXHAUSTIVE)
    return min(times, key=lambda c: sorted(times[c])[EXHAUSTIVE // 2])


def _regret(box: MadeUpBox, point: Point, chosen: Candidate) -> float:
    return box.true(point, chosen) / min(box.true(point, c) for c in box.pool(point)) - 1


@click.command()
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Boxes of each kind.")
def main(seeds: int) -> None:
    """Search simulated boxes with a tenth of the measurements that a grid takes, and print both results."""
    click.echo("# simulated: surfaces made by the cost model with noise, no time here is a measurement")
    click.echo(f"# a grid takes {EXHAUSTIVE} samples of each candidate; slower: than the best of all candidates")
    header = ("box", "seed", "points", "grid", "search", "share", "worst", "mean", "grid worst")
    outcomes = [(seed, run(gpu, world_size, seed)) for gpu, world_size in BOXES for seed in range(seeds)]
    rows = [
        (
            o.box,
            seed,
            o.points,
            o.exhaustive,
            o.measured,
            f"{o.share:.1%}",
            f"{o.worst:.1%}",
            f"{o.mean:.1%}",
            f"{o.grid_worst:.1%}",
        )
        for seed, o in outcomes
    ]
    click.echo("\n".join(text_table.lines(header, rows, right=header[1:])))
    worst, share = max(o.worst for _, o in outcomes), max(o.share for _, o in outcomes)
    click.echo(f"worst {worst:.1%} slower than the best, at most {share:.1%} of a grid's measurements")


if __name__ == "__main__":
    main()
