"""Made-up boxes to try the search on: the cost model, bent in ways that the search's prior does not know, with noise.

Every family is off by a factor of its own that drifts with size, shapes matter in ways that the model has no word for,
and a sample has jitter, now and then an outlier, and a slow drift of the whole machine. Nothing here is a measurement.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.perf.cost_model import model
from tricomm.perf.cost_model.machines import MACHINES
from tricomm.perf.tuner.points import Candidate, Point, pool

_JITTER, _OUTLIERS, _DRIFT = 0.02, 0.03, 0.03


@dataclass
class Surface:
    """A box of `world_size` GPUs of a machine of `model`; `measured` counts samples."""

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
        """Everything that could be chosen."""
        kernels = model.kernels(self._machine, point.collective, self.world_size)
        return pool(kernels, self._layout, layout.MAX_BLOCKS, cpu=False)

    def prior(self, point: Point, candidate: Candidate) -> float:
        """What the cost model says."""
        kernel = registry.find(point.collective, *candidate.family)
        shape = {"blocks": candidate.blocks, "warps": candidate.warps}
        return model.predict(self._machine, kernel, self.world_size, point.nbytes, point.mode, **shape).time_us

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
        """A number from a standard normal distribution, the same for the same box and question."""
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
        """As `race.Measure`: in turns."""
        found: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for _ in range(repeats):
            for candidate in candidates:
                found[candidate].append(self.sample(point, candidate))
        return found
