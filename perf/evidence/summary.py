"""All stages' results on one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tricomm.perf.evidence.stage import Stage

NAME = "summary.md"

_FRAME = (
    "One GPU stands for several here: ranks share its memory, so what is measured is the kernels' use of memory and "
    "the path of a launch, and not NVLink. Ratios hold between rows of one harness in one run only: streams with "
    "streams, processes with processes, which take turns on a device."
)


def write(folder: Path, stages: Sequence[Stage], results: Sequence[dict[str, Any]]) -> Path:
    """summary.md of a result per stage."""
    path = folder / NAME
    path.write_text("\n".join(_lines(stages, results)) + "\n", encoding="utf-8")
    return path


def _lines(stages: Sequence[Stage], results: Sequence[dict[str, Any]]) -> list[str]:
    simulated = any(r["simulated"] for r in results)
    lines = [
        "# GPU evidence" + (" (dry run: simulated, no GPU was used, no number means anything)" if simulated else "")
    ]
    lines += ["", *_where(results), "", _FRAME, "", "| stage | result | cases | not run | seconds | file | |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for found in results:
        good = sum(case["status"] == "ok" for case in found["cases"])
        name, cases = found["stage"], f"{good} of {len(found['cases'])}"
        row = (f"[{found['title']}](#{name})", found["status"], cases, len(found["left"]), f"{found['seconds']:.0f}",
               f"{name}.json", _cell(found["reason"]))  # fmt: skip
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "## Not run", "", *_left(results)]
    for stage, found in zip(stages, results, strict=True):
        lines += ["", f"## {stage.name}", "", *_cases(found, stage.columns)]
    return lines


def _left(results: Sequence[dict[str, Any]]) -> list[str]:
    """Every case that was not run, by stage and reason."""
    lines = []
    for result in results:
        reasons: dict[str, list[str]] = {}
        for left in result["left"]:
            reasons.setdefault(left["reason"], []).append(left["key"])
        for reason, keys in reasons.items():
            lines.append(f"* {result['stage']}, {len(keys)} ({' '.join(reason.split())}): {'; '.join(keys)}")
    return lines or ["Nothing: every case had its turn."]


def _where(results: Sequence[dict[str, Any]]) -> list[str]:
    found: list[str] = []
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
