"""The counts of live jobs as metrics in Prometheus' exposition format, by the official client.

Each scrape reads everything again. A job that has ended is no longer in it; Prometheus keeps its old samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tricomm.errors import ResourceError
from tricomm.metrics.counters import Calls, Statistics
from tricomm.metrics.publish import JobStatistics
from tricomm.perf.units import bus_factor

_INSTALL = "metrics need prometheus-client: pip install 'tricomm[metrics]'"
_COMM = ("host", "pid", "group", "rank", "world_size", "device", "simulated")
_KERNEL = (*_COMM, "collective", "algorithm", "protocol", "bucket")
NAMES = {
    "tricomm_calls": "Calls of a collective by kernel and size; bucket is the size's next power of two, in bytes.",
    "tricomm_bytes": "Bytes of input per rank of these calls.",
    "tricomm_call_seconds": "Time of those calls that were timed (TRICOMM_STATS_EVERY).",
    "tricomm_call_p50_microseconds": "Median of the latest timed calls.",
    "tricomm_call_p99_microseconds": "99th per cent of the latest timed calls.",
    "tricomm_bus_bandwidth_gbs": "Bus bandwidth by the mean size and the median time, as nccl-tests defines it.",
    "tricomm_peer_wait_seconds": "Time in calls that the peer had not entered.",
    "tricomm_routed_calls": "Calls that a torch.distributed group gave to NCCL or sent over TCP (route gloo).",
    "tricomm_routed_bytes": "Bytes of input per rank of these calls.",
    "tricomm_job_updated_timestamp_seconds": "When the job has last published its statistics.",
}


def exposition(jobs: Sequence[JobStatistics]) -> bytes:
    """The text of a scrape. Raises `ResourceError` if the client is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise ResourceError(_INSTALL) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(jobs))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, jobs: Sequence[JobStatistics]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Any]:
        """The families of metrics, in the client's form."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        def family(kind: type[Any], name: str, labels: tuple[str, ...]) -> Any:
            return kind(name, NAMES[name], labels=labels)

        calls = family(CounterMetricFamily, "tricomm_calls", _KERNEL)
        nbytes = family(CounterMetricFamily, "tricomm_bytes", _KERNEL)
        seconds = family(SummaryMetricFamily, "tricomm_call_seconds", _KERNEL)
        p50 = family(GaugeMetricFamily, "tricomm_call_p50_microseconds", _KERNEL)
        p99 = family(GaugeMetricFamily, "tricomm_call_p99_microseconds", _KERNEL)
        bandwidth = family(GaugeMetricFamily, "tricomm_bus_bandwidth_gbs", _KERNEL)
        waited = family(CounterMetricFamily, "tricomm_peer_wait_seconds", (*_COMM, "peer"))
        pairs = [(job, comm) for job in self._jobs for comm in job.communicators]
        for job, comm in pairs:
            owner = _owner(job, comm)
            for row in comm.calls:
                labels = [*owner, row.collective, row.algorithm, row.protocol, str(row.bucket)]
                calls.add_metric(labels, row.calls)
                nbytes.add_metric(labels, row.nbytes)
                if row.timed:
                    seconds.add_metric(labels, row.timed, row.seconds)
                if row.p50_us is not None and row.p99_us is not None:
                    p50.add_metric(labels, row.p50_us)
                    p99.add_metric(labels, row.p99_us)
                    bandwidth.add_metric(labels, _bandwidth(row, comm.world_size))
            for peer, late in comm.waited.items():
                waited.add_metric([*owner, str(peer)], late)
        yield from (calls, nbytes, seconds, p50, p99, bandwidth, waited)
        yield from self._of_processes(family, CounterMetricFamily, GaugeMetricFamily)

    def _of_processes(self, family: Any, counter: type[Any], gauge: type[Any]) -> Iterator[Any]:
        labels = ("host", "pid", "route", "collective", "bucket")
        calls = family(counter, "tricomm_routed_calls", labels)
        nbytes = family(counter, "tricomm_routed_bytes", labels)
        updated = family(gauge, "tricomm_job_updated_timestamp_seconds", ("host", "pid"))
        for job in self._jobs:
            updated.add_metric([job.host, str(job.pid)], job.written)
            for row in job.routed:
                values = [job.host, str(job.pid), row.route, row.collective, str(row.bucket)]
                calls.add_metric(values, row.calls)
                nbytes.add_metric(values, row.nbytes)
        yield from (calls, nbytes, updated)


def _owner(job: JobStatistics, comm: Statistics) -> list[str]:
    simulated = "true" if comm.simulated else "false"
    return [job.host, str(job.pid), comm.group, str(comm.rank), str(comm.world_size), comm.device, simulated]


def _bandwidth(row: Calls, world_size: int) -> float:
    """1e9 bytes per second. A size is a rank's input here, and the larger one of input and output in nccl-tests."""
    from tricomm.kernels.collective_specs import COLLECTIVES, FUSED

    kind = (COLLECTIVES | FUSED).get(row.collective)
    if row.p50_us is None or not row.p50_us or kind is None:
        return 0.0
    size = row.nbytes / row.calls * max(1.0, kind.rows_out(world_size) / kind.rows_in(world_size))
    return size / row.p50_us / 1e3 * bus_factor(row.collective, world_size)
