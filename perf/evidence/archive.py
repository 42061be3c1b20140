"""The files that a run leaves: a summary on one page of Markdown, and an archive with everything."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tricomm.perf.evidence import checks, journal, stage_process
from tricomm.perf.evidence.stage import Stage

NAME, SUMMARY = "evidence.zip", "summary.md"

_FRAME = (
    "One GPU stands for several here: ranks share its memory, so what is measured is the kernels' use of memory and "
    "the path of a launch, and not NVLink. Ratios hold between rows of one harness in one run only: streams with "
    "streams, processes with processes, which take turns on a device."
)


def write(folder: Path, stages: Sequence[Stage], results: Sequence[dict[str, Any]]) -> Path:
    """The summary, and an archive of it, of a result per stage, of the journal, and of the processes' output."""
    (folder / SUMMARY).write_text("\n".join(_lines(stages, results)) + "\n", encoding="utf-8")
    path, partial = folder / NAME, folder / f"{NAME}.part"
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for result in results:
            archive.writestr(f"{result['stage']}.json", json.dumps(result, indent=1) + "\n")
        for name in (SUMMARY, journal.NAME, stage_process.LOG):
            if (folder / name).exists():
                archive.write(folder / name, name)
    partial.replace(path)
    return path


def _lines(stages: Sequence[Stage], results: Sequence[dict[str, Any]]) -> list[str]:
    simulated = any(r["simulated"] for r in results)
    lines = [
        "# GPU evidence" + (" (dry run: simulated, no GPU was used, no number means anything)" if simulated else "")
    ]
    lines += ["", *_where(results), "", _FRAME, "", "| stage | result | cases | not run | seconds | file | |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for result in results:
        good = sum(case["status"] == "ok" for case in result["cases"])
        name, cases, seconds = result["stage"], f"{good} of {len(result['cases'])}", f"{result['seconds']:.0f}"
        file, reason = f"{name}.json", _cell(result["reason"])
        row = (f"[{result['title']}](#{name})", result["status"], cases, len(result["left"]), seconds, file, reason)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "## Not run", "", *_left(results)]
    for stage, result in zip(stages, results, strict=True):
        lines += ["", f"## {stage.name}", "", *_cases(result, stage.columns)]
    return lines


def _left(results: Sequence[dict[str, Any]]) -> list[str]:
    """The kernels that no case covers, and the cases that did not run, by stage and reason."""
    lines = [f"* {line}" for line in checks.left_out()]
    for result in results:
        reasons: dict[str, list[str]] = {}
        for left in result["left"]:
            reasons.setdefault(left["reason"], []).append(left["key"])
        for reason, keys in reasons.items():
            lines.append(f"* {result['stage']}, {len(keys)} ({' '.join(reason.split())}): {'; '.join(keys)}")
    return lines or ["Nothing: every case had its turn."]


def _where(results: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for result in results:
        it = result["environment"]
        devices = it["device"]
        names = devices if isinstance(devices, str) else f"{len(devices)} x {devices[0]['name']}"
        versions = it["versions"]
        line = (
            f"{it['date']}, {names}, commit {it.get('commit', '?')}, sources {str(it.get('sources'))[:12]}, "
            f"torch {versions.get('torch')}, "
            f"Triton {versions.get('triton')}, Python {versions.get('python')}, NCCL {it.get('nccl', '?')}"
        )
        if line not in lines:
            lines.append(line)
    return lines


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
