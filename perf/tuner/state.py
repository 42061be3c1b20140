"""What a tuning run has measured, on the disk: a line a heat, so that a run that is cut off goes on where it was.

Going on is searching again, with the samples of the earlier run handed out first. A line that is torn ends the record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from tricomm.errors import ResourceError
from tricomm.perf.tuner.points import Candidate, Point


class Heat(msgspec.Struct, frozen=True):
    """The times of a heat by candidate, the slowest rank's, in microseconds; None for one that is wrong."""

    point: Point
    candidates: tuple[Candidate, ...]
    times: tuple[tuple[float, ...] | None, ...]


class Record:
    """The heats of the run that `key` names, in `file`. Raises `ResourceError` for a file that cannot be written."""

    def __init__(self, file: Path, key: str) -> None:
        self.file = file
        heats = _read(file, key)
        self._samples: dict[tuple[Point, Candidate], list[float]] = {}
        self._wrong: set[tuple[Point, Candidate]] = set()
        for heat in heats:
            self._take_in(heat)
        self._stream: IO[bytes] | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, key, heats)
            self._stream = file.open("ab")
        except OSError as error:
            raise ResourceError(
                f"tuning record {file} cannot be written: {error}; TRICOMM_TUNING_DIR names another directory"
            ) from None

    @property
    def known(self) -> int:
        """Samples of an earlier run that have not been handed out yet."""
        return sum(map(len, self._samples.values()))

    def wrong(self, point: Point, candidate: Candidate) -> bool:
        """Whether it was found wrong."""
        return (point, candidate) in self._wrong

    def recall(self, point: Point, candidate: Candidate, most: int) -> list[float]:
        """Samples of an earlier run, each handed out once."""
        known = self._samples.get((point, candidate), [])
        given, known[:] = known[:most], known[most:]
        return given

    def _take_in(self, heat: Heat) -> None:
        for candidate, times in zip(heat.candidates, heat.times, strict=True):
            if times is None:
                self._wrong.add((heat.point, candidate))
            else:
                self._samples.setdefault((heat.point, candidate), []).extend(times)

    def append(self, heat: Heat) -> None:
        """Write a heat, for good before this returns."""
        if self._stream is not None:
            self._stream.write(msgspec.json.encode(heat) + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self, finished: bool) -> None:
        """A run that is finished needs no record."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if finished:
            self.file.unlink(missing_ok=True)


def _read(file: Path, key: str) -> list[Heat]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return []
    if lines[0] != key.encode():
        return []
    heats = []
    for line in lines[1:-1]:
        try:
            heat = msgspec.json.decode(line, type=Heat)
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
        if len(heat.times) != len(heat.candidates):
            break
        heats.append(heat)
    return heats


def _write(file: Path, key: str, heats: Sequence[Heat]) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    partial.write_bytes(b"".join(line + b"\n" for line in (key.encode(), *map(msgspec.json.encode, heats))))
    os.replace(partial, file)
