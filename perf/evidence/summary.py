"""All stages' results on one page of Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tricomm.perf.evidence.schema import read
from tricomm.perf.evidence.stages import STAGES

_FRAME = (
    "One GPU stands for several here: ranks share its memory, so what is measured is the kernels' use of memory and "
    "the path of a launch, and not NVLink. Ratios hold between rows of one harness in one run only: streams with "
    "streams, processes with processes, which take turns on a device."
)


def write(folder: Path) -> Path:
    """summary.md of the results in `folder`; a stage without one is listed as not run."""
    results = {s.name: read(folder / f"{s.name}.json") for s in STAGES if (folder / f"{s.name}.json").exists()}
    path = folder / "summary.md"
    path.write_text("\n".join(_lines(results)) + "\n", encoding="utf-8")
    return path


def _lines(results: dict[str, dict[str, Any]]) -> list[str]:
    simulated = any(r["simulated"] for r in results.values())
    lines = [
        "# GPU evidence" + (" (dry run: simulated, no GPU was used, no number means anything)" if simulated else "")
    ]
    lines += ["", *_where(results), "", _FRAME, "", "| stage | result | cases | seconds | |", "|---|---|---|---|---|"]
    for stage in STAGES:
        found = results.get(stage.name)
        if found is None:
            lines.append(f"| [{stage.title}](#{stage.name}) | not run | | | |")
            continue
        good = sum(case["status"] == "ok" for case in found["cases"])
        row = (f"[{stage.title}](#{stage.name})", found["status"], f"{good} of {len(found['cases'])}",
               f"{found['seconds']:.0f}", _cell(found["reason"]))  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    for stage in STAGES:
        if stage.name in results:
            lines += ["", f"## {stage.name}", "", *_cases(results[stage.name], stage.columns)]
    return lines


def _where(results: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for result in results.values():
        it = result["environment"]
        devices = it["device"]
        names = devices if isinstance(devices, str) else f"{len(devices)} x {devices[0]['name']}"
        versions = it["versions"]
        line = (
            f"{it['date']}, {names}, commit {it.get('commit', '?')}, torch {versions.get('torch')}, "
            f"Triton {versions.get('triton')}, Python {versions.get('python')}, NCCL {it.get('nccl', '?')}"
        )
        if line not in found:
            found.append(line)
    return found


def _cases(result: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    if not result["cases"]:
        return [result["reason"] or "no cases"]
    shown = [c for c in columns if any(c in case["data"] for case in result["cases"])]
    lines = ["| case | result | " + " | ".join(shown) + " |", "|---|---|" + "---|" * len(shown)]
    for case in result["cases"]:
        state = case["status"] + (f": {case['reason']}" if case["reason"] else "")
        cells = [_cell(case["key"]), _cell(state), *(_cell(case["data"].get(c, "")) for c in shown)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())[:160]
