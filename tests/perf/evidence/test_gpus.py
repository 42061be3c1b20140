"""What the evidence kit does with several GPUs: who reaches whom, how fast, how late, beside NCCL."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tricomm
from tests.marks import compiles
from tests.perf.evidence.test_peers import done
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import timing
from tricomm.perf.evidence import latency
from tricomm.perf.evidence.stage import EvidenceSettings, Wrong
from tricomm.perf.evidence.stages import many_gpus


def test_one_gpu_is_too_few(monkeypatch, tmp_path):
    assert "no CUDA device" in many_gpus.missing(EvidenceSettings(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, words in ((1, "one GPU is visible; this stage needs two or more"), (2, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert many_gpus.missing(EvidenceSettings(tmp_path)) == words
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert many_gpus.missing(EvidenceSettings(tmp_path, None, True)) is None
    assert [many_gpus.worlds(n) for n in (2, 3, 4, 8)] == [(2,), (2, 3), (2, 4), (2, 4, 8)]


def test_every_collective_and_kernel_has_its_case_on_eight_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    keys = [case.key for case in many_gpus.STAGE.cases(EvidenceSettings(tmp_path))]
    collectives = dict.fromkeys(k.collective for k in registry.KERNELS)
    assert set(collectives) == set(COLLECTIVES)
    assert {f"table/{c}/{n} ranks" for c in collectives for n in (2, 4, 8)} < set(keys)
    assert {f"sweep/{k.name}/8 ranks" for k in registry.KERNELS if compiles(k)} < set(keys)
    assert len(keys) == len(set(keys))


def test_who_reaches_whom():
    data = many_gpus.matrix(3, lambda a, b: (a, b) != (2, 0))
    assert data == {"matrix": [[1, 1, 1], [1, 1, 1], [0, 1, 1]], "open_pairs": 5, "pairs_number": 6}


def test_copies_are_timed_and_looked_at(monkeypatch):
    seconds = iter([9.0, 2e-6, 1e-6, 4e-6, 9.0, 1e-6, 1e-6, 1e-6])

    def copied(x, y):
        y.copy_(x)
        return next(seconds)

    monkeypatch.setattr(many_gpus, "copied", copied)
    data = many_gpus.copies([torch.device("cpu")] * 2, 4000, 3)
    assert [pair["copy_gbps"] for pair in data["pairs"]] == [2.0, 4.0]
    assert (data["least_gbps"], data["most_gbps"]) == (2.0, 4.0)
    monkeypatch.setattr(many_gpus, "copied", lambda x, y: 1.0)
    with pytest.raises(Wrong, match=r"from cpu \(0\) to cpu \(1\) did not arrive"):
        many_gpus.copies([torch.device("cpu")] * 2, 4000)


def test_a_gpu_is_timed_by_events_on_the_device_that_is_copied_from(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: log.append(device.index) or nullcontext())
    x = SimpleNamespace(device=torch.device("cuda", 3))
    y = SimpleNamespace(copy_=lambda x, non_blocking: log.append(("copy", non_blocking)))
    assert many_gpus.copied(x, y) == 2e-3 and log == [3, "record", ("copy", True), "record", "wait"]
    del log[:]
    clock = timing.stopwatch(torch.device("cuda", 3))
    assert clock() == 2000.0 and log == ["record", "record", "wait"]


def test_latencies_of_all_pairs_are_needed():
    said = [
        {"ranks": [a, b], "way": way, "samples": [a + b, 9.0, 0.5]}
        for a, b in ((0, 1), (0, 2), (1, 2))
        for way in ("ll", "flag")
    ]
    data = many_gpus.latencies(said, 3)
    assert data["pairs"][2] == {"from": 1, "to": 2, "ll_us": 3.0, "flag_us": 3.0}
    assert (data["ll_least_us"], data["ll_most_us"]) == (1.0, 3.0)
    with pytest.raises(Wrong, match="2 pairs of 3 ranks"):
        many_gpus.latencies(said[:4], 3)


@pytest.mark.parametrize("way", latency.WAYS)
def test_the_last_word_has_gone_to_and_fro_and_nothing_races(way):
    def body(comm):
        buffer = comm.symmetric((2, latency._BUFFER), torch.int64)
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
def test_the_probe_compiles_for_a_gpu_to_the_accesses_that_it_is_named_for(ll, accesses):
    values = {"LEADS": True, "LL": ll, "BUFFER": latency._BUFFER, "LANES": latency._LANES, "PTX": True}
    types = {"group": "*i64", "table": "*i64", "bounds": "*i64", "rank": "i32", "other": "i32"}
    source = ASTSource(latency.ping_pong, types | dict.fromkeys(values, "constexpr"), values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert accesses <= set(re.findall(r"\b(?:ld|st)\.(?:volatile|relaxed|acquire|release)[.a-z0-9]*", made.asm["ptx"]))


def test_the_table_has_the_formulas_of_nccl_tests():
    times = {"tricomm": [2.0, 2.0, 8.0], "nccl": [4.0, 4.0, 4.0]}
    rows = {1000: {**done(times), "count": 250}, 4000: {**done(times, {"x": "why"}), "count": 1000}}
    data = many_gpus.table("all_reduce", 4, rows)
    first, last = data["rows"]
    assert (first["size_bytes"], first["count"], first["type"], first["choice"]) == (1000, 250, "float32", "a/b")
    assert (first["tricomm_us"], first["tricomm_p90_us"], first["tricomm_wrong"]) == (2.0, 8.0, 0)
    assert (first["tricomm_algbw_gbps"], first["tricomm_busbw_gbps"]) == (0.5, 0.75)
    assert last["nccl_algbw_gbps"] == 1.0 and last["missing"] == {"x": "why"}
    assert (data["tricomm_us"], data["tricomm_busbw_gbps"], data["nccl_busbw_gbps"]) == (2.0, 3.0, 1.5)
    gathered = many_gpus.table("all_gather", 4, {1000: {**done(times), "count": 250}})["rows"][0]
    assert gathered["size_bytes"] == 4000 and gathered["tricomm_busbw_gbps"] == 1.5
    assert json.loads(json.dumps(data)) == data
