"""How good the search is: against the best of everything, on made-up boxes: python -m devtools.tuner_benchmark"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from devtools.made_up_boxes import Surface
from tricomm.perf.tuner import search
from tricomm.perf.tuner.points import Candidate, Point, points
from tricomm.perf.tuner.successive_halving import Measure, Spent

BOXES = (("h100", 8), ("h100", 4), ("a100", 8), ("b200", 2), ("v100", 8), ("pcie4", 4))
SIZES = tuple(1 << n for n in range(10, 25, 2))
EXHAUSTIVE = 10  # samples that a grid takes of each candidate
SHARE = 0.1  # of the grid's samples, that the search gets


@dataclass(frozen=True)
class Outcome:
    """One box: samples, and how much slower than the best of all the chosen candidates are, worst and on average, with
    the grid's own choice beside (it is fooled by noise, too)."""

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


def run(gpu: str, world_size: int, seed: int, share: float = SHARE) -> Outcome:
    """Search a box with `share` of the samples of a grid."""
    box, todo = Surface(gpu, world_size, seed), points(("all_reduce", "all_gather"), (16,), ("graph",), SIZES)
    grid = sum(len(box.pool(point)) for point in todo) * EXHAUSTIVE
    chosen = search.search(todo, box.pool, _first(box), box.prior, _bounded(box, int(grid * share)))
    measured = box.measured
    regrets = [_regret(box, d.point, d.best) for d in chosen]
    missing = len(todo) - len(chosen)
    grid_regrets = [_regret(box, point, _grid_choice(box, point)) for point in todo]
    return Outcome(
        f"{world_size} x {gpu}", len(todo), grid // EXHAUSTIVE, grid, measured,
        math.inf if missing else max(regrets), math.inf if missing else sum(regrets) / len(regrets), max(grid_regrets),
    )  # fmt: skip


def _first(box: Surface) -> Callable[[Point], Candidate]:
    return lambda point: box.pool(point)[0]


def _bounded(box: Surface, most: int) -> Measure:
    def measure(point: Point, candidates: Sequence[Candidate], repeats: int) -> dict[Candidate, list[float]]:
        if box.measured + repeats * len(candidates) > most:
            raise Spent
        return box.measure(point, candidates, repeats)

    return measure


def _grid_choice(box: Surface, point: Point) -> Candidate:
    found = box.measure(point, box.pool(point), EXHAUSTIVE)
    return min(found, key=lambda c: sorted(found[c])[EXHAUSTIVE // 2])


def _regret(box: Surface, point: Point, chosen: Candidate) -> float:
    return box.true(point, chosen) / min(box.true(point, c) for c in box.pool(point)) - 1


@click.command()
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Boxes of each kind.")
def main(seeds: int) -> None:
    """Search made-up boxes with a tenth of the measurements that a grid takes, and print both results."""
    click.echo("# simulated: surfaces made by the cost model with noise, no time here is a measurement")
    click.echo(f"# a grid takes {EXHAUSTIVE} samples of each candidate; slower: than the best of all candidates")
    columns = f"{'box':<12}{'seed':>5}{'points':>8}{'grid':>8}{'search':>8}{'share':>7}"
    click.echo(f"{columns}{'worst':>8}{'mean':>7}{'grid worst':>12}")
    outcomes = []
    for gpu, world_size in BOXES:
        for seed in range(seeds):
            o = run(gpu, world_size, seed)
            outcomes.append(o)
            click.echo(
                f"{o.box:<12}{seed:>5}{o.points:>8}{o.exhaustive:>8}{o.measured:>8}{o.share:>7.1%}{o.worst:>8.1%}"
                f"{o.mean:>7.1%}{o.grid_worst:>12.1%}"
            )
    worst, share = max(o.worst for o in outcomes), max(o.share for o in outcomes)
    click.echo(f"worst {worst:.1%} slower than the best, at most {share:.1%} of a grid's measurements")


if __name__ == "__main__":
    main()
