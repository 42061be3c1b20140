"""The samples of a tuning run on the disk, one line a round, so that an interrupted run can be continued.

A continued run searches again and gets the samples of the earlier run first. A torn line ends the log.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tricomm import typed_json
from tricomm.errors import ResourceError
from tricomm.perf.tuner.points import Candidate, Point
from tricomm.store import files
from tricomm.typed_json import WrongJson

_MOST_BYTES = 1 << 30  # far more than the longest run writes


@dataclass(frozen=True)
class Round:
    """The samples of a round by candidate, each the slowest rank's, in microseconds; None for a wrong candidate."""

    point: Point
    candidates: tuple[Candidate, ...]
    times: tuple[tuple[float, ...] | None, ...]


class SampleLog:
    """The rounds of the run that `key` names, in `file`. Raises `ResourceError` if the file cannot be written."""

    def __init__(self, file: Path, key: str) -> None:
        self.file = file
        rounds = _read(file, key)
        self._times: dict[tuple[Point, Candidate], list[float]] = {}
        self._wrong: set[tuple[Point, Candidate]] = set()
        for one in rounds:
            self._take_in(one)
        self._stream: IO[bytes] | None = None
        try:
            files.make_directory(file.parent)
            lines = (key.encode(), *map(_encoded, rounds))
            files.replace(file, b"".join(line + b"\n" for line in lines))
            self._stream = files.opened(file, "ab")
        except OSError as error:
            raise ResourceError(
                f"tuning record {file} cannot be written: {error}; TRICOMM_TUNING_DIR names another directory"
            ) from None

    def wrong(self, point: Point, candidate: Candidate) -> bool:
        """Whether an earlier run measured wrong results."""
        return (point, candidate) in self._wrong

    @property
    def known(self) -> int:
        """Samples of an earlier run that `recall` has not returned yet."""
        return sum(map(len, self._times.values()))

    def recall(self, point: Point, candidate: Candidate, most: int) -> list[float]:
        """Samples of an earlier run, each returned once."""
        known = self._times.get((point, candidate), [])
        recalled, known[:] = known[:most], known[most:]
        return recalled

    def _take_in(self, one: Round) -> None:
        for candidate, times in zip(one.candidates, one.times, strict=True):
            if times is None:
                self._wrong.add((one.point, candidate))
            else:
                self._times.setdefault((one.point, candidate), []).extend(times)

    def append(self, one: Round) -> None:
        """Write a round; it is on the disk when this returns."""
        if self._stream is not None:
            self._stream.write(_encoded(one) + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self, finished: bool) -> None:
        """Close the file, and remove it if the run is finished."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if finished:
            self.file.unlink(missing_ok=True)


def _encoded(one: Round) -> bytes:
    return json.dumps(asdict(one), separators=(",", ":")).encode()


def _read(file: Path, key: str) -> list[Round]:
    try:
        lines = files.read(file, _MOST_BYTES).split(b"\n")
    except OSError:
        return []
    if lines[0] != key.encode():
        return []
    rounds = []
    for line in lines[1:-1]:
        try:
            one = typed_json.decode(line, Round)
        except WrongJson:
            break
        if len(one.times) != len(one.candidates):
            break
        rounds.append(one)
    return rounds
