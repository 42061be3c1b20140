"""Make the pictures of the README: python -m devtools.pictures docs/pictures

The pictures show the dashboard of a benchmark of simulated ranks, and the timeline of the race in
examples/racy_kernel.py. Users' commands make them. Needs chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BENCH = "bench --nproc 4 --collective all_reduce,all_gather --algorithm all --protocol all --sizes 1K:256K:4 --iters 5"
_PICTURES = {"dashboard": (1400, 1410), "race": (1000, 740)}  # width and height in pixels


def main(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium was found; install it")
    with tempfile.TemporaryDirectory() as work:
        environment = {**os.environ, "XDG_DATA_HOME": work}

        def tricomm(*words: str, codes: tuple[int, ...] = (0,)) -> None:
            command = [sys.executable, "-m", "tricomm", *words]
            code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
            if code not in codes:
                raise SystemExit(f"{' '.join(command)} ended with {code}")

        tricomm(*_BENCH.split())
        tricomm("dashboard", "--html", f"{work}/dashboard.html")
        tricomm("check", "examples/racy_kernel.py:ring", "--timeline", f"{work}/race.html", codes=(1,))
        for name, (width, height) in _PICTURES.items():
            shot = [
                f"--screenshot={folder / name}.png",
                f"--window-size={width},{height}",
                f"file://{work}/{name}.html",
            ]
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            subprocess.run([browser, *options, *shot], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
