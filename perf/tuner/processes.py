"""`tricomm tune`: start the ranks, or be one of them, and tell the command what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tricomm import InvalidArgument, env
from tricomm.perf.tuner.live import tune
from tricomm.perf.tuner.request import Settings
from tricomm.perf.workers import talk
from tricomm.store.rendezvous import open_store

Hear = Callable[[str, dict[str, Any]], None]
_MEETING = 60.0


def run(settings: Settings, world_size: int, hear: Hear) -> None:
    """Tune with `world_size` ranks of this node, started here. Raises `RankFailed`; leaves no rank behind."""
    silence = 2 * settings.timeout + _MEETING
    for rank, message in talk("tricomm.perf.tuner.tune_rank", world_size, msgspec.to_builtins(settings), silence):
        if rank == 0:
            hear(message.pop("what"), message)


def join(settings: Settings, hear: Hear) -> None:
    """Be one rank of a group that somebody else started (torchrun)."""
    rank, world_size = env.integer("RANK"), env.integer("WORLD_SIZE")
    if rank is None or world_size is None:
        raise InvalidArgument("RANK and WORLD_SIZE are both needed; torchrun sets them")
    store, rank, world_size = open_store("env://", rank, world_size, _MEETING)
    tune(lambda what, **message: hear(what, message), rank, world_size, store, settings)
