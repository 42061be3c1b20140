"""Rates of live jobs, waits between ranks, and the straggler, from statistics as jobs publish them."""

from dataclasses import replace

from tests.perf.dashboard import dashboard_data
from tricomm.metrics.publish import JobStatistics
from tricomm.perf.dashboard.live import Live


def _waited(jobs: list[JobStatistics], seconds: float) -> list[JobStatistics]:
    """`jobs` in which every rank has waited the same time for every other."""
    late = {peer: seconds for peer in range(8)}
    return [
        replace(job, communicators=(replace(comm, waited={p: s for p, s in late.items() if p != comm.rank}),))
        for job in jobs
        for comm in job.communicators
    ]


def test_rates_are_between_two_snapshots_of_live_jobs() -> None:
    live = Live()
    assert [rates["points"] for rates in live.add(dashboard_data.jobs(1))["rates"]] == [[]] * 8
    live.add(dashboard_data.jobs(1)[::-1])  # the page is made again, and the job has not written
    first, *_ = live.add(dashboard_data.jobs(3)[1::-1])["rates"]
    assert first["name"] == "rank 0, pid 4000 on box"  # in whichever order they have written
    assert first["points"] == [(1.7e9 + 15, 1000.2, 1000.0 * (1 << 21) / 1e9 + 2.048e-7)]
    assert live.add([]) == {"jobs": [], "rates": [], "waits": [], "straggler": "No rank waits long for another."}
    assert live.add(dashboard_data.jobs(4))["rates"][0]["points"] == []


def test_a_clock_or_a_count_that_falls_gives_no_negative_rate() -> None:
    live = Live()
    for writing in (3, 2, 1):
        data = live.add(dashboard_data.jobs(writing))
    assert data["rates"][0]["points"] == []
    fewer = [replace(job, written=job.written + 99) for job in dashboard_data.jobs(1)]
    assert live.add(fewer)["rates"][0]["points"][0][1] == 0.0


def test_a_straggler_is_named_unless_all_wait_the_same_time() -> None:
    data = Live().add(dashboard_data.jobs(10, straggler=3))
    named, waits = data["straggler"].split("; ")
    assert named == "A straggler in group ddp: rank 3, pid 4003 on box"
    assert waits == "its peers have waited 9.0 s each for it, 88 % of all waiting."
    (group,) = data["waits"]
    assert group["ranks"] == list(range(8)) and group["seconds"][0][3] == 9.0 and group["seconds"][3] == [0.0] * 8
    even = Live().add(_waited(dashboard_data.jobs(1), 5.0))["straggler"]
    assert (
        even.startswith("Ranks of group ddp wait for each other, most for rank 0, pid 4000") and "no straggler" in even
    )
    assert Live().add(_waited(dashboard_data.jobs(1), 0.0))["waits"] == []
    alone = Live().add(dashboard_data.jobs(10, straggler=3)[:1])["straggler"]
    assert "rank 3; its peers have waited 9.0 s each" in alone  # the dashboard itself publishes nothing


def test_simulated_groups_are_marked() -> None:
    data = Live().add(dashboard_data.jobs(10, simulated=True))
    assert "(simulated)" in data["straggler"] and all("(simulated)" in rates["name"] for rates in data["rates"])
