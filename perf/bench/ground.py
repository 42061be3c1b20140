"""What a comparison of collectives is made of: the ground that all stand on, one call, and who makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tricomm import Communicator
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.perf.bench import check_data


@dataclass
class Ground:
    """What all contenders of a rank stand on. torch's default group is theirs, `host` is for what is said beside them;
    both are Gloo's, of the same ranks."""

    comm: Communicator
    host: Any
    one_gpu: bool
    peers: Path | None = None
    nccl: Any = None

    def sync(self) -> None:
        """Wait for everything on this rank's device."""
        if not self.comm.simulated:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Call:
    """One collective with `count` elements a row, of `root` where there is one; a barrier has none of either."""

    ground: Ground
    collective: str
    dtype: torch.dtype
    count: int
    root: int = 0

    @property
    def rows_in(self) -> int:
        return COLLECTIVES[self.collective].rows_in(self.ground.comm.world_size)

    @property
    def rows_out(self) -> int:
        return COLLECTIVES[self.collective].rows_out(self.ground.comm.world_size)

    @property
    def gets(self) -> bool:
        """True where this rank has a result."""
        return check_data.gets(self.collective, self.ground.comm.world_size, self.ground.comm.rank, self.number(0))

    def number(self, trial: int) -> int:
        """Of the call whose data and root a trial has, as `bench_data` counts them."""
        return self.root + trial * self.ground.comm.world_size

    def empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows * self.count, dtype=self.dtype, device=self.ground.comm.device)


@dataclass(frozen=True)
class Contender:
    """`load` puts a rank's data where the contender reads them; `run` makes the call and says where the result is."""

    load: Callable[[torch.Tensor], Any]
    run: Callable[[], torch.Tensor | None]


Make = Callable[[Call], Contender]


def filling(x: torch.Tensor, y: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Puts a rank's data into `x`, and into `y` what no result is; the two may be one."""

    def load(data: torch.Tensor) -> None:
        check_data.poison(y)
        x.copy_(data)

    return load
