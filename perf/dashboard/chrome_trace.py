"""Timed calls of jobs as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.metrics.counters import Statistics
from tricomm.metrics.publish import JobStatistics


def trace(jobs: Sequence[JobStatistics]) -> dict[str, Any]:
    """Trace events in the JSON format of Chrome's tracer: a process per job, a thread per communicator."""
    spans = [span for job in jobs for comm in job.communicators for span in comm.spans]
    zero = min((span.start_us for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, job in enumerate(jobs):
        events.append(_named("process_name", f"pid {job.pid} on {job.host}", number))
        for thread, comm in enumerate(job.communicators):
            label = " (simulated)" if comm.simulated else ""
            name = f"group {comm.group}, rank {comm.rank} of {comm.world_size} on {comm.device}{label}"
            events.append(_named("thread_name", name, number, thread))
            events += _spans(comm, zero, number, thread)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"zero_unix_us": zero}}


def _named(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _spans(comm: Statistics, zero: float, pid: int, tid: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": span.collective,
            "cat": f"{span.algorithm}/{span.protocol}",
            "pid": pid,
            "tid": tid,
            "ts": span.start_us - zero,
            "dur": span.time_us,
            "args": {"bytes": span.nbytes, "kernel": f"{span.algorithm}/{span.protocol}", "simulated": comm.simulated},
        }
        for span in comm.spans
    ]


def write(jobs: Sequence[JobStatistics], file: Path) -> int:
    """Write the trace of `jobs`; returns the number of calls in it. Raises `InvalidArgument` if the file is refused."""
    events = trace(jobs)
    try:
        file.write_text(json.dumps(events))
    except OSError as error:
        raise InvalidArgument(f"--trace {file}: {error.strerror}") from None
    return sum(event["ph"] == "X" for event in events["traceEvents"])
