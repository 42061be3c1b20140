"""The parts of a run that need torch: the facts about this machine, the benchmark, and a plugin for pytest.

    python -m devtools.gpu_evidence.children facts
    python -m devtools.gpu_evidence.children bench JSON
    python -m pytest -p devtools.gpu_evidence.children

The driver sets GPU_EVIDENCE to JSON with its folder, the step's name, and the end of its time on the monotonic clock.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from devtools.gpu_evidence.report import Journal, Record, append

_SOURCES = (".py", ".json")
_START = 2.0  # seconds to expect of the first test
_REASON = 2000  # characters


def facts() -> Record:
    """Facts about this machine, as JSON. A run continues an earlier one only if all but date and commit are the
    same."""
    import torch

    import tricomm
    from tricomm.core.fused.fused_call import FUSED
    from tricomm.kernels.collectives import registry
    from tricomm.kernels.left_out import left_out_lines
    from tricomm.kernels.wide_words import FIRST_ARCHITECTURE
    from tricomm.perf import provenance

    known = (*registry.KERNELS, *registry.of(FUSED, registry.CUBE_RANKS))
    reasons = ((kernel.name, kernel.why_not_compiled(FIRST_ARCHITECTURE)) for kernel in known)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": provenance.commit() or f"not a checkout; tricomm {tricomm.__version__}",
        "sources": sources(Path(tricomm.__file__).resolve().parent),
        "device": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "driver": provenance.guarded(_driver_version),
        "processor": provenance.guarded(provenance.processor),
        "versions": {**provenance.versions(), **provenance.installed(), "NCCL": provenance.guarded(_nccl)},
        "left_out": left_out_lines((name, reason) for name, reason in reasons if reason is not None),
    }


def sources(package: Path) -> str:
    """SHA-256 of the code and the tables of a package and of the rooms that it links to, as the disk has them."""
    digest = hashlib.sha256()
    names = [Path(at) / name for at, _, names in os.walk(package, followlinks=True) for name in names]
    for path in sorted(path for path in names if path.suffix in _SOURCES):
        digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def bench(asked: Record, folder: Path, step: str) -> int:
    """Measure with the benchmark's ranks. Each row is appended to the journal when it is complete, and all rows are
    written to STEP.json, as by `tricomm bench --json`. The exit code is 1 if a result is wrong."""
    from tricomm.perf import parsing
    from tricomm.perf.bench import request, session
    from tricomm.perf.bench_row import to_json
    from tricomm.perf.units import DATA_COLLECTIVES
    from tricomm.perf.workers import RankFailed

    write = partial(append, Journal(folder).path)
    ranks, against = asked["ranks"], tuple(asked["against"].split(","))
    names = DATA_COLLECTIVES if asked["collectives"] == "all" else (asked["collectives"],)
    cases = request.cases(names, None, None, ranks, ("bfloat16",), against, (8192, "", 0))
    modes = tuple(asked["modes"].split(","))
    os.environ["TRICOMM_DEPENDENT_LAUNCH"] = str(int(asked.get("dependent", True)))
    settings = request.Settings(cases, parsing.parse_sizes(asked["sizes"]), modes=modes)
    write("bench", step=step)
    results = session.Results()
    listener = session.Listener(
        header=lambda header: None,
        row=lambda rows: write("row", step=step, row=to_json(rows)),
        note=lambda text: write("note", step=step, text=f"{step}: {text}"),
    )
    try:
        session.run(settings, ranks, listener, results)
    except RankFailed as error:
        print(f"{len(results.rows)} rows, then {error}")
        return 1
    finally:
        name = step.replace(" ", "-").replace(",", "")
        (folder / f"{name}.json").write_text(json.dumps(results.to_json(settings), indent=1) + "\n")
    print(f"{len(results.rows)} rows, {results.wrong} wrong elements")
    return 1 if results.wrong or not results.rows else 0


@dataclass
class Progress:
    """A plugin for pytest: leaves out the tests that have ended, records each test that ends, and stops in time.

    A test is expected to take the mean time of the tests of this process so far.
    """

    journal: Journal
    step: str
    end: float
    write: Callable[..., None]
    seconds: list[float] = field(default_factory=list)
    record: Record = field(default_factory=dict)

    @pytest.hookimpl(trylast=True)  # after -k and -m
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        self.write("selected", step=self.step, tests=[item.nodeid for item in items])
        ended = [item for item in items if self.journal.ended(item.nodeid)]
        config.hook.pytest_deselected(items=ended)
        items[:] = [item for item in items if item not in ended]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.record = {"test": nodeid, "outcome": "passed", "reason": "", "seconds": 0.0, "data": {}}
        self.write("begin", step=self.step, test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        record = self.record
        record["seconds"] = round(record["seconds"] + report.duration, 3)
        record["data"] = dict(report.user_properties)
        if report.outcome != "passed" and record["outcome"] != "failed":
            skip = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
            crash = getattr(report.longrepr, "reprcrash", None)
            words = report.longrepr[2] if skip else crash.message if crash is not None else report.longreprtext
            record |= {"outcome": report.outcome, "reason": words[:_REASON]}

    def pytest_runtest_logfinish(self) -> None:
        self.write("test", step=self.step, run=self.journal.run, **self.record)
        self.seconds.append(self.record["seconds"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Stop before a test that would not end in time. `True` tells pytest not to run it."""
        if time.monotonic() + (mean(self.seconds) if self.seconds else _START) <= self.end:
            return None
        self.write("stopped", step=self.step)
        item.session.shouldstop = "the time that is left is too short for the next test"
        return True


def pytest_configure(config: Any) -> None:
    """Register the plugin with the driver's facts."""
    told = _told()
    journal = Journal(Path(told["folder"]))
    config.pluginmanager.register(Progress(journal, told["step"], told["end"], partial(append, journal.path)))


def _told() -> Record:
    told: Record = json.loads(os.environ["GPU_EVIDENCE"])
    return told


def main(what: str, *more: str) -> int:
    if what == "facts":
        print(json.dumps(facts()))
        return 0
    told = _told()
    return bench(json.loads(more[0]), Path(told["folder"]), told["step"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
