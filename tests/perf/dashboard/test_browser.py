"""The page in a real browser: charts, filters, keyboard, dark and light, three widths, texts that collide, markup
in the data that must not run. Screenshots go to `screenshots/`."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.perf.dashboard import dashboard_data, test_calls
from tests.perf.dashboard.conftest import serving
from tests.perf.dashboard.test_jobs import job_file
from tricomm.perf.dashboard import call_page, collect, dumps, live, render, serve
from tricomm.perf.dashboard.source import Source
from tricomm.perf.history.database import Entry

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

CHARTS = ("latency", "bandwidth", "speedup", "past", "skew", "bytes")
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
        """The URLs that the page has loaded, except its own."""
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
    assert page.log() == [], "the console has no message"


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
    *latency, model = [t for t in page.traces("latency") if t.get("fill") is None]
    assert model["name"] == "predicted" and len(model["y"]) == len(dashboard_data.SIZES)
    assert [t["name"] for t in latency] == ["one_shot/ll", "one_shot/simple", "two_shot/ll", "two_shot/simple", "nccl"]
    rows = [e.measurement for e in _rows() if e.run.commit == f"{29:07x}" and e.measurement.library == "nccl"]
    assert latency[-1]["y"] == [pytest.approx(m.p50_us, rel=1e-3) for m in rows]
    axes = page.run("const l = document.querySelector('#latency .chart').layout; return [l.xaxis.type, l.yaxis.type]")
    assert axes == ["log", "log"]
    assert [t["name"] for t in page.traces("bandwidth")][-1] == "what links carry"
    assert len(page.traces("speedup")[0]["y"]) == 5 and "baseline is nccl" in page.text("#speedup p")
    assert page.text("#changes h2") == "Changes: 4 slower, 0 faster"
    said = latency[0]["text"][1]
    assert all(word in said for word in ("16 KiB", " us, p99 ", "GB/s", "commit 000001d", "NVIDIA H100"))
    assert page.requests() == []


def test_the_table_of_picks_shows_the_known_facts(page: Page, tmp_path: Path) -> None:
    def picked() -> list[str]:
        cells = page.run("return [...document.querySelectorAll('#picks td:nth-child(2)')].map((c) => c.textContent)")
        return list(cells)

    page.open(_file(tmp_path, dashboard_data.entries(2, box="")))
    assert set(picked()) == {"not known"} and "is not known" in page.text("#picks p")
    assert "tune" not in page.text("#picks p") and "Selection loses over 5 %not known" in page.text("#tiles")
    through_switch = dashboard_data.facts(no_multicast="", switch=True, fallback="nccl")
    page.open(_file(tmp_path, dashboard_data.entries(2, sizes=(1 << 14, 1 << 24, 1 << 26), box=through_switch)))
    assert set(picked()) == {"one_shot/ll128", "multicast/simple", "nccl"} and "of 3 sizes" in page.text("#picks p")


def test_the_headlines_are_the_scenes_numbers(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, _rows()))
    rows = [e.measurement for e in _rows()[: 30 * 20] if e.run.commit == f"{29:07x}"]
    rate = max(m.nbytes / m.p50_us / 1e3 * 1.75 for m in rows if m.library == "tricomm")
    assert f"Peak bus bandwidth{rate:.3g} GB/s{rate / 371:.0%}".replace("%", " %") in page.text("#tiles")
    assert "Since 2026-01-014 slower, 0 faster" in page.text("#tiles")
    times = {(m.algorithm, m.protocol, m.nbytes): m.p50_us for m in rows}
    picks = collect.page_data(_rows()[: 30 * 20])["scenes"][0]["picks"]
    picked = {size: times.get((*picks[str(size)].split("/"), size)) for size in dashboard_data.SIZES}
    gains = [times["nccl", "nccl", size] / time for size, time in picked.items() if time is not None]
    assert 0 < len(gains) < len(picked)  # selection picks a kernel that was not measured
    assert f"Speed-up over NCCL{min(gains):.2f} to {max(gains):.2f} x" in page.text("#tiles")


def test_a_window_of_dates_shows_the_history_of_that_time(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, dashboard_data.entries(60, step_at=30)))
    assert page.text("#changes h2") == "Changes: 4 slower, 0 faster" and "commits 000001d..000001e" in page.text(
        "#events"
    )
    page.choose("to", "2026-01-01")
    assert page.text("#changes h2") == "Changes: 0 slower, 0 faster" and len(page.traces("past")[0]["x"]) == 24
    rows = [e.measurement for e in dashboard_data.entries(24)[-20:] if e.measurement.protocol == "nccl"]
    assert page.traces("latency")[8]["y"] == [pytest.approx(m.p50_us, rel=1e-3) for m in rows]
    page.choose("to", "")
    page.choose("from", "2026-01-03")
    assert "Since 2026-01-03" in page.text("#tiles") and len(page.traces("past")[0]["x"]) == 12
    page.choose("from", "2027-01-01")
    assert not page.run("return document.querySelector('#latency .chart').checkVisibility()")


def test_too_few_runs_are_reported(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, dashboard_data.entries(3)))
    assert "20 of 20 points of the latest runs have too few runs to judge" in page.text("#changes p")
    assert page.text("#changes h2") == "Changes: not judged yet"
    slow = [replace(e, measurement=replace(e.measurement, p50_us=1e5)) for e in dashboard_data.entries(10)[-20:]]
    page.open(_file(tmp_path, [*dashboard_data.entries(9), *slow]))
    assert "not judged yet" in page.text("#tiles") and "0 slower" not in page.text("#tiles")
    assert "20 of 20 points took longer in the latest runs than in any before" in page.text("#tiles")
    assert page.text("#events").startswith("Too recent to judge; measure again")


def test_filters_choose_and_simulated_is_marked(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, _rows()))
    label = "a CPU (simulated: Triton's interpreter on a CPU)"
    for device, simulated in ((label, True), ("NVIDIA H100 80GB HBM3", False), (label, True)):
        page.choose("filter-device", device)
        for name in CHARTS:
            marks = page.run("return document.querySelector(`#${arguments[0]} .chart`).layout.annotations", name)
            assert [mark["text"] for mark in marks] == ["simulated"] * simulated, name
            assert ("simulated" in page.text(f"#{name} h2")) is simulated
        names = {t["name"] for t in page.traces("latency")}
        assert ("nccl" in names) is not simulated
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")
    page.choose("filter-dtype", "bfloat16")
    assert "bfloat16" in page.text("#scene h2") and len(page.traces("past")[0]["x"]) == 1
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
    page.choose("filter-device", "NVIDIA H100 80GB HBM3")  # a filter with one value is hidden
    reached = []
    for _ in range(60):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("const e = document.activeElement; return e.id || e.className || e.type"))
    assert reached[0] == "skip"
    wanted = ["filter-device", "filter-dtype", "past-line", "past-size"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted and "checkbox" in reached
    before = page.text("#scene h2")
    page.driver.find_element(By.ID, "filter-device").send_keys("a CPU")
    page.until(lambda: page.text("#scene h2") != before)


_PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "box": lambda: collect.page_data(
        [*dashboard_data.entries(30, 20, _NINE), *dashboard_data.entries(2, dtype="int8")]
    ),
    "simulated": lambda: collect.page_data(dashboard_data.entries(3, device="a CPU", simulated=True)),
    "jobs": lambda: collect.page_data(dashboard_data.entries(3, sizes=_NINE)) | _watched(),
    "empty": lambda: collect.page_data([]),
    "watching": lambda: collect.page_data([]) | _watched(simulated=True),
}
_NINE = tuple(1 << bits for bits in range(10, 27, 2))
# Pairs of texts whose boxes overlap, and texts that leave the window. A box is a little higher than its letters.
_COLLISIONS = """
const boxes = [], bad = [];
for (const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); walker.nextNode();) {
  const node = walker.currentNode, range = document.createRange();
  const around = node.parentElement.closest("svg text") ?? node.parentElement;
  if (!node.data.trim() || around.closest("select, script, noscript, .modebar, .skip")) continue;
  if (!around.checkVisibility({ opacityProperty: true })) continue;
  range.selectNode(around.closest("svg") ? around : node);
  for (const r of around.closest("svg") ? [around.getBoundingClientRect()] : range.getClientRects()) {
    if (r.width > 1) boxes.push([node.data.trim(), r.left + 1, r.top + 3, r.right - 1, r.bottom - 3, around]);
    if (r.right > innerWidth + 1 || r.left < -1) bad.push(`${node.data.trim()} leaves the window`);
  }
}
boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
  if (a[5] !== b[5] && a[1] < b[3] && b[1] < a[3] && a[2] < b[4] && b[2] < a[4]) bad.push(`${a[0]} over ${b[0]}`);
}));
return [boxes.length, bad];
"""


def _watched(simulated: bool = False) -> dict[str, Any]:
    """A page's live jobs after five writings."""
    seen = live.Live()
    return [seen.add(dashboard_data.jobs(writing, simulated=simulated)) for writing in range(1, 6)][-1]


def _opened(page: Page, folder: Path, name: str, width: int, scheme: str = "light") -> None:
    file = folder / f"{name}.html"
    file.write_text(render.page(render.packed(_PAGES[name]())), encoding="utf-8")
    page.open(file.as_uri(), width, scheme)
    height = page.run("return document.documentElement.scrollHeight")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.5)  # charts follow the window's size


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 820, 390])
@pytest.mark.parametrize("name", _PAGES)
def test_no_text_collides_on_any_page(page: Page, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    _opened(page, tmp_path, name, width, scheme)
    SHOTS.mkdir(exist_ok=True)
    assert page.driver.save_screenshot(str(SHOTS / f"dashboard-{name}-{width}-{scheme}.png"))
    count, collisions = page.run(_COLLISIONS)
    assert collisions == [] and count > (100 if name == "box" else 5)
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    back = page.run("return getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]
    if name not in ("empty", "watching"):
        front = page.run("return document.querySelector('#latency .chart').layout.font.color")
        assert front == {"light": "#1c2430", "dark": "#e6eaf0"}[scheme]


def test_without_room_between_ticks_texts_collide(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, room = render._text, "const LABEL = 58;"
    assert room in whole("charts.js")
    monkeypatch.setattr(render, "_text", lambda name: whole(name).replace(room, "const LABEL = 1;"))
    _opened(page, tmp_path, "box", 390)
    assert any("KiB over" in text for text in page.run(_COLLISIONS)[1])


def test_live_jobs_have_rates_waits_and_a_straggler(page: Page, tmp_path: Path) -> None:
    _opened(page, tmp_path, "jobs", 1400)
    assert "rank 5, pid 4005 on box; its peers have waited 4.5 s each for it" in page.text("#jobs p")
    rates = page.traces("rates")
    assert len(rates) == 8 and rates[0]["y"] == [pytest.approx(2.097, rel=1e-2)] * 4  # GB/s of 1000 calls/s of 2 MiB
    assert "1,000 calls/s" in rates[0]["text"][0]
    (waits,) = page.traces("waits")
    assert waits["z"][0] == [0.0, 0.1, 0.1, 0.1, 0.1, 4.5, 0.1, 0.1] and waits["z"][5] == [0.0] * 8


@pytest.mark.parametrize("width", [1400, 390])
def test_single_calls_are_opened_by_keyboard(page: Page, tmp_path: Path, width: int) -> None:
    from selenium.webdriver.common.keys import Keys

    recorders = [test_calls.Recorder(rank, {1: test_calls.MADE}, name="<b>g</b>") for rank in range(3)]
    test_calls.written(tmp_path, {recorder.rank: recorder.dumped() for recorder in recorders})
    (tmp_path / "calls.html").write_text(call_page.html(*dumps.read(str(tmp_path))), encoding="utf-8")
    page.open((tmp_path / "calls.html").as_uri(), width)
    page.driver.switch_to.active_element.send_keys(Keys.TAB, Keys.ENTER)
    opened = page.run("return [...document.querySelectorAll('details[open] tbody th')].map((cell) => cell.textContent)")
    assert opened == ["0", "1", "2"] and page.text("h2") == "<b>g</b>, ranks 0, 1, 2"
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert width < 500 or page.run(_COLLISIONS)[1] == []  # a narrow window scrolls its tables


def test_an_empty_history_names_the_command_to_run(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, []))
    assert page.run("return document.querySelector('#empty').checkVisibility()")
    assert "tricomm bench" in page.text("#empty")
    assert not page.run("return document.querySelector('#charts').checkVisibility()")


NASTY = "<img src=x onerror='hit=1'><a href=\"javascript:hit=2\">x</a></script><script>window.hit=3</script>"


def test_names_in_the_history_are_shown_as_text(page: Page, tmp_path: Path) -> None:
    rows = []
    for entry in dashboard_data.entries(2):
        run = replace(entry.run, device=NASTY, topology=NASTY, commit=NASTY, date=entry.run.date)
        rows.append(Entry(run, replace(entry.measurement, library=NASTY, algorithm=NASTY, dtype=NASTY, mode=NASTY)))
    page.open(_file(tmp_path, rows))
    time.sleep(0.5)
    assert page.run("return window.hit") is None and NASTY in page.text("#scene h2")
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


def test_a_page_with_only_other_libraries_has_its_charts(page: Page, tmp_path: Path) -> None:
    page.open(_file(tmp_path, [e for e in dashboard_data.entries(1) if e.measurement.library == "nccl"]))
    shown = page.run("return [...document.querySelectorAll('.chart')].filter((c) => c.checkVisibility()).length")
    assert shown == len(CHARTS) - 1 and "None of these lines" in page.text("#bytes p")


def test_a_served_page_is_renewed(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_STATS_DIR", str(tmp_path / "live"))
    path = dashboard_data.written(tmp_path / "history.sqlite", [])
    source = Source(path, print)
    pages, data = lambda: render.page(source.packed(), 0.3).encode(), lambda: source.packed().encode()
    with serving(serve.Server(0, pages, data, source.metrics, bytes)) as server:
        try:
            page.open(server.url)
            assert page.run("return document.querySelector('#empty').checkVisibility()")
            dashboard_data.written(path, dashboard_data.entries(1))
            page.until(lambda: page.run("return document.querySelectorAll('#latency svg').length"))
            page.choose("past-line", "2")
            dashboard_data.written(path, dashboard_data.entries(30, step_at=15)[20:])
            page.until(lambda: page.run("return document.querySelectorAll('#events details[open]').length"))
            page.run("document.querySelector('#events summary').click()")
            job_file(tmp_path / "live")
            page.until(lambda: "all_reduce" in page.text("#jobs"))
            assert page.run("return document.querySelector('#past-line').value") == "2"
            assert not page.run("return document.querySelectorAll('#events details[open]').length")
            assert "(simulated)" in page.text("#jobs") and set(page.requests()) == {f"{server.url}data"}
        finally:
            page.driver.get("about:blank")
