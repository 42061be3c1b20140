"""Statistics that jobs publish: read, kept in the history, exported as metrics that Prometheus' parser accepts,
and as a trace."""

import json
import os
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tricomm.errors import InvalidArgument, ResourceError
from tricomm.metrics import publish
from tricomm.metrics.counters import Activity
from tricomm.metrics.publish import JobStatistics
from tricomm.perf.dashboard import chrome_trace, grafana, jobs, prometheus
from tricomm.perf.history.database import open_history
from tricomm.store import process

NASTY = 'a"b\\c\n<script>'


def _communicator() -> dict[str, Any]:
    activity = Activity(NASTY, 1, 2, torch.device("cpu"), {0: 1.5})
    tally = activity.tally("all_reduce", "one_shot", "ll", 1000)
    tally.total = 3 * ((1 << 96) + 1000)
    tally.took(2e-6)
    kernel = {"collective": "all_reduce", "algorithm": "one_shot", "protocol": "ll"}
    span = {"start_us": 5.0, "time_us": 2.0, "nbytes": 1000, **kernel}
    return {**asdict(activity.statistics()), "spans": [span, {**span, "start_us": 9.0}]}


def job_file(folder: Path, pid: int = 0, started: int = 0) -> Path:
    """A file as a job writes it; of this process unless a pid is given."""
    mine = os.getpid()
    record = {
        "schema": 1,
        "pid": pid or mine,
        "started": started or process.start_time(mine),
        "written": 1000.0,
        "host": publish.socket.gethostname(),
        "every": 5.0,
        "routed": [{"route": "gloo", "collective": "broadcast", "bucket": 16, "calls": 2, "nbytes": 20}],
        "communicators": [_communicator()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{record['pid']}-{record['started']}.json"
    file.write_text(json.dumps(record))
    return file


def test_a_process_reads_its_own_snapshot(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(asdict(publish.snapshot())))
    published = jobs.read(tmp_path)
    assert published.notes == () and published.jobs[0].live


def test_an_ended_job_is_not_live_and_goes_to_the_history(tmp_path: Path) -> None:
    live, ended = job_file(tmp_path / "live"), job_file(tmp_path / "live", pid=1 << 22, started=7)
    history = open_history(tmp_path / "history.sqlite")
    assert history is not None
    with history:
        for _ in range(2):  # rows are replaced, not doubled
            assert jobs.keep(jobs.read(tmp_path / "live"), history) > 0
        assert live.exists() and not ended.exists()
        rows = history.activities()
        assert len(rows) == 4 and {r.route for r in rows} == {"kernels", "gloo"}
        kernel = next(r for r in rows if r.route == "kernels")
        assert (kernel.group, kernel.calls, kernel.nbytes, kernel.p50_us) == (NASTY, 3, 3000, pytest.approx(2.0))
        assert kernel.simulated is True and kernel.date == "1970-01-01T00:16:40+00:00"
        assert history.keep([replace(kernel, nbytes=1 << 80)]) and history.activities()[-1].nbytes == (1 << 63) - 1


@pytest.mark.parametrize(("age", "live"), [(0, True), (70, True), (80, False)])
def test_a_job_of_another_host_lives_as_long_as_it_writes(age: float, live: bool) -> None:
    assert JobStatistics(1, os.getpid(), 0, "another host", time.time() - age, 5.0, (), ()).live is live


def test_an_ended_jobs_file_stays_if_the_history_cannot_be_written(tmp_path: Path) -> None:
    ended = job_file(tmp_path, pid=1 << 22, started=7)
    history = open_history(tmp_path / "history.sqlite")
    assert history is not None
    history.close()
    assert jobs.keep(jobs.read(tmp_path), history) == 0 and ended.exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"schema": 1, "pid": "x"}', "\x00\xff"])
def test_a_foreign_file_is_named_and_left(tmp_path: Path, text: str) -> None:
    job_file(tmp_path)
    (tmp_path / "foreign.json").write_text(text)
    published = jobs.read(tmp_path)
    assert len(published.jobs) == 1 and "foreign.json" in published.notes[0] and (tmp_path / "foreign.json").exists()


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ('"written": 1000.0', '"written": 1e20'),
        ('"written": 1000.0', '"written": -1e12'),
        ('"world_size": 2', '"world_size": 0'),
        ('"calls": 3', '"calls": 0'),
    ],
)
def test_a_file_with_an_impossible_number_is_named_and_left(tmp_path: Path, written: str, wrong: str) -> None:
    file = job_file(tmp_path)
    text = file.read_text()
    assert written in text
    file.write_text(text.replace(written, wrong))
    published = jobs.read(tmp_path)
    assert published.jobs == () and str(file) in published.notes[0] and file.exists()
    assert prometheus.exposition(published.jobs)


def test_a_newer_jobs_file_is_named(tmp_path: Path) -> None:
    file = job_file(tmp_path)
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    assert "schema 2, this tricomm knows 1" in jobs.read(tmp_path).notes[0]


def _samples(folder: Path) -> dict[str, Any]:
    text = prometheus.exposition(jobs.read(folder).jobs).decode()
    return {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}


def test_the_official_parser_reads_the_metrics(tmp_path: Path) -> None:
    job_file(tmp_path)
    samples = _samples(tmp_path)
    calls = samples["tricomm_calls_total"]
    assert calls.value == 3 and calls.labels["group"] == NASTY and calls.labels["bucket"] == "1024"
    assert calls.labels["simulated"] == "true"
    assert samples["tricomm_bytes_total"].value == 3000
    assert samples["tricomm_call_seconds_count"].value == 1
    assert samples["tricomm_call_p50_microseconds"].value == pytest.approx(2.0)
    assert samples["tricomm_bus_bandwidth_gbs"].value == pytest.approx(1000 / 2.0 / 1e3)  # 2 (n - 1) / n is 1
    assert samples["tricomm_peer_wait_seconds_total"].labels["peer"] == "0"
    assert samples["tricomm_routed_calls_total"].labels["route"] == "gloo"
    assert samples["tricomm_job_updated_timestamp_seconds"].value == 1000


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ResourceError, match=r"pip install 'tricomm\[metrics\]'"):
        prometheus.exposition(())


def _words(query: str) -> tuple[set[str], set[str]]:
    """tricomm's metrics and the labels that a PromQL query names."""
    names = set(re.findall(r"\btricomm_\w+", query))
    inside = ",".join(re.findall(r"\{([^}]*)\}", query))
    by = ",".join(re.findall(r"\bby \(([^)]*)\)", query))
    return names, set(re.findall(r"(\w+)\s*=~?", inside)) | set(re.findall(r"\w+", by))


def test_the_grafana_dashboard_queries_existing_metrics_and_labels(tmp_path: Path) -> None:
    job_file(tmp_path)
    text = prometheus.exposition(jobs.read(tmp_path).jobs).decode()
    known = {s.name: set(s.labels) for f in text_string_to_metric_families(text) for s in f.samples}
    board = grafana.board()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= 7
    asked = set()
    for query in queries:
        names, labels = _words(query)
        assert names and names <= set(known), query
        assert labels <= set().union(*(known[name] for name in names)), query
        asked |= names
    assert {"tricomm_calls_total", "tricomm_bus_bandwidth_gbs", "tricomm_peer_wait_seconds_total"} <= asked
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            assert _words(variable["query"])[0] <= set(known)
    unknown, _ = _words("rate(tricomm_colls_total[1m])")
    assert not unknown <= set(known)


def test_the_trace_has_every_timed_call_once(tmp_path: Path) -> None:
    job_file(tmp_path / "live")
    file = tmp_path / "trace.json"
    assert chrome_trace.write(jobs.read(tmp_path / "live").jobs, file) == 2
    written = json.loads(file.read_text())
    spans = [e for e in written["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["name"]) for e in spans] == [(0.0, 2.0, "all_reduce"), (4.0, 2.0, "all_reduce")]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["ph"] == "M"}
    assert "(simulated)" in names["thread_name", 0, 0] and all(e["args"]["simulated"] for e in spans)
    with pytest.raises(InvalidArgument, match="--trace"):
        chrome_trace.write((), tmp_path)
