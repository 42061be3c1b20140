"""The statistics that jobs of this user publish (`tricomm.metrics.publish`), those of ended ones among them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tricomm.metrics import publish
from tricomm.perf.history.database import Activity, History
from tricomm.store import process

_MOST_BYTES = 64 << 20
_SLACK = 60.0  # seconds: clocks of hosts differ, and file systems that they share are slow


class Calls(msgspec.Struct, frozen=True):
    """As `tricomm.metrics.counters.Calls`."""

    collective: str
    algorithm: str
    protocol: str
    bucket: int
    calls: int
    nbytes: int
    timed: int
    seconds: float
    p50_us: float | None
    p99_us: float | None


class Span(msgspec.Struct, frozen=True):
    """As `tricomm.metrics.timer.Span`."""

    start_us: float
    time_us: float
    collective: str
    algorithm: str
    protocol: str
    nbytes: int


class Communicator(msgspec.Struct, frozen=True):
    """As `tricomm.Statistics`."""

    group: str
    rank: int
    world_size: int
    device: str
    simulated: bool
    calls: tuple[Calls, ...]
    waited: dict[int, float]
    spans: tuple[Span, ...]


class Routed(msgspec.Struct, frozen=True):
    """What c10d groups of the process have given to NCCL or Gloo."""

    route: str
    collective: str
    bucket: int
    calls: int
    nbytes: int


class Job(msgspec.Struct, frozen=True):
    """One process. `started` is in clock ticks since its host's boot, `written` in seconds of Unix time; it writes
    `every` so many seconds."""

    schema: int
    pid: int
    started: int
    host: str
    written: float
    every: float
    routed: tuple[Routed, ...]
    communicators: tuple[Communicator, ...]

    @property
    def name(self) -> str:
        return f"{self.host}/{self.pid}-{self.started}"

    @property
    def live(self) -> bool:
        """Whether the process still runs; one of another host does as long as it writes."""
        if self.host == socket.gethostname():
            return process.start_time(self.pid) == self.started
        return time.time() - self.written < 3 * self.every + _SLACK


@dataclass(frozen=True)
class Found:
    """Jobs, oldest first, the files that they were read from, and what is wrong with others."""

    jobs: tuple[Job, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def live(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.live)


def read(folder: Path | None = None) -> Found:
    """What is published in `folder` [default: where jobs write]. A file that is none of ours is named and left."""
    folder = publish.folder() if folder is None else folder
    found: list[tuple[Job, Path]] = []
    notes = []
    for file in sorted(folder.glob("*.json")):
        try:
            with file.open("rb") as stream:
                job = msgspec.json.decode(stream.read(_MOST_BYTES), type=Job)
            if job.schema != publish.SCHEMA:
                raise msgspec.ValidationError(f"schema {job.schema}, this tricomm knows {publish.SCHEMA}")
            found.append((job, file))
        except FileNotFoundError:  # somebody else has put it into the history
            continue
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            notes.append(f"{file} is not the statistics of a job and is ignored: {error}")
    found.sort(key=lambda pair: pair[0].written)
    return Found(tuple(job for job, _ in found), tuple(file for _, file in found), tuple(notes))


def keep(found: Found, history: History) -> int:
    """Put what jobs have done into the history, and take away the files of those that ended. Returns the rows."""
    rows = 0
    for job, file in zip(found.jobs, found.files, strict=True):
        ended = not job.live  # looked at before the rows are written: an ended job's file is its last
        fresh = activities(job)
        if history.keep(fresh):
            rows += len(fresh)
            if ended:
                file.unlink(missing_ok=True)
    return rows


def activities(job: Job) -> list[Activity]:
    """Rows of the history."""
    date = datetime.fromtimestamp(job.written, UTC).isoformat(timespec="seconds")
    rows = [
        Activity(
            job.name, date, comm.device, comm.group, comm.rank, comm.world_size, comm.simulated, "kernels",
            c.collective, c.algorithm, c.protocol, c.bucket, c.calls, c.nbytes, c.timed, c.seconds, c.p50_us, c.p99_us,
        )
        for comm in job.communicators
        for c in comm.calls
    ]  # fmt: skip
    rows += [
        Activity(job.name, date, "", "", -1, 0, False, r.route, r.collective, "", "", r.bucket, r.calls, r.nbytes)
        for r in job.routed
    ]
    return rows
