"""The latency probe without a GPU: no race, and the accesses that it is named for."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tricomm
from tests.gpu import latency


@pytest.mark.parametrize("way", latency.WAYS)
def test_the_last_word_has_arrived_on_both_sides_and_nothing_races(way):
    def body(comm):
        buffer = comm.symmetric((2, latency.BUFFER), torch.int64)
        times = latency.probe(comm, buffer.table, 1 - comm.rank, way, 3, 2)
        assert len(times) == 2 and min(times) >= 0
        comm.barrier()
        assert int(buffer.local[1 - comm.rank, 0]) >> 32 == 8

    report = tricomm.check(body, world_size=2, schedules=3)
    assert report.ok, report


@pytest.mark.parametrize(
    "ll, accesses",
    [
        (True, {"ld.volatile.global.v2.b64", "st.relaxed.sys.global.v2.b64"}),
        (False, {"ld.acquire.sys.global.b64", "st.release.sys.global.b64"}),
    ],
)
def test_the_probe_compiles_to_the_accesses_that_it_is_named_for(ll, accesses):
    values = {"LEADS": True, "LL": ll, "BUFFER": latency.BUFFER, "LANES": latency.LANES, "PTX": True}
    types = {"group": "*i64", "table": "*i64", "bounds": "*i64", "rank": "i32", "other": "i32"}
    source = ASTSource(latency.ping_pong, types | dict.fromkeys(values, "constexpr"), values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert accesses <= set(re.findall(r"\b(?:ld|st)\.(?:volatile|relaxed|acquire|release)[.a-z0-9]*", made.asm["ptx"]))


def test_every_pair_is_measured_by_its_lower_rank():
    pairs = tricomm.simulate(lambda comm: set(latency.of_pairs(comm, 2, 1)), 3)
    assert pairs == [
        {((0, b), way) for b in (1, 2) for way in latency.WAYS},
        {((1, 2), way) for way in latency.WAYS},
        set(),
    ]
