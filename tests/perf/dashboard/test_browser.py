"""The page in a real browser: charts, filters, keyboard, dark and light, three widths, and nothing fetched or run that
came with the data. Screenshots go to `screenshots/`."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.perf.dashboard import dashboard_data
from tests.perf.dashboard.test_jobs import job_file
from tricomm.perf.dashboard import collect, render, serve
from tricomm.perf.dashboard.source import Source
from tricomm.perf.history.database import Entry

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

CHARTS = ("latency", "bandwidth", "speedup", "picks", "past", "skew", "bytes")
SHOTS = Path(__file__).resolve().parents[3] / "screenshots"
_PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
_CHOOSE = "const s = document.querySelector(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
_TRACES = "return document.querySelector('#' + arguments[0] + ' .chart').data"


class Page:
    """A browser with a page in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1400, scheme: str = "light") -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)
        self.until(lambda: self.run("return document.body.hasAttribute('data-ready')"))

    def until(self, reached: Callable[[], Any], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, (reached, self.log())
            time.sleep(0.02)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def traces(self, chart: str) -> list[dict[str, Any]]:
        traces: list[dict[str, Any]] = self.run(_TRACES, chart)
        return traces

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def choose(self, name: str, value: str) -> None:
        self.run(_CHOOSE, f"#{name}", value)

    def log(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Everything that the page has asked for, itself apart."""
        return [str(u) for u in self.run("return performance.getEntriesByType('resource').map((e) => e.name)")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    missing = [name for name, path in _PROGRAMS.items() if path is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium here: pip install 'tricomm[test]'")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = _PROGRAMS["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=_PROGRAMS["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    browser.get_log("browser")
    page = Page(browser)
    yield page
    assert page.log() == [], "the console stays silent"


def _rows() -> list[Entry]:
    simulated = dashboard_data.entries(15, device="a CPU", simulated=True, sizes=(1024, 4096))
    other = dashboard_data.entries(1, dtype="bfloat16")
    return dashboard_data.entries(30, step_at=20) + other + simulated


def _file(folder: Path, rows: list[Entry]) -> str:
    path = folder / "page.html"
    path.write_text(render.page(render.packed(collect.page_data(rows))), encoding="utf-8")
    return path.as_uri()


def test_every_chart_is_there_and_not_empty(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, _rows()))
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")
    page.choose("filter-dtype", "float32")
    for name in CHARTS:
        assert page.traces(name), name
        drawn = page.run("return document.querySelectorAll(`#${arguments[0]} .chart svg.main-svg`).length", name)
        assert drawn > 0, name
    latency = [t for t in page.traces("latency") if t.get("fill") is None]
    assert [t["name"] for t in latency] == ["one_shot/ll", "one_shot/simple", "two_shot/ll", "two_shot/simple", "nccl"]
    rows = [e.measurement for e in _rows() if e.run.commit == f"{29:07x}" and e.measurement.library == "nccl"]
    assert latency[-1]["y"] == [pytest.approx(m.p50_us, rel=1e-3) for m in rows]
    axes = page.run("const l = document.querySelector('#latency .chart').layout; return [l.xaxis.type, l.yaxis.type]")
    assert axes == ["log", "log"]
    assert [t["name"] for t in page.traces("bandwidth")][-1] == "what links carry"
    assert len(page.traces("speedup")[0]["y"]) == 5 and "baseline is nccl" in page.text("#speedup p")
    assert page.text("#changes h2").startswith("Changes: 4 slower, 0 faster")
    assert page.requests() == []


def test_the_chart_of_picks_says_what_is_known(page: Page, tmp_path: Path) -> None:
    def picked() -> list[str]:
        return [t["name"] for t in page.traces("picks") if "picked" in t["y"]]

    page.open(_file(tmp_path, dashboard_data.entries(2, box="")))
    assert picked() == [] and "is not known" in page.text("#picks p") and "tune" not in page.text("#picks p")
    through_switch = dashboard_data.facts(no_multicast="", switch=True, fallback="nccl")
    page.open(_file(tmp_path, dashboard_data.entries(2, sizes=(1 << 14, 1 << 24, 1 << 26), box=through_switch)))
    assert set(picked()) == {"one_shot/ll128", "multicast/simple", "nccl"} and "of 3 sizes" in page.text("#picks p")


def test_too_few_runs_are_said(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, dashboard_data.entries(3)))
    assert "20 of 20 points of the latest runs have too few runs to judge" in page.text("#changes p")
    assert page.text("#changes h2") == "Changes: none found"


def test_filters_choose_and_simulated_is_marked(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, _rows()))
    label = "a CPU (simulated: Triton's interpreter on a CPU)"
    for device, simulated in ((label, True), ("NVIDIA H100 80GB HBM3", False), (label, True)):
        page.choose("filter-device", device)
        for name in CHARTS:
            title = page.run("return document.querySelector(`#${arguments[0]} .chart`).layout.title.text", name)
            marks = ("simulated" in title, "simulated" in page.text(f"#{name} h2"))
            assert marks == (simulated, simulated), name
        names = {t["name"] for t in page.traces("latency")}
        assert ("nccl" in names) is not simulated
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")
    page.choose("filter-dtype", "bfloat16")
    assert "bfloat16" in page.text("#latency h2") and len(page.traces("past")[0]["x"]) == 1
    types = page.run("return [...document.querySelectorAll('#filter-dtype option')].map((o) => o.value)")
    assert types == ["bfloat16", "float32"]
    page.run("document.querySelector('#lines input').click()")
    assert "one_shot/ll" not in {t["name"] for t in page.traces("latency")}


def test_a_point_of_the_history_and_its_regression(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, dashboard_data.entries(30, step_at=20)))
    assert [t["name"] for t in page.traces("past")] == ["one_shot/ll"]
    page.run("document.querySelector('#changes button').click()")
    traces = page.traces("past")
    assert [t["name"] for t in traces] == ["one_shot/simple", "slower"] and len(traces[0]["x"]) == 30
    assert traces[1]["x"] == [traces[0]["x"][20]] and page.run("return document.activeElement.id") == "past-line"


def test_everything_is_reached_by_keyboard(page: Page, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page.open(_file(tmp_path, _rows()))
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")  # a filter with one value is not in the way
    reached = []
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("const e = document.activeElement; return e.id || e.className || e.type"))
    assert reached[0] == "skip"
    wanted = ["filter-device", "filter-dtype", "past-line", "past-size"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted and "checkbox" in reached
    before = page.text("#latency h2")
    page.driver.find_element(By.ID, "filter-device").send_keys("a CPU")
    page.until(lambda: page.text("#latency h2") != before)


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (820, "dark"), (390, "light"), (390, "dark")])
def test_widths_and_schemes(page: Page, tmp_path: Path, width: int, scheme: str) -> None:
    page.open(_file(tmp_path, _rows()), width, scheme)
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")
    page.run("document.querySelector('#changes button').click()")
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    back = page.run("return getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]
    front = page.run("return document.querySelector('#latency .chart').layout.font.color")
    assert front == {"light": "#1c2430", "dark": "#e6eaf0"}[scheme]
    height = page.run("return document.documentElement.scrollHeight")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.5)  # charts follow the window's size
    SHOTS.mkdir(exist_ok=True)
    assert page.driver.save_screenshot(str(SHOTS / f"dashboard-{width}-{scheme}.png"))


def test_an_empty_history_says_what_to_run(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, []))
    assert page.run("return document.querySelector('#empty').checkVisibility()")
    assert "tricomm bench" in page.text("#empty")
    assert not page.run("return document.querySelector('#charts').checkVisibility()")
    SHOTS.mkdir(exist_ok=True)
    assert page.driver.save_screenshot(str(SHOTS / "dashboard-empty.png"))


NASTY = "<img src=x onerror='hit=1'><a href=\"javascript:hit=2\">x</a></script><script>window.hit=3</script>"


def test_what_the_history_says_is_text(page: Page, tmp_path: Path) -> None:
    rows = []
    for entry in dashboard_data.entries(2):
        run = replace(entry.run, device=NASTY, topology=NASTY, commit=NASTY, date=entry.run.date)
        rows.append(Entry(run, replace(entry.measurement, library=NASTY, algorithm=NASTY, dtype=NASTY, mode=NASTY)))
    page.open(_file(tmp_path, rows))
    time.sleep(0.5)
    assert page.run("return window.hit") is None and NASTY in page.text("#latency h2")
    assert page.run("return document.querySelectorAll('img, .chart a').length") == 0
    assert "<img" in page.text("#latency .legendtext")


def test_without_its_guard_a_name_would_be_markup(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, guard = render._text, "return String(text)"
    broken = whole("charts.js").replace(guard, "return text; " + guard)
    assert broken != whole("charts.js")
    monkeypatch.setattr(render, "_text", lambda name: broken if name == "charts.js" else whole(name))
    rows = [Entry(e.run, replace(e.measurement, library="<b>bold</b>")) for e in dashboard_data.entries(1)]
    page.open(_file(tmp_path, rows))
    assert page.text("#latency .legendtext") == "bold"


def test_a_page_with_other_libraries_only_draws_what_there_is(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, [e for e in dashboard_data.entries(1) if e.measurement.library == "nccl"]))
    shown = page.run("return [...document.querySelectorAll('.chart')].filter((c) => c.checkVisibility()).length")
    assert shown == len(CHARTS) - 1 and "None of these lines" in page.text("#bytes p")


def test_a_served_page_is_renewed(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_STATS_DIR", str(tmp_path / "live"))
    path = dashboard_data.written(tmp_path / "history.sqlite", [])
    source = Source(path, print)
    pages, data = lambda: render.page(source.packed(), 0.3).encode(), lambda: source.packed().encode()
    with serve.Server(0, pages, data, source.metrics) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            page.open(server.url)
            assert page.run("return document.querySelector('#empty').checkVisibility()")
            dashboard_data.written(path, dashboard_data.entries(1))
            page.until(lambda: page.run("return document.querySelectorAll('#latency svg').length"))
            page.choose("past-line", "2")
            job_file(tmp_path / "live")
            page.until(lambda: "all_reduce" in page.text("#jobs"))
            assert page.run("return document.querySelector('#past-line').value") == "2"
            assert "(simulated)" in page.text("#jobs") and set(page.requests()) == {f"{server.url}data"}
        finally:
            page.driver.get("about:blank")
            server.shutdown()
            thread.join(timeout=10)
