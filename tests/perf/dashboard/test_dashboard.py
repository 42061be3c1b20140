"""The data of the page, its server, and the messages for a user's mistakes."""

import base64
import gzip
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.perf.dashboard import dashboard_data
from tests.perf.dashboard.conftest import serving
from tests.perf.dashboard.test_jobs import job_file
from tricomm.cli import cli
from tricomm.errors import ResourceError
from tricomm.perf.dashboard import collect, render, serve
from tricomm.perf.dashboard.source import Source
from tricomm.perf.history import schema
from tricomm.perf.history.database import open_history

pytestmark = pytest.mark.usefixtures("folders")


def _unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_simulated_and_measured_never_share_a_scene() -> None:
    entries = dashboard_data.entries(3)
    mixed = [replace(e, measurement=replace(e.measurement, simulated=i % 2 == 0)) for i, e in enumerate(entries)]
    scenes = collect.page_data(mixed)["scenes"]
    assert [s["simulated"] for s in scenes] == [True, False]
    assert {name for s in scenes for name in collect.SCENE if len({x[name] for x in scenes}) > 1} == {"simulated"}


def test_a_point_has_its_latest_times_and_its_past() -> None:
    entries = dashboard_data.entries(5)
    (scene,) = collect.page_data(reversed(entries))["scenes"]
    line = next(x for x in scene["lines"] if x["kernel"] == "one_shot/ll")
    mine = [e.measurement for e in entries if e.measurement.algorithm == "one_shot" and e.measurement.protocol == "ll"]
    of_size = [m for m in mine if m.nbytes == line["size"][0]]
    assert line["past"][0] == [pytest.approx(m.p50_us, rel=1e-3) for m in of_size]
    assert line["p99"][0] == [pytest.approx(m.p99_us, rel=1e-3) for m in of_size]
    assert line["moved"] == 8.0  # 2 (N - 1) n over 2 (N - 1) / N n
    assert scene["bus"] == 1.75 and scene["link_gbs"] == 371.0


def test_a_step_in_the_past_is_a_change() -> None:
    (scene,) = collect.page_data(dashboard_data.entries(30, step_at=20))["scenes"]
    changed = {x["kernel"]: [c[0] for point in x["changes"] for c in point] for x in scene["lines"]}
    assert changed["one_shot/simple"] == [20] * len(scene["lines"][0]["size"])
    assert changed["two_shot/ll"] == changed["nccl"] == []


def test_a_long_past_is_cut_and_its_changes_stay_where_they_are() -> None:
    (scene,) = collect.page_data(dashboard_data.entries(300, step_at=290, sizes=(1024,)))["scenes"]
    line = next(x for x in scene["lines"] if x["kernel"] == "one_shot/simple")
    assert len(line["past"][0]) == len(line["run"][0]) == 256 and line["run"][0][-1] == 299
    assert [c[0] for c in line["changes"][0]] == [290 - (300 - 256)]


def test_odd_rows_are_shown_without_an_error() -> None:
    first = dashboard_data.entries(1)[0]
    for world_size, collective, nbytes in [(0, "all_reduce", 8), (1, "", 0), (99, "all_reduce", 1 << 62)]:
        row = replace(first.measurement, collective=collective, nbytes=nbytes, p50_us=0.0)
        data = collect.page_data([replace(first, run=replace(first.run, world_size=world_size), measurement=row)])
        assert len(data["scenes"]) == 1 and json.dumps(data, allow_nan=False)


def test_the_page_is_one_file_that_loads_no_other() -> None:
    nasty = "</script><script>alert(1)</script>"
    (entry, *_) = dashboard_data.entries(1)
    page = render.page(render.packed(collect.page_data([replace(entry, run=replace(entry.run, device=nasty))])))
    assert "alert(1)" not in page and "connect-src 'none'" in page and " src=" not in page.split("<script", 1)[0]
    assert "connect-src 'self'" in render.page("", 5) and len(page) < 10e6


def test_missing_plotly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ResourceError, match=r"pip install 'tricomm\[report\]'"):
        render.page("")
    done = _dashboard("--html", "x.html")
    assert done.exit_code == 3 and "tricomm[report]" in done.output


@pytest.fixture
def server() -> Iterator[serve.Server]:
    def broken() -> bytes:
        raise ResourceError("no client <here>")

    with serving(serve.Server(0, lambda: b"<p>page</p>", lambda: b"data", broken, bytes)) as server:
        yield server


def _get(url: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_served_paths(server: serve.Server) -> None:
    assert _get(server.url) == (200, "<p>page</p>") and _get(server.url + "data?x=1") == (200, "data")
    assert _get(server.url + "etc/passwd")[0] == 404
    status, text = _get(server.url + "metrics")
    assert status == 503 and "no client &lt;here&gt;" in text


def test_only_this_machine_and_no_foreign_name_gets_an_answer(server: serve.Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert _get(server.url, host=f"evil.example:{server.server_address[1]}")[0] == 403
    assert _get(server.url, host=f"localhost:{server.server_address[1]}")[0] == 200


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1: Address already in use; --port"):
            serve.Server(port, bytes, bytes, bytes, bytes)
        done = _dashboard("--serve", "--port", str(port))
    assert done.exit_code == 3 and f"port {port}" in done.output


def test_serving_ends_with_an_interrupt() -> None:
    command = [sys.executable, "-m", "tricomm", "dashboard", "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert [_get(url + name)[0] for name in ("", "metrics")] == [200, 200]
            assert _unpacked(_get(f"{url}data")[1])["rows"] == 0
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and told.strip() == "interrupted"


def test_a_source_rebuilds_its_data_after_a_change(tmp_path: Path) -> None:
    path = dashboard_data.written(tmp_path / "history.sqlite", dashboard_data.entries(1))
    source = Source(path, print)
    while (first := source.packed()) != source.packed():  # what reading itself changes in the file
        pass
    dashboard_data.written(path, dashboard_data.entries(1))
    second = _unpacked(source.packed())
    assert second["rows"] == 2 * _unpacked(first)["rows"] and second["jobs"] == []
    job_file(tmp_path / "live")
    assert {row["route"] for row in _unpacked(source.packed())["jobs"]} == {"kernels", "gloo"}


def _begins_as_a_history() -> bytes:
    return b"SQLite format 3\0" + bytes(52) + schema.APPLICATION.to_bytes(4, "big")


@pytest.mark.parametrize("content", [b"", b"import sys\n", _begins_as_a_history()[:-4] + bytes(100)])
def test_a_file_that_is_no_history_is_refused_and_unchanged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(content)
    done = _dashboard("--history", str(path), "--changes")
    assert done.exit_code == 2 and "this is no history of tricomm" in " ".join(done.output.split())
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_a_history_with_rows_only_in_its_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    with open_history(path) as past:  # type: ignore[union-attr]
        assert Path(f"{path}-wal").stat().st_size and path.read_bytes()[68:72] == bytes(4)
        assert Source(path, print).data()["rows"] == 0
        past.close()


def _dashboard(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["dashboard", *arguments])


def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = _dashboard("--html", str(page))
    assert done.exit_code == 0 and "MB written to" in done.output and page.stat().st_size > 1e6
    assert json.loads(_dashboard("--grafana").output)["title"] == "tricomm"
    job_file(tmp_path / "live")
    assert "tricomm_calls_total{" in _dashboard("--prometheus").output
    done = _dashboard("--trace", str(tmp_path / "trace.json"))
    assert done.exit_code == 0 and done.output.startswith("2 timed calls written")
