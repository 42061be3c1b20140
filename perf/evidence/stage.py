"""What a stage is, and what it may ask of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Data = dict[str, Any]  # what a case found: JSON


class Skip(Exception):
    """Raised by a case that cannot run here: its text says what is missing."""


class Wrong(Exception):
    """Raised by a case whose result is not what it has to be."""


@dataclass(frozen=True)
class Settings:
    """What a run was asked for. `peers` is a folder with sources to compare with, brought from outside."""

    out: Path
    peers: Path | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Case:
    """One check or one measurement. `key` names it alike in every run; `limit` is in seconds."""

    key: str
    run: Callable[[], Data]
    limit: float = 120.0


@dataclass(frozen=True)
class Stage:
    """Cases that belong together. `cases(settings)` lists them; `missing(settings)` says why none can run, or None.

    `limit` bounds the whole stage, in seconds. `columns` are the keys of a case's data that the summary shows.
    `reference` is module:attribute of a stage that is not among the shipped ones, for the process that runs it.
    """

    name: str
    title: str
    cases: Callable[[Settings], Iterable[Case]]
    missing: Callable[[Settings], str | None] = field(default=lambda settings: None)
    limit: float = 480.0
    columns: tuple[str, ...] = ()
    reference: str = ""
