"""The timeline of a finding: complete, with the pair marked, escaped, self-contained."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

import tricomm
from tests.explorer import small_kernels as k
from tests.explorer.test_check import two_writers, words
from tricomm.errors import InvalidArgument
from tricomm.explorer.report import timeline
from tricomm.explorer.report.timeline import WINDOW

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def report():
    return tricomm.check(two_writers, 2, schedules=1)


def picture(report, number=0):
    page = timeline.render(report, number)
    return ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def marks(svg):
    return [e for e in svg.iter() if e.get("class", "").startswith("mark ")]


def of_class(svg, name):
    return [e for e in svg.iter() if e.get("class") == name]


def with_events(report, count, first=None, second=None):
    """The same report with a long execution, in which the pair is at `first` and `second`."""
    pair = report.findings[0].accesses
    filler = {**pair[0], "kind": "load", "where": "elsewhere.py:1", "sem": None}
    events = [{**filler, "step": n, "rank": n % 2} for n in range(count)]
    if first is not None:
        events[first], events[second] = dict(pair[0]), dict(pair[1])
    return replace(report, findings=[replace(report.findings[0], events=tuple(events))])


def not_drawn(page):
    said = re.search("accesses not drawn: ([^<]*)<", page)
    return sum(map(int, re.findall(r"\d+", said[1]))) if said else 0


def test_every_event_is_drawn_once_with_its_line(report):
    svg = picture(report)
    events = report.findings[0].events
    titles = [e.find(f"{SVG}title").text for e in marks(svg)]
    assert len(titles) == len(events)
    for event, title in zip(events, titles, strict=True):
        assert title.startswith(f"step {event['step']}: rank {event['rank']}") and event["chain"] in title


def test_the_pair_is_marked_where_it_is(report):
    svg = picture(report)
    at = {(e.get("cx"), e.get("cy")) for e in of_class(svg, "ring")}
    assert len(at) == 2 and [e.text for e in of_class(svg, "tag")] == ["A", "B"]
    (line,) = of_class(svg, "pair")
    assert {(line.get("x1"), line.get("y1")), (line.get("x2"), line.get("y2"))} == at
    stores = {(str(int(e.get("x")) + 4), str(int(e.get("y")) + 4)) for e in marks(svg) if "store" in e.get("class")}
    assert at <= stores


@pytest.mark.parametrize("special", [0, 1500, 2998])
def test_a_long_execution_is_cut_around_the_pair(report, special):
    long = with_events(report, 3000, special, special + 1)
    page, svg = timeline.render(long), picture(long)
    assert len(page) < 200_000
    assert len(of_class(svg, "ring")) == 2 and 60 <= len(marks(svg)) <= WINDOW
    assert not_drawn(page) + len(marks(svg)) == 3000


def test_the_events_between_a_distant_pair_are_cut(report):
    long = with_events(report, 3000, 200, 2600)
    page, svg = timeline.render(long), picture(long)
    assert len(of_class(svg, "ring")) == 2 and len(of_class(svg, "cut")) == 1 and len(marks(svg)) <= WINDOW
    assert not_drawn(page) + len(marks(svg)) == 3000 and " between" in page
    places = [int(e.get("x")) for e in of_class(svg, "tick")]
    assert places == sorted(set(places))


def test_every_waiter_of_a_deadlock_has_a_name(report):
    access = {"rank": 0, "where": "here.py:1"}
    events = [{**report.findings[0].events[0], **access, "block": n} for n in range(40)]
    finding = replace(
        report.findings[0], accesses=tuple({**access, "block": n} for n in range(40)), events=tuple(events)
    )
    names = [e.text for e in of_class(picture(replace(report, findings=[finding])), "tag")]
    assert len(set(names)) == 40 and names[:2] == ["A", "B"] and names[-1] == "40"


def test_texts_of_a_report_are_escaped(report):
    finding = replace(report.findings[0], text="<script>alert(1)</script>", advice='"><img src=x>')
    events = tuple({**e, "place": "<b>&", "chain": '"<i>'} for e in finding.events)
    page = timeline.render(replace(report, findings=[replace(finding, events=events)]))
    assert "<script" not in page and "<img" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page


def test_the_timeline_loads_nothing_and_is_labelled_simulated(report):
    page = timeline.render(report)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "simulated" in re.search("<title>(.*?)</title>", page)[1] and "prefers-color-scheme: dark" in page


def test_flags_and_the_order_that_they_give():
    def fn(comm):
        memory, out = words(comm), torch.zeros(8, dtype=torch.int64)
        comm.launch(k.lane_release, 1, memory.peers, out, comm.rank, BEFORE=False, AFTER=True)

    svg = picture(tricomm.check(fn, 2, schedules=3))
    assert of_class(svg, "mark release") and of_class(svg, "mark acquire") and of_class(svg, "order")


def test_reports_that_cannot_be_drawn(report):
    with pytest.raises(InvalidArgument, match="the report has 1"):
        timeline.render(report, 1)
    with pytest.raises(InvalidArgument, match="no events to draw"):
        timeline.render(replace(report, findings=[replace(report.findings[0], events=())]))
