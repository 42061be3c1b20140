"""A group in two levels sleeps with its levels, by real processes of made-up nodes and islands on a CPU."""

import os
import signal
import time
from dataclasses import replace

import pytest

from tests import ranks
from tests.core.levels import suspended_bodies as bodies
from tests.marks import some
from tricomm.topology import presets


@pytest.mark.parametrize("between", some(["islands", "nodes"], 2))
def test_the_levels_memory_goes_and_comes_back_at_the_same_addresses(between, url, tmp_path):
    file = tmp_path / "topology.json"
    file.write_text(replace(presets.pcie(4), islands=(0, 0, 1, 1)).dumps())
    body = (bodies.round_trip, url, str(file) if between == "islands" else None, 3)
    for wrong, before, asleep, (call, again, resumed) in ranks.run(4, *body):
        assert wrong == []
        assert len(before) == (2 if between == "islands" else 1)  # inside, and kernels across
        assert all(before) and not any(asleep)
        assert call.startswith("InvalidArgument") and "resume()" in call and "suspended" in again
        assert resumed.startswith("ResourceError") and "rank 3" in resumed and "made to fail" in resumed


def test_a_death_in_sleep_is_named_on_all_nodes(url):
    with ranks.start(4, bodies.one_dies, url, 3) as started:
        pids = started.messages()
        time.sleep(0.2)
        os.kill(pids[3], signal.SIGKILL)
        killed = time.monotonic()
        for outcome in started.results([0, 1, 2])[:3]:
            text, when, resumed = outcome.value
            assert text.startswith("PeerDied") and "rank 3, of node 1 (rank(s) 2, 3)" in text and "died" in text
            assert resumed.startswith("PeerDied") and when - killed < 3.0 + ranks.BUSY
