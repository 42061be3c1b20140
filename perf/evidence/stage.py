"""What a stage is, and what it may ask of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

Data = dict[str, Any]  # what a case found: JSON

# Kernels of ranks that are streams wait for each other. So none may be loaded while another one waits, and each
# stream needs a connection to the device of its own.
STREAMS: Mapping[str, str] = MappingProxyType(
    {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
)  # fmt: skip

FIRST = -1  # the tier of what decides about the rest
# Cases of `stages.first` that others need.
GIL, SLICE, KILL = "first/GIL", "first/time slice", "first/killed peer"
TWO, EIGHT, GRAPH = "first_streams/2 ranks", "first_streams/8 ranks", "first_streams/graph"


class Skip(Exception):
    """Raised by a case that cannot run here: its text says what is missing."""


class Wrong(Exception):
    """Raised by a case whose result is not what it has to be."""


@dataclass(frozen=True)
class Settings:
    """What a run was asked for. `peers` is a folder with sources to compare with, brought from outside.

    `slice_us` is how long a process has the device before another one gets it, once that has been measured.
    """

    out: Path
    peers: Path | None = None
    dry_run: bool = False
    slice_us: float | None = None


@dataclass(frozen=True)
class Case:
    """One check or one measurement. `key` names it alike in every run; `limit` is in seconds.

    `tier` is its value: all stages' cases of one tier run before the first case of the next one. `jobs` lists what it
    launches, to be compiled on all cores before (see `compiling`). `needs` names cases of the stages that run first,
    as "stage/key", without which this one is left out.
    """

    key: str
    run: Callable[[], Data]
    limit: float = 120.0
    tier: int = 0
    jobs: Callable[[], list[Any]] = list
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Cases that belong together. `cases(settings)` lists them; `missing(settings)` says why none can run, or None.

    `columns` are the keys of a case's data that the summary shows. `environment` is set for the stage's process, and
    `needs` holds for all its cases. `share` is its part of the budget, in proportion to the others'. `reference` is
    module:attribute of a stage that is not among the shipped ones, for the process that runs it.
    """

    name: str
    title: str
    cases: Callable[[Settings], Iterable[Case]]
    missing: Callable[[Settings], str | None] = field(default=lambda settings: None)
    columns: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    share: float = 1.0
    reference: str = ""
