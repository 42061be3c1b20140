"""A choice, statistics and a report as text and in a notebook."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest
import torch

import tricomm


def made() -> tuple[tricomm.Choice, tricomm.Statistics]:
    def body(comm: tricomm.Communicator) -> tuple[tricomm.Choice, tricomm.Statistics]:
        comm.all_reduce(torch.ones(100))
        comm.all_reduce(torch.ones(100))
        comm.all_gather(torch.ones(3))
        return comm.explain("all_reduce", 400), comm.stats()

    return tricomm.simulate(body, 2)[0]


def failed() -> None:
    raise ValueError("<script> & more")


def test_a_choice_names_the_kernel_its_shape_and_the_reason() -> None:
    choice, _ = made()
    shape = "1 block of 8 warps, tiles of 512 bytes"
    assert str(choice) == f"all_reduce by one_shot/ll, {shape}: {choice.reason}"
    assert "table 'cpu' row 0" in choice.reason
    assert "2 blocks of" in str(replace(choice, blocks=2))
    nccl = replace(choice, route="nccl", algorithm="nccl", protocol="nccl", reason="9 bytes are over the limit of 8")
    assert str(nccl) == "all_reduce by nccl: 9 bytes are over the limit of 8"


def test_statistics_have_a_line_a_kernel_and_size_and_the_waits() -> None:
    _, stats = made()
    stats = replace(stats, waited={1: 0.0, 2: 1.239})
    first, *lines = str(stats).splitlines()
    assert first.startswith(f"group {stats.group}, rank 0 of 2 on cpu, simulated: ") and first.endswith(" bytes held")
    assert lines == [
        "        2 x all_reduce one_shot/ll up to 512 bytes: 800 bytes",
        "        1 x all_gather one_shot/ll up to 16 bytes: 12 bytes",
        "waited 1.24 s for rank 2",
    ]


def test_long_statistics_show_the_most_bytes_and_times_if_there_are_any() -> None:
    _, stats = made()
    [call] = [each for each in stats.calls if each.collective == "all_reduce"]
    many = tuple(replace(call, nbytes=n, p50_us=2.0, p99_us=float(n)) for n in range(25))
    lines = str(replace(stats, calls=many)).splitlines()
    assert len(lines) == 22 and lines[1].endswith(": 24 bytes, p50 2.0 us, p99 24.0 us")
    assert lines[-1] == "          and 5 more kernels and sizes, in `calls`"


@pytest.mark.parametrize("what", ["choice", "statistics", "report"])
def test_a_notebook_shows_the_text_escaped_and_in_its_own_colours(what: str) -> None:
    choice, stats = made()
    report = tricomm.check(lambda comm: failed(), 1, schedules=1)
    result = {"choice": replace(choice, reason="<b> & 'c'"), "statistics": stats, "report": report}[what]
    shown = result._repr_html_()
    inside = shown.removeprefix('<pre style="white-space: pre-wrap">').removesuffix("</pre>")
    assert html.unescape(inside) == str(result) and "<" not in inside
    assert what != "report" or "&lt;script&gt; &amp; more" in inside
