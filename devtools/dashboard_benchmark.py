"""Size of the dashboard's page for a long history, and its time in a browser: python -m devtools.dashboard_benchmark

The rows are made up: 10 boxes, 5 collectives of 2 types, 5 lines, 8 sizes, and enough runs. The limits are 10 MB and
3 s for 100,000 rows. Without selenium, chromium and chromedriver only the size is measured. The first opening is in
a browser that has just started.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tricomm.perf.bench_row import Measurement
from tricomm.perf.dashboard import collect, render
from tricomm.perf.history.database import Entry
from tricomm.perf.history.schema import Run

_LINES = (("one_shot", "ll"), ("one_shot", "simple"), ("two_shot", "ll"), ("two_shot", "simple"), ("nccl", "nccl"))
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_SIZES = [1 << bits for bits in range(10, 26, 2)]


def rows(count: int) -> list[Entry]:
    """`count` synthetic rows of a history."""
    draw = random.Random(0)
    boxes = [f"made-up box {n}" for n in range(10)]
    points = list(itertools.product(boxes, _COLLECTIVES, ("float32", "bfloat16"), _LINES, _SIZES))
    entries = []
    for number in range(count):
        turn, place = divmod(number, len(points))
        box, collective, dtype, (algorithm, protocol), size = points[place]
        run = Run(f"2026-01-{turn // 24 + 1:02d}T{turn % 24:02d}:00:00+00:00", box, "8 GPUs", 8, {}, f"{turn:07x}")
        p50 = (5 + size / 1e5) * draw.gauss(1, 0.02)
        library = "nccl" if algorithm == "nccl" else "tricomm"
        row = Measurement(
            library,
            collective,
            algorithm,
            protocol,
            dtype,
            "sum",
            "graph",
            "in_place",
            size,
            p50,
            1.2 * p50,
            2 * p50,
            0.1 * p50,
            False,
        )
        entries.append(Entry(run, row))
    return entries


def measure(count: int, opens: int = 5) -> dict[str, Any]:
    """Seconds and megabytes for `count` rows. `open_s` has the seconds until all charts are drawn, for each of `opens`
    openings."""
    entries = rows(count)
    began = time.perf_counter()
    page = render.page(render.packed(collect.page_data(entries)))
    size: dict[str, Any] = {"rows": count, "make_s": time.perf_counter() - began, "mb": len(page.encode()) / 1e6}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        return size | {"open_s": _opened(file.as_uri(), opens)}


def _opened(url: str, opens: int) -> list[float]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        return []
    try:
        from selenium import webdriver
    except ImportError:
        return []
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = programs[0]
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=programs[1]))
    try:
        driver.set_page_load_timeout(120)
        return [_once(driver, url) for _ in range(opens)]
    finally:
        driver.quit()


def _once(driver: Any, url: str) -> float:
    driver.get("about:blank")
    began = time.perf_counter()
    driver.get(url)
    while not driver.execute_script("return document.body.hasAttribute('data-ready')"):
        if time.perf_counter() - began > 120:
            raise TimeoutError("the page was not ready within 120 s")
        time.sleep(0.01)
    return time.perf_counter() - began


@click.command()
@click.option("--rows", "count", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(count: int, as_json: bool) -> None:
    """Make the page of a long history and open it."""
    page = measure(count)
    if as_json:
        click.echo(json.dumps(page, indent=1))
        return
    click.echo(f"{count} made-up rows: {page['mb']:.1f} MB (limit 10), made in {page['make_s']:.1f} s")
    opened = page["open_s"]
    times = ", ".join(f"{seconds:.2f}" for seconds in opened)
    click.echo(f"opened in {times} s (limit 3)" if opened else "not opened: no selenium, chromium or chromedriver here")


if __name__ == "__main__":
    main()
