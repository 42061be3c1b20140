"""Draws a finding: time runs to the right, with a lane per block and a mark per access. The finding's accesses are red.

The output is one self-contained file, .html or .svg, without scripts, fonts or anything from a network.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument
from tricomm.explorer.report.findings import Finding
from tricomm.explorer.report.report import Report

WINDOW = 150  # events to draw, about
LEGEND = (
    "Circle: load. Square: store. Diamond: flag (filled: release, outline: acquire, dashed: relaxed). "
    "Grey line: a release and the acquire that read it. Red: what the finding is about. Point at a mark for its line."
)
_LEFT, _TOP, _STEP, _ROW, _GAP = 130, 62, 14, 26, 12
_TICK = 10  # columns between two numbers of the axis
_CUT = 2  # columns left blank where events are not drawn

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #888; --lane: #f3f3f3; --load: #2f6fb0; --store: #b0562f;
  --flag: #6b3fa0; --bad: #d0021b; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --soft: #888; --lane: #262626; --load: #7ab3ec;
  --store: #e8a17f; --flag: #c09aeb; --bad: #ff5a5f; --page: #161616; } }
svg { background: var(--page); font: 11px system-ui, sans-serif; }
.lane { fill: var(--lane); } .name, .tick { fill: var(--ink); } .tick { font-size: 9px; text-anchor: middle; }
.load { fill: none; stroke: var(--load); stroke-width: 1.5; } .store { fill: var(--store); }
.release { fill: var(--flag); } .acquire { fill: none; stroke: var(--flag); stroke-width: 1.8; }
.relaxed { fill: none; stroke: var(--flag); stroke-width: 1.2; stroke-dasharray: 2 2; }
.order { stroke: var(--soft); stroke-width: 1; fill: none; } .pair { stroke: var(--bad); stroke-width: 2; fill: none; }
.grid { stroke: var(--soft); stroke-width: .5; } .cut { fill: var(--page); stroke: none; }
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
<p>{legend}</p>
</body></html>
"""


def check_path(path: str | Path) -> str:
    """The suffix of a path, which is the format. Raises `InvalidArgument` for an unknown one."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".html", ".htm", ".svg"):
        raise InvalidArgument(f"{path}: a timeline is written as .html or as .svg")
    return suffix


def write(report: Report, path: str | Path, number: int = 0) -> None:
    """Write finding `number` of `report` to `path`. The suffix, .html or .svg, is the format."""
    suffix = check_path(path)
    text = render(report, number) if suffix != ".svg" else svg(_finding(report, number), alone=True)
    Path(path).write_text(text, encoding="utf-8")


def render(report: Report, number: int = 0) -> str:
    """A page about finding `number`, counted from 0. Raises `InvalidArgument` if there is nothing to draw."""
    finding = _finding(report, number)
    title = f"{finding.kind}, simulated: {report.subject.get('kernel') or report.subject.get('function')}"
    choices = ", ".join(f"{step}: {task}" for step, task in finding.execution.choices) or "none needed"
    facts = {
        "What": finding.text,
        "What would help": finding.advice,
        **({"On hardware": finding.effect} if finding.effect else {}),
        "Where": " and ".join(place.removeprefix(f"{Path.cwd()}/") for place in finding.where) or "?",
        "Schedule": f"number {finding.schedule}, seed {finding.seed}, {report.world_size} ranks",
        "Choices (step: task)": choices,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return _PAGE.format(title=escape(title), style=STYLE, facts=items, svg=svg(finding), legend=LEGEND)


def _finding(report: Report, number: int) -> Finding:
    if not 0 <= number < len(report.findings):
        raise InvalidArgument(f"finding {number}: the report has {len(report.findings)}")
    if not report.findings[number].events:
        raise InvalidArgument(f"finding {number} has no events to draw: only the first of a report keeps them")
    return report.findings[number]


def svg(finding: Finding, alone: bool = False) -> str:
    """The picture. `alone`: with its style and legend inside, for a separate file."""
    events = finding.events
    marked = _marked(finding)
    shown = _shown(len(events), marked)
    lanes = {lane: row for row, lane in enumerate(sorted({(events[n]["rank"], events[n]["block"]) for n in shown}))}
    x, cuts = _columns(shown)
    y = {lane: _TOP + _ROW * row + _GAP * lane[0] for lane, row in lanes.items()}
    width = max([*x.values(), 620 - _LEFT]) + _STEP + 20
    bottom = max(y.values(), default=_TOP) + _ROW
    label = escape(f"{finding.kind}: accesses of all ranks over time, simulated", quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + (40 if alone else 10)}" '
        f'role="img" aria-label="{label}">',
        *([f"<style>{STYLE}</style>"] if alone else []),
        _note(shown, events),
        *_lanes(y, width),
        *_axis(shown, events, x, bottom),
        *(f'<rect class="cut" x="{at}" y="{_TOP - 20}" width="{_STEP}" height="{bottom}"/>' for at in cuts),
        *_orders([(n, events[n]) for n in shown], x, y),
        *(_mark(events[n], x[n], y[events[n]["rank"], events[n]["block"]]) for n in shown),
        *_pair([(x[n], y[events[n]["rank"], events[n]["block"]]) for n in marked]),
        *(_legend(bottom) if alone else []),
        "</svg>",
    ]
    return "\n".join(parts)


def _marked(finding: Finding) -> list[int]:
    """The events of the finding: the last ones that match its accesses."""
    lines = []
    for access in finding.accesses:
        same = ("rank", "block", "where", *(("step", "kind") if "step" in access else ()))
        at = [n for n, e in enumerate(finding.events) if all(e[name] == access.get(name) for name in same)]
        lines += at[-1:]
    return lines


def _shown(count: int, marked: list[int]) -> list[int]:
    """The events to draw: one window around all marked events, or one around each if they are far apart."""
    low, high = (min(marked), max(marked)) if marked else (count - 1, count - 1)
    margin = WINDOW // 4
    if high - low + 1 + 2 * margin <= WINDOW:
        last = min(count, max(high + 1 + margin, WINDOW))
        return list(range(max(0, min(low - margin, last - WINDOW)), last))
    reach = max(1, WINDOW // (2 * len(marked)))
    return sorted({n for at in marked for n in range(max(0, at - reach), min(count, at + reach))})


def _columns(shown: list[int]) -> tuple[dict[int, int], list[int]]:
    """The position of each event along the axis, and the positions at which events are left out."""
    x: dict[int, int] = {}
    cuts = []
    at = _LEFT
    for before, n in zip([None, *shown[:-1]], shown, strict=True):
        if before is not None and n != before + 1:
            cuts.append(at)
            at += _CUT * _STEP
        x[n] = at
        at += _STEP
    return x, cuts


def _note(shown: list[int], events: tuple[dict[str, Any], ...]) -> str:
    steps = f"steps {events[shown[0]]['step']} to {events[shown[-1]]['step']}" if shown else "no steps"
    before, after = (shown[0], len(events) - 1 - shown[-1]) if shown else (0, 0)
    between = len(events) - len(shown) - before - after
    missing = [f"{n} {where}" for n, where in ((before, "before"), (between, "between"), (after, "after")) if n]
    left = f"; accesses not drawn: {', '.join(missing)}" if missing else ""
    return f'<text class="name" x="8" y="18">simulated, {steps}{left}</text>'


def _axis(shown: list[int], events: tuple[dict[str, Any], ...], x: dict[int, int], bottom: int) -> Iterable[str]:
    yield f'<text class="name" x="8" y="{_TOP - 12}">step</text>'
    for n in shown:
        if n % _TICK == 0 or n == shown[0]:
            yield f'<text class="tick" x="{x[n]}" y="{_TOP - 12}">{events[n]["step"]}</text>'
            yield f'<line class="grid" x1="{x[n]}" y1="{_TOP - 8}" x2="{x[n]}" y2="{bottom}"/>'


def _lanes(y: dict[tuple[int, int], int], width: int) -> Iterable[str]:
    for (rank, block), top in y.items():
        name = f"rank {rank}, " + ("host" if block < 0 else f"block {block}")
        yield f'<rect class="lane" x="0" y="{top}" width="{width}" height="{_ROW - 4}"/>'
        yield f'<text class="name" x="8" y="{top + 15}">{name}</text>'


def _orders(
    events: list[tuple[int, dict[str, Any]]], x: dict[int, int], y: dict[tuple[int, int], int]
) -> Iterable[str]:
    """Lines from the last release store to a location to each acquire load of it by another block."""
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
    for number, (x, top) in enumerate(places):
        name = chr(ord("A") + number) if number < 26 else str(number + 1)
        yield f'<circle class="ring" cx="{x}" cy="{top + 11}" r="10"/>'
        yield f'<text class="tag" x="{x - 4}" y="{top - 2}">{name}</text>'
    if len(places) == 2:
        (x1, y1), (x2, y2) = places
        yield f'<line class="pair" x1="{x1}" y1="{y1 + 11}" x2="{x2}" y2="{y2 + 11}"/>'


def _legend(bottom: int) -> Iterable[str]:
    first, second = LEGEND[: LEGEND.index("Grey")], LEGEND[LEGEND.index("Grey") :]
    yield f'<text class="name" x="8" y="{bottom + 16}">{first}</text>'
    yield f'<text class="name" x="8" y="{bottom + 31}">{second}</text>'
