"""The statistics that jobs of this user publish (`tricomm.metrics.publish`), also those of jobs that have ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tricomm import typed_json
from tricomm.metrics import publish
from tricomm.metrics.publish import JobStatistics
from tricomm.perf.history.database import History
from tricomm.perf.history.schema import ActivityRow
from tricomm.store import files
from tricomm.typed_json import WrongJson

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class PublishedJobs:
    """Jobs, oldest first, the files that they were read from, and notes about files that are not a job's."""

    jobs: tuple[JobStatistics, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def live(self) -> tuple[JobStatistics, ...]:
        return tuple(job for job in self.jobs if job.live)


def read(folder: Path | None = None) -> PublishedJobs:
    """The jobs that this user has published in `folder` [default: where jobs write].

    A file that is no job's is skipped with a note, as are all files of a directory in which other users could replace
    them.
    """
    folder = publish.folder() if folder is None else folder
    pairs: list[tuple[JobStatistics, Path]] = []
    notes = []
    try:
        files.check_directory(folder)
    except FileNotFoundError:
        return PublishedJobs((), (), ())
    except OSError as error:
        return PublishedJobs((), (), (f"statistics in {folder} are ignored: {error.strerror}",))
    for file in sorted(folder.glob("*.json")):
        try:
            job = typed_json.decode(files.read(file, _MOST_BYTES), JobStatistics)
            if job.schema != publish.SCHEMA:
                raise WrongJson(f"schema {job.schema}, this tricomm knows {publish.SCHEMA}")
            _check(job)
            pairs.append((job, file))
        except FileNotFoundError:  # another process has put it into the history
            continue
        except OSError as error:
            notes.append(f"{file} is ignored: {error.strerror}")
        except WrongJson as error:
            notes.append(f"{file} is not the statistics of a job and is ignored: {error}")
    pairs.sort(key=lambda pair: pair[0].written)
    return PublishedJobs(tuple(job for job, _ in pairs), tuple(file for _, file in pairs), tuple(notes))


def _check(job: JobStatistics) -> None:
    """Raises `WrongJson` for a number that no job writes, and that cannot be counted with."""
    try:
        _date(job)
    except (OverflowError, ValueError, OSError):
        raise WrongJson(f"written {job.written:g} seconds after 1970") from None
    for comm in job.communicators:
        if comm.world_size < 1:
            raise WrongJson(f"a group of {comm.world_size} ranks")
        if any(calls.calls < 1 for calls in comm.calls):
            raise WrongJson("a kernel that was called less than once")


def _date(job: JobStatistics) -> str:
    return datetime.fromtimestamp(job.written, UTC).isoformat(timespec="seconds")


def keep(published: PublishedJobs, history: History) -> int:
    """Put the activity of jobs into the history, and delete the files of those that ended. Returns the rows."""
    rows = 0
    for job, file in zip(published.jobs, published.files, strict=True):
        ended = not job.live  # checked before the rows are written: the file of an ended job is final
        fresh = activities(job)
        if history.keep(fresh):
            rows += len(fresh)
            if ended:
                file.unlink(missing_ok=True)
    return rows


def activities(job: JobStatistics) -> list[ActivityRow]:
    """Rows of the history."""
    date, rows = _date(job), []
    for comm in job.communicators:
        group = (comm.device, comm.group, comm.rank, comm.world_size, comm.simulated)
        rows += [ActivityRow(job.name, date, *group, "kernels", **asdict(calls)) for calls in comm.calls]
    rows += [
        ActivityRow(job.name, date, "", "", -1, 0, False, r.route, r.collective, "", "", r.bucket, r.calls, r.nbytes)
        for r in job.routed
    ]
    return rows
