"""A finding as a picture: ranks as lanes, accesses and flags as marks, the two conflicting ones in red.

One self-contained file, .html or .svg: no script, no font, nothing from a network.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from tricomm.errors import InvalidArgument
from tricomm.explorer.report import picture
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.report.report import Report

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 1rem; }}
.scroll {{ overflow-x: auto; }} dt {{ font-weight: bold; }} dd {{ margin: 0 0 .6rem 0; overflow-wrap: anywhere; }}
{style}</style></head><body>
<h1>{title}</h1>
<dl>{facts}</dl>
<div class="scroll" tabindex="0">{svg}</div>
<p>{legend}</p>
</body></html>
"""


def check_path(path: str | Path) -> str:
    """The suffix, which is the format; raises `InvalidArgument` for an unknown one."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".htm", ".svg"):
        raise InvalidArgument(f"{path}: a timeline is written as .html or as .svg")
    return suffix


def write(report: Report, path: str | Path, number: int = 0) -> None:
    """Write finding `number` of `report` to `path`; the suffix .html or .svg is the format."""
    suffix = check_path(path)
    text = render(report, number) if suffix != ".svg" else picture.svg(_finding(report, number), alone=True)
    Path(path).write_text(text, encoding="utf-8")


def render(report: Report, number: int = 0) -> str:
    """A page about finding `number`, counted from 0. Raises `InvalidArgument` if there is nothing to draw."""
    finding = _finding(report, number)
    title = f"{finding.kind}, simulated: {report.subject.get('kernel') or report.subject.get('function')}"
    choices = ", ".join(f"{step}: {task}" for step, task in finding.execution.choices) or "none needed"
    facts = {
        "What": finding.text,
        "What would help": finding.advice,
        "Where": " and ".join(place.removeprefix(f"{Path.cwd()}/") for place in finding.where) or "?",
        "Schedule": f"number {finding.schedule}, seed {finding.seed}, {report.world_size} ranks",
        "Choices (step: task)": choices,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return _PAGE.format(
        title=escape(title), style=picture.STYLE, facts=items, svg=picture.svg(finding), legend=picture.LEGEND
    )


def _finding(report: Report, number: int) -> Finding:
    if not 0 <= number < len(report.findings):
        raise InvalidArgument(f"finding {number}: the report has {len(report.findings)}")
    if not report.findings[number].events:
        raise InvalidArgument(f"finding {number} has no events to draw: only the first of a report keeps them")
    return report.findings[number]
