"""The page "one call": each call of a group on all its ranks, from their dumps. HTML without a script."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from tricomm.perf.dashboard.dumps import GroupCalls, RecordedCall, of

_SHOWN, _PROBLEMS, _LONGEST = 2000, 20, 5  # calls of a group
_ABOUT = (
    "A rank arrives when its program makes the call. Times count from the first arrival, by the ranks' Unix clocks "
    "(CLOCK_REALTIME; ranks of one host share it). On a GPU, starts and ends before a dump have the time of the dump."
)
_COLUMNS = ("rank", "call", "arrived", "waited for the last", "started", "ended", "arrival to end")


def html(groups: list[GroupCalls], notes: list[str]) -> str:
    """The page; groups with problems are first."""
    sections = sorted((_section(group) for group in groups if group.calls), key=lambda section: -section[0])
    style = files("tricomm").joinpath("perf/dashboard/page/page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>tricomm: one call</title><style>{style}</style></head>
<body data-ready><header><h1>One call</h1>{"".join(f"<p>{escape(line)}</p>" for line in (_ABOUT, *notes))}</header>
<main>{"".join(text for _, text in sections) or "<p>The dumps have no calls.</p>"}</main></body></html>
"""


def _section(group: GroupCalls) -> tuple[int, str]:
    """The number of the group's problems, and its part of the page."""
    numbers = sorted(group.calls)[-_SHOWN:]
    problems = {number: problem for number in numbers if (problem := group.problem(number))}
    waits = {number: group.arrivals(number)[-1][0] - group.arrivals(number)[0][0] for number in numbers}
    silent = [rank for rank in group.ranks if rank not in group.dumped]
    facts = f"{len(numbers)} of {len(group.calls)} calls, {len(problems)} with a problem"
    facts += f"; nothing recorded by {of(silent)}" if silent else ""
    longest = sorted(numbers, key=lambda number: -waits[number])[:_LONGEST]
    parts = {"Problems": list(problems)[:_PROBLEMS], "Longest waits": longest, "All calls": numbers}
    text = f"<h2>{escape(group.name)}, {of(group.ranks)}</h2><p>{facts}.</p>"
    for title, chosen in parts.items():
        if chosen:
            text += f"<h3>{title}</h3>" + "".join(_call(group, number, problems.get(number, "")) for number in chosen)
    return len(problems), f"<section>{text}</section>"


def _call(group: GroupCalls, number: int, problem: str) -> str:
    calls, arrivals = group.calls[number], group.arrivals(number)
    (first, _), (last, latest) = arrivals[0], arrivals[-1]
    end = max(last, *(call.time_discovered_completed_ns or 0 for call in calls.values()))
    rows = "".join(_row(rank, calls.get(rank), (first, last, end)) for rank in sorted({*calls, *group.dumped}))
    head = "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    marked = f' <strong class="slower">{escape(problem)}</strong>;' if problem else ""
    waited = f"waited {_time(last - first)} for rank {latest}" if len(calls) > 1 else f"made by rank {latest} alone"
    return f"""<details><summary>{number} {escape(calls[latest].text)}:{marked} {waited}</summary>
<div class="wide" tabindex="0" role="group" aria-label="call {number}"><table>
<caption>first arrival: {first / 1e9:.6f} s</caption>
<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>
"""


def _row(rank: int, call: RecordedCall | None, moments: tuple[int, int, int]) -> str:
    if call is None:
        return f'<tr><th scope="row">{rank}</th><td colspan="{len(_COLUMNS) - 1}">no record of this call</td></tr>'
    first, last, end = moments
    arrived, ended = call.time_created_ns, call.time_discovered_completed_ns
    times = [_time(t - first) if t else "not yet" for t in (arrived, call.time_discovered_started_ns, ended)]
    times.insert(1, _time(last - arrived) if last > arrived else "the last")
    scale = 100 / max(1, end - first)
    place = f"margin-left:{(arrived - first) * scale:.1f}%;width:{max(0, (ended or end) - arrived) * scale:.1f}%"
    cells = "".join(f'<td class="number">{time}</td>' for time in times)
    bar = f'<td class="span"><div class="bar{"" if ended else " open"}" style="{place}"></div></td>'
    return f'<tr><th scope="row">{rank}</th><td>{escape(call.text)}</td>{cells}{bar}</tr>\n'


def _time(ns: int) -> str:
    return (
        f"{ns / 1e3:.1f} us" if abs(ns) < 10**7 else f"{ns / 1e6:.1f} ms" if abs(ns) < 10**10 else f"{ns / 1e9:.1f} s"
    )
