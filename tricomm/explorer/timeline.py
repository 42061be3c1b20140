"""A finding as a picture: ranks as lanes, accesses and flags as marks, the two that are at odds in red.

One self-contained file, .html or .svg: no script, no font, nothing from a network.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.explorer.findings import Finding
from tricomm.explorer.report import Report

WINDOW = 150  # events shown around the two
_LEFT, _TOP, _STEP, _ROW, _GAP = 130, 46, 14, 26, 12

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #888; --lane: #f3f3f3; --load: #2f6fb0; --store: #b0562f;
  --flag: #6b3fa0; --bad: #d0021b; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --soft: #888; --lane: #262626; --load: #7ab3ec;
  --store: #e8a17f; --flag: #c09aeb; --bad: #ff5a5f; --page: #161616; } }
svg { background: var(--page); font: 11px system-ui, sans-serif; }
.lane { fill: var(--lane); } .name, .tick { fill: var(--ink); } .tick { font-size: 9px; }
.load { fill: none; stroke: var(--load); stroke-width: 1.5; } .store { fill: var(--store); }
.release { fill: var(--flag); } .acquire { fill: none; stroke: var(--flag); stroke-width: 1.8; }
.relaxed { fill: none; stroke: var(--flag); stroke-width: 1.2; stroke-dasharray: 2 2; }
.order { stroke: var(--soft); stroke-width: 1; fill: none; } .pair { stroke: var(--bad); stroke-width: 2; fill: none; }
.ring { stroke: var(--bad); stroke-width: 2.5; fill: none; } .tag { fill: var(--bad); font-weight: bold; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 1rem; }}
.scroll {{ overflow-x: auto; }} dt {{ font-weight: bold; }} dd {{ margin: 0 0 .6rem 0; overflow-wrap: anywhere; }}
{style}</style></head><body>
<h1>{title}</h1>
<dl>{facts}</dl>
<div class="scroll" tabindex="0">{svg}</div>
<p>Circle: load. Square: store. Diamond: flag (filled: release, outline: acquire, dashed: relaxed). Grey line: a release
and the acquire that read it. Red: what the finding is about. Point at a mark for its line.</p>
</body></html>
"""


def write(report: Report, path: str | Path, number: int = 0) -> None:
    """Write finding `number` of `report` to `path`; the suffix .html or .svg says what it is to be."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".htm", ".svg"):
        raise InvalidArgument(f"{path}: a timeline is written as .html or as .svg")
    text = render(report, number) if suffix != ".svg" else _alone(_svg(_finding(report, number)))
    Path(path).write_text(text, encoding="utf-8")


def render(report: Report, number: int = 0) -> str:
    """A page about finding `number`, counted from 0. Raises `InvalidArgument` where there is nothing to draw."""
    finding = _finding(report, number)
    title = f"{finding.kind}, simulated: {report.subject.get('kernel') or report.subject.get('function')}"
    choices = ", ".join(f"{step}: {task}" for step, task in finding.execution.choices) or "none needed"
    facts = {
        "What": finding.text, "What would help": finding.advice, "Where": " and ".join(finding.where) or "?",
        "Schedule": f"number {finding.schedule}, seed {finding.seed}, {report.world_size} ranks",
        "Choices (step: task)": choices,
    }  # fmt: skip
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return _PAGE.format(title=escape(title), style=_STYLE, facts=items, svg=_svg(finding))


def _finding(report: Report, number: int) -> Finding:
    if not 0 <= number < len(report.findings):
        raise InvalidArgument(f"finding {number}: the report has {len(report.findings)}")
    if not report.findings[number].events:
        raise InvalidArgument(f"finding {number} has no events to draw: only the first of a report keeps them")
    return report.findings[number]


def _alone(svg: str) -> str:
    return svg.replace(">", f"><style>{_STYLE}</style>", 1)


def _svg(finding: Finding) -> str:
    marked = _marked(finding)
    first, last = _window(len(finding.events), marked)
    events = list(enumerate(finding.events))[first:last]
    lanes = {lane: row for row, lane in enumerate(sorted({(e["rank"], e["block"]) for _, e in events}))}
    x = {n: _LEFT + _STEP * at for at, (n, _) in enumerate(events)}
    y = {lane: _TOP + _ROW * row + _GAP * lane[0] for lane, row in lanes.items()}
    width = _LEFT + _STEP * max(1, len(events)) + 20
    height = max(y.values(), default=_TOP) + _ROW + 10
    label = escape(f"{finding.kind}: accesses of all ranks over time, simulated", quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="{label}">',
        _note(first, len(finding.events) - last, events),
        *_lanes(y, width),
        *_orders(events, x, y),
        *(_mark(e, x[n], y[e["rank"], e["block"]]) for n, e in events),
        *_pair([(x[n], y[finding.events[n]["rank"], finding.events[n]["block"]]) for n in marked]),
        "</svg>",
    ]
    return "\n".join(parts)


def _marked(finding: Finding) -> list[int]:
    """The events that the finding is about: the last ones that match its accesses."""
    found = []
    for access in finding.accesses:
        same = ("rank", "block", "where", *(("step", "kind") if "step" in access else ()))
        at = [n for n, e in enumerate(finding.events) if all(e[name] == access[name] for name in same)]
        found += at[-1:]
    return found


def _window(count: int, marked: list[int]) -> tuple[int, int]:
    """The events to draw: what lies between the marked ones and before them, within bounds; else the end."""
    low, high = (min(marked), max(marked)) if marked else (count - 1, count - 1)
    last = min(count, max(high + WINDOW // 4, WINDOW))
    first = max(0, min(low - WINDOW // 4, last - WINDOW))
    return first, last


def _note(before: int, after: int, events: list[tuple[int, dict[str, Any]]]) -> str:
    steps = f"steps {events[0][1]['step']} to {events[-1][1]['step']}" if events else "no steps"
    left = f"; {before} accesses before and {after} after are not drawn" if before or after else ""
    return f'<text class="name" x="8" y="18">simulated, {steps}{left}</text>'


def _lanes(y: dict[tuple[int, int], int], width: int) -> Iterable[str]:
    for (rank, block), top in y.items():
        name = f"rank {rank}, " + ("host" if block < 0 else f"block {block}")
        yield f'<rect class="lane" x="0" y="{top}" width="{width}" height="{_ROW - 4}"/>'
        yield f'<text class="name" x="8" y="{top + 15}">{name}</text>'


def _orders(
    events: list[tuple[int, dict[str, Any]]], x: dict[int, int], y: dict[tuple[int, int], int]
) -> Iterable[str]:
    """From a release to the first acquire of the same place by another block."""
    released: dict[str, tuple[int, tuple[int, int]]] = {}
    for n, e in events:
        lane = (e["rank"], e["block"])
        if e["sem"] in ("acquire", "acq_rel") and e["place"] in released:
            start, other = released[e["place"]]
            if other != lane:
                yield (
                    f'<line class="order" x1="{x[start]}" y1="{y[other] + 11}" x2="{x[n]}" y2="{y[lane] + 11}">'
                    f"<title>{escape(e['place'])}</title></line>"
                )
        if e["sem"] in ("release", "acq_rel") and e["kind"] != "load":
            released[e["place"]] = (n, lane)


def _mark(event: dict[str, Any], x: int, top: int) -> str:
    y = top + 11
    order = f"{event['sem']} .{event['scope']} " if event["sem"] else ""
    who = f"rank {event['rank']}, " + ("host" if event["block"] < 0 else f"block {event['block']}")
    text = f"step {event['step']}: {who}: {order}{event['kind']} of {event['count']} x {event['itemsize']} bytes\n"
    title = f"<title>{escape(text + event['place'] + chr(10) + event['chain'])}</title>"
    if event["sem"] is not None:
        kind = {"release": "release", "acq_rel": "release", "acquire": "acquire"}.get(event["sem"], "relaxed")
        return f'<path class="mark {kind}" d="M{x} {y - 6}L{x + 5} {y}L{x} {y + 6}L{x - 5} {y}Z">{title}</path>'
    if event["kind"] == "load":
        return f'<circle class="mark load" cx="{x}" cy="{y}" r="4">{title}</circle>'
    return f'<rect class="mark store" x="{x - 4}" y="{y - 4}" width="8" height="8">{title}</rect>'


def _pair(places: list[tuple[int, int]]) -> Iterable[str]:
    for name, (x, top) in zip("ABCDEFGHIJKLMNOP", places, strict=False):
        yield f'<circle class="ring" cx="{x}" cy="{top + 11}" r="10"/>'
        yield f'<text class="tag" x="{x - 4}" y="{top - 2}">{name}</text>'
    if len(places) == 2:
        (x1, y1), (x2, y2) = places
        yield f'<line class="pair" x1="{x1}" y1="{y1 + 11}" x2="{x2}" y2="{y2 + 11}"/>'
