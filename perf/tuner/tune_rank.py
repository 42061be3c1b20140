"""One rank of `tricomm tune`, a process of its own (see `perf.ranks`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from tricomm.perf.tuner.live import tune
from tricomm.perf.tuner.request import Settings
from tricomm.perf.workers import speak
from tricomm.store.rendezvous import open_store

_MEETING = 60.0


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Say notes, heats, and the result."""
    settings = msgspec.convert(data, Settings)
    store, rank, world_size = open_store(url, rank, world_size, _MEETING)
    tune(say, rank, world_size, store, settings)


if __name__ == "__main__":
    sys.exit(speak(main))
