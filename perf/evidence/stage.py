"""Stages of evidence, their cases, and the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

Data = dict[str, Any]  # the result of a case, as JSON

# If ranks are streams, their kernels wait for each other. So no kernel may be loaded while another one waits, and each
# stream needs its own connection to the device.
STREAMS: Mapping[str, str] = MappingProxyType({"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"})

FIRST = -1  # the tier of the cases that decide whether other stages run
# Cases of `stages.first` that others need.
GIL, SLICE, KILL = "first/GIL", "first/time slice", "first/killed peer"
TWO, EIGHT, GRAPH = "first_streams/2 ranks", "first_streams/8 ranks", "first_streams/graph"


class Skip(Exception):
    """Raised by a case that cannot run here; the text says what is missing."""


class Wrong(Exception):
    """Raised by a case whose result is wrong."""


@dataclass(frozen=True)
class EvidenceSettings:
    """The settings of a run. `out` is the folder of its results, `peers` one with checkouts of other projects.

    `slice_us` is the time slice that a process has on a shared device, once it has been measured.
    """

    out: Path
    peers: Path | None = None
    dry_run: bool = False
    slice_us: float | None = None


@dataclass(frozen=True)
class StageCase:
    """One check or one measurement. `key` is its name, the same in every run; `limit` is in seconds.

    All stages' cases of one `tier` run before the first case of the next one. `jobs` lists the kernels that it
    launches, which are compiled before on all cores (see `compiling`). `needs` names cases of the first stages, as
    "stage/key"; if one of them fails, this case is left out.
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
    `needs` holds for all its cases. `share` is its part of the budget, relative to the others'. `reference` is the
    module:attribute of a stage that is not among the shipped ones.
    """

    name: str
    title: str
    cases: Callable[[EvidenceSettings], Iterable[StageCase]]
    missing: Callable[[EvidenceSettings], str | None] = field(default=lambda settings: None)
    columns: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    share: float = 1.0
    reference: str = ""
