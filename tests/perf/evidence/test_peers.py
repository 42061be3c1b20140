"""Comparisons of the evidence kit: an implementation that is wrong, missing or dies is named and costs only itself."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.marks import compiles
from tests.perf.evidence.evidence_stages import InThisProcess
from tricomm.kernels import reference
from tricomm.kernels.collective_specs import COLLECTIVES, Collective
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import baselines, timing
from tricomm.perf.bench.baselines import BenchContext, ComparedCall, Implementation
from tricomm.perf.bench.collective_calls import Unavailable
from tricomm.perf.evidence import comparison, result_schema, runner
from tricomm.perf.evidence.comparison import Comparison
from tricomm.perf.evidence.stage import EvidenceSettings, Wrong
from tricomm.perf.evidence.stages import STAGES, device_time, many_gpus, peers
from tricomm.perf.workers import RankFailed, run_workers

# Stands for the checkout that `--peers` brings.
KRAKEN = """
import os, types
import torch, torch.distributed as dist, torch.distributed._symmetric_memory as memory
assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
memory.empty, memory.rendezvous = torch.empty, lambda x, group: None

def right(x):
    dist.all_reduce(y := x.clone())
    return y

def wrong(x):
    y = right(x)
    y[5] += dist.get_rank()
    return y

def dies(x):
    return right(x) if dist.get_rank() == 0 else os._exit(7)

comm = types.SimpleNamespace(one_shot_all_reduce={one}, two_shot_all_reduce={two})
"""


def with_kraken(folder, one, two):
    package = folder / "kraken" / "kraken"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(KRAKEN.replace("{one}", one).replace("{two}", two))
    return folder


def run(stage, settings):
    (result,) = runner.run([stage], settings, lambda text: None, processes=InThisProcess)
    assert result_schema.read_all(settings.out / "evidence.zip") == [result]
    assert result["status"] == "ok", result["reason"]
    return {case["key"]: case["data"] for case in result["cases"]}


def test_the_stages_are_where_they_belong():
    names = [stage.name for stage in STAGES]
    assert names[names.index("device_time") + 1] == "peers" and names[-1] == "many_gpus"


def test_a_peer_that_is_wrong_or_ends_its_process_is_named_and_costs_only_itself(tmp_path, forked_workers):
    """The others start again without a peer that ends its process."""
    settings = EvidenceSettings(tmp_path / "out", with_kraken(tmp_path / "peers", "dies", "wrong"), True)
    data = run(peers.STAGE, settings)["all_reduce/2 ranks/64 bytes"]
    for name in [name + mode for name in ("tricomm", "tricomm_one_shot_ll", "gloo") for mode in ("", "_graph")]:
        assert 0 < data[f"{name}_p10_us"] <= data[f"{name}_us"] <= data[f"{name}_p90_us"]
    assert data["gloo_ratio"] > 0 and data["gloo_graph_ratio"] > 0 and data["choice"] == "one_shot/ll"
    reason = data["missing"].pop("kraken_one_shot")  # rank 0 may have seen its peer die before it was told to stop
    assert "ranks were lost at it: " in reason and "rank 1: exit code 7" in reason
    assert data["missing"].pop("kraken_two_shot") == "wrong result: 1 of 32 elements on rank 1"
    assert data["missing"].pop("nccl").startswith(baselines.no_nccl(True) or ("ValueError: ", "RuntimeError: "))
    assert set(data["missing"]) == {"symm_mem_one_shot", "symm_mem_two_shot", "symm_mem_multimem"}
    assert not [key for key in data if key.startswith(("kraken", "nccl", "symm"))]


def test_several_gpus_are_measured_in_a_dry_run(tmp_path, forked_workers):
    result = run(many_gpus.STAGE, EvidenceSettings(tmp_path, None, True))
    assert result["peer access"] == {"matrix": [[1, 1], [1, 1]], "open_pairs": 2, "pairs_number": 2}
    assert [(p["from"], p["to"]) for p in result["copies"]["pairs"]] == [(0, 1), (1, 0)]
    (pair,) = result["latency"]["pairs"]
    assert (pair["from"], pair["to"]) == (0, 1) and pair["ll_us"] > 0 and pair["flag_us"] > 0
    for collective in ("gather", "barrier"):
        data = result[f"table/{collective}/2 ranks"]
        sizes = [0] if collective == "barrier" else [64, 256]
        assert [row["size_bytes"] for row in data["rows"]] == sizes
        for row in data["rows"]:
            assert row["tricomm_us"] > 0 and row["gloo_us"] > 0 and row["tricomm_wrong"] == row["gloo_wrong"] == 0
            assert "nccl" in row["missing"] and ("tricomm_busbw_gbps" in row) == (collective != "barrier")


def test_every_collective_is_compared_and_moves_at_least_the_bytes_that_are_said(forked_workers):
    world_size, nbytes = 2, 16384
    records = [
        record for _, record in run_workers("tests.perf.evidence.evidence_stages:rank_main", world_size, nbytes, 100.0)
    ]
    moved = {}
    for record in records:
        if record["event"] == "moved":
            moved[record["kernel"]] = moved.get(record["kernel"], 0) + record["moved"]
    kernels = [k for k in registry.KERNELS if not k.needs_cube and k.collective != "barrier"]
    assert set(moved) == {k.name for k in kernels}
    for kernel in kernels:
        least = device_time.moved(kernel, world_size, nbytes)
        assert least <= moved[kernel.name], kernel.name
        assert kernel.protocol != "simple" or moved[kernel.name] <= 1.5 * least, kernel.name
    compared = [record for record in records if record["event"] == "compared"]
    assert {record["collective"] for record in compared} == {k.collective for k in registry.KERNELS}
    for one in compared:
        assert one["ready"] == ["tricomm", "gloo"] and one["missing"] == {}, one


# The rank's side, with one rank


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in comparison._ONE_GPU:
        monkeypatch.setenv(name, "1")
    data = {"dry_run": True, "one_gpu": False, "peers": None}
    with comparison.bench_context(0, 1, f"file://{tmp_path}/meeting", data) as ground:
        yield ground


def contender(result, change=lambda y: y):
    """What an all-reduce of one rank does: nothing; `change` makes it wrong."""
    return lambda call: Implementation(result.copy_, lambda: change(result))


def test_ranks_with_gpus_of_their_own_keep_multicast(here):
    assert not set(comparison._ONE_GPU) & set(os.environ)


def test_only_right_implementations_are_timed_and_all_take_turns(here):
    said, x = [], torch.zeros(8)
    call = ComparedCall(here, "all_reduce", torch.float32, 8)
    compared = Comparison(call, 3, False, lambda what, name: said.append((what, name)))

    def skips(call):
        raise Unavailable("not on this box")

    def raises(call):
        raise RuntimeError("no such luck")

    def wrong_in(call, seen):
        def change(y):
            seen.append(y.clone())
            return y + 1 if len(seen) == call else y

        return contender(torch.zeros(8), change)

    first, second = [], []
    makers = {"tricomm": comparison.offered("all_reduce", 1, True)["tricomm"], "skips": skips, "raises": raises}
    makers |= {"right": contender(x), "early": wrong_in(1, first), "late": wrong_in(2, second)}
    compared.prepare(makers.items())
    bad = "wrong result: 8 of 8 elements on rank 0"
    error = "RuntimeError: no such luck"
    assert compared.missing == {"skips": "not on this box", "raises": error, "early": bad, "late": bad}
    assert len(first) == len(second) == 2 and not torch.equal(*second)
    assert said == [("trying", name) for name in ("tricomm", "skips", "raises", "right", "early", "late")]
    del said[:]
    times = compared.times(3, 1000.0)
    assert {name: len(samples) for name, samples in times.items()} == {"tricomm": 3, "right": 3}
    turns = [name for _, name in said]
    assert turns[2:] == ["right", "tricomm", "tricomm", "right", "right", "tricomm"] and x.eq(0).all()


def test_few_rounds_where_a_round_takes_long(here, monkeypatch):
    monkeypatch.setattr(comparison, "exchange", lambda text, host: ["10.0", "20.0"])
    compared = Comparison(ComparedCall(here, "all_reduce", torch.float32, 8), 1, False, lambda *a, **k: None)
    compared.ready["one"] = comparison.TimedCalls(lambda: None, lambda: None, 1)
    assert len(compared.times(15, 100.0)["one"]) == 5
    assert len(compared.times(15, 1.0)["one"]) == 3 and len(compared.times(2, 1.0)["one"]) == 2


def test_a_device_that_is_lost_ends_the_rank(here, monkeypatch):
    compared = Comparison(ComparedCall(here, "all_reduce", torch.float32, 8), 1, False, lambda *a, **k: None)

    def broken(ground):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(BenchContext, "sync", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compared.prepare({"bad": contender(torch.zeros(8))}.items())


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
def test_data_that_repeat_are_still_exact(monkeypatch, collective):
    monkeypatch.setattr(comparison, "_PERIOD", 7)
    comms = [SimpleNamespace(world_size=3, rank=rank) for rank in range(3)]
    calls = [ComparedCall(SimpleNamespace(comm=c), collective, torch.bfloat16, 24, 2) for c in comms]
    trials = [comparison.trial(call, 4) for call in calls]
    parts = [data for data, _ in trials]
    assert all(len(part) == 24 * COLLECTIVES[collective].rows_in(3) for part in parts)
    assert torch.equal(parts[0][:7], parts[0][7:14]) and not torch.equal(*parts[:2])
    for rank, (call, (_, exact)) in enumerate(zip(calls, trials, strict=True)):
        assert call.gets == (COLLECTIVES[collective].root != "dst" or rank == 2)
        assert torch.equal(exact, reference.expected(collective, "sum", parts, rank, 2))


def test_what_ranks_tell_each_other_is_cut_and_never_breaks(here):
    assert comparison.exchange("", here.host) == [""] and comparison.exchange("ü" * 300, here.host) == ["ü" * 200]
    assert comparison.exchange("a" + "ü" * 300, here.host)[0].startswith("a" + "ü" * 199)


def test_a_graph_holds_all_calls_and_is_replayed(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **more: log.append(more) or nullcontext())
    replay = timing.capture(lambda: log.append("call") or len(log), 3, "stream")
    assert log == [{"stream": "stream", "capture_error_mode": "thread_local"}, "call", "call", "call"]
    assert replay() == 4 and log[-1] == "replay"


def test_on_a_gpu_one_call_in_a_graph_is_checked_and_many_are_timed(here, monkeypatch):
    graphs = []

    def captured(run, calls, stream):
        assert stream == "stream"
        graphs.append(calls)
        if len(graphs) > 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return timing.repeated(run, calls)

    monkeypatch.setattr(timing, "capture", captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(type(here.comm), "simulated", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    compared = Comparison(ComparedCall(here, "all_reduce", torch.float32, 8), 5, True, lambda *a, **k: None)
    counted, x = [], torch.zeros(8)
    compared.prepare(
        {"good": contender(x, lambda y: counted.append(1) or y), "eager": contender(torch.zeros(8))}.items()
    )
    monkeypatch.setattr(type(here.comm), "simulated", True)
    assert graphs == [1, 5, 1] and list(compared.ready) == ["good", "good_graph", "eager"]
    assert compared.missing == {"eager_graph": "RuntimeError: operation not permitted when stream is capturing"}
    del counted[:]
    compared.ready["good_graph"].many()
    assert len(counted) == compared.ready["good_graph"].calls == 5


# Contenders


@pytest.mark.parametrize(
    "there, version, one_gpu, words",
    [
        (False, (2, 31, 0), False, "this torch has no NCCL"),
        (True, (2, 29, 7), True, "NCCL is 2.29.7; several ranks on one device need 2.30 or newer"),
        (True, (2, 29, 7), False, None),
        (True, (2, 30, 3, "rc"), True, None),
        (True, (3, 0, 0), True, None),
    ],
)
def test_which_nccl_can_take_part(monkeypatch, there, version, one_gpu, words):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert baselines.no_nccl(one_gpu) == words


def test_a_missing_kraken_says_where_it_was_looked_for(tmp_path):
    for folder, words in ((None, "no --peers folder was given"), (tmp_path, "kraken is no checkout of github.com")):
        call = ComparedCall(BenchContext(None, None, True, folder), "all_reduce", torch.bfloat16, 8)
        with pytest.raises(Unavailable, match=words):
            baselines.kraken(call, "one_shot")


def test_symmetric_memory_is_called_as_torch_names_it(here, monkeypatch):
    calls = []
    handle = SimpleNamespace(multicast_ptr=0)
    memory = SimpleNamespace(empty=torch.empty, rendezvous=lambda x, group: handle)
    names = ("one_shot_all_reduce_out", "two_shot_all_reduce_", "multimem_all_reduce_")
    assert all(hasattr(torch.ops.symm_mem, name) for name in names)

    def op(name):
        return lambda x, op, group, out=None: calls.append((name, op, group)) or (x if out is None else out.copy_(x))

    monkeypatch.setattr(baselines, "symmetric_memory", memory)
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(**{name: op(name) for name in names}))
    compared = Comparison(ComparedCall(here, "all_reduce", torch.bfloat16, 8), 1, False, lambda *a, **k: None)
    offered = {n: m for n, m in comparison.offered("all_reduce", 1, False).items() if n.startswith("symm")}
    compared.prepare(offered.items())
    assert list(compared.ready) == ["symm_mem_one_shot", "symm_mem_two_shot"]
    assert compared.missing == {"symm_mem_multimem": "multimem needs a multicast address, which this box lacks"}
    handle.multicast_ptr = 4096
    compared.prepare(offered.items())
    assert "symm_mem_multimem" in compared.ready
    assert set(calls) == {(name, "sum", dist.group.WORLD.group_name) for name in names}


# The parent's side


def played(script, names):
    """A `run_workers` that plays `script`: per start, messages and then an error; records the requested names."""
    starts = iter(script)

    def run_workers(module, world_size, question, timeout):
        names.append(question["names"])
        records, error = next(starts)
        yield from records
        raise RankFailed(error)

    return run_workers


def at(name, what="turn"):
    return 0, {"event": what, "name": name}


def done(times, missing=None):
    return {"event": "times", "size": 8, "count": 4, "choice": "a/b", "times": times, "missing": missing or {}}


QUESTION = {"names": ["tricomm", "tricomm_one_shot_ll", "nccl", "kraken_one_shot"], "sizes": [8]}
TIMES = {"tricomm": [2.0, 4.0, 6.0], "nccl": [3.0, 3.0, 3.0]}
SLOWER = {"tricomm": [1.0, 5.0, 6.0], "nccl": [4.0, 2.0, 12.0]}


def test_silence_costs_the_contender_at_which_it_fell(monkeypatch):
    names, lost = [], {}
    script = [
        ([at("tricomm"), at("nccl_graph")], "rank 0: no message for 45 s"),
        ([at("tricomm"), at("tricomm"), at("kraken_one_shot", "trying")], "rank 1: exit code -11"),
        ([(0, done({"tricomm": [1.0]})), at("tricomm"), (1, done({"tricomm": [2.0]}, {"x": "why"}))], "too late"),
    ]
    monkeypatch.setattr(peers, "run_workers", played(script, names))
    row = peers.compare(QUESTION, 2, lost)[8]
    assert names == [QUESTION["names"], [n for n in QUESTION["names"] if n != "nccl"], QUESTION["names"][:2]]
    assert row["times"] == {"tricomm": [2.0]} and row["missing"] == lost
    assert lost["nccl"].endswith("no message for 45 s") and lost["kraken_one_shot"].endswith("exit code -11")
    monkeypatch.setattr(peers, "run_workers", played([([(r, done(TIMES)) for r in (0, 1)], "")], names))
    assert peers.compare(QUESTION, 2, lost)[8]["missing"] == lost and names[-1] == QUESTION["names"][:2]


@pytest.mark.parametrize("records", [[], [at("tricomm_one_shot_ll_graph")]])
def test_where_tricomm_is_lost_the_case_fails(monkeypatch, records):
    monkeypatch.setattr(peers, "run_workers", played([(records, "rank 1: exit code -11")], []))
    with pytest.raises(Wrong, match="exit code -11"):
        peers.compare(QUESTION, 2, {})


def test_a_comparison_ends_in_time_for_its_case(monkeypatch):
    monkeypatch.setattr(peers, "_LIMIT", 0.0)
    with pytest.raises(Wrong, match="no result within 0 s; ranks were lost at nccl"):
        peers.compare(QUESTION, 2, {"nccl": "gone"})


@pytest.mark.parametrize(
    "missing, words",
    [
        ({"tricomm": "InvalidArgument: no"}, "tricomm: InvalidArgument"),
        ({"tricomm_graph": "wrong result: 1 of 4"}, "tricomm_graph: wrong result"),
        ({"tricomm_one_shot_ll": "wrong result: 1 of 4"}, "tricomm_one_shot_ll: wrong result"),
        ({"tricomm_one_shot_ll": "InvalidArgument: 8 ranks are needed", "nccl": "wrong result: 1 of 4"}, None),
    ],
)
def test_tricomm_has_to_be_right(monkeypatch, missing, words):
    monkeypatch.setattr(peers, "run_workers", played([([(r, done(TIMES, missing)) for r in (0, 1)], "")], []))
    if words is None:
        assert peers.compare(QUESTION, 2, {})[8]["missing"] == missing
        return
    with pytest.raises(Wrong, match=words):
        peers.compare(QUESTION, 2, {})


def test_the_slowest_rank_counts_and_ratios_are_of_rounds(monkeypatch):
    monkeypatch.setattr(peers, "run_workers", played([([(0, done(TIMES)), (1, done(SLOWER))], "")], []))
    times = peers.compare(QUESTION, 2, {})[8]["times"]
    assert times == {"tricomm": [2.0, 5.0, 6.0], "nccl": [4.0, 3.0, 12.0]}
    data = peers.described({**times, "tricomm_graph": [1.0, 1.0, 2.0], "nccl_graph": [3.0, 4.0, 5.0]})
    assert data == {
        "rounds": 3, "tricomm_us": 5.0, "tricomm_p10_us": 2.0, "tricomm_p90_us": 6.0, "nccl_us": 4.0,
        "nccl_p10_us": 3.0, "nccl_p90_us": 12.0, "nccl_ratio": 2.0, "tricomm_graph_us": 1.0,
        "tricomm_graph_p10_us": 1.0, "tricomm_graph_p90_us": 2.0, "nccl_graph_us": 4.0, "nccl_graph_p10_us": 3.0,
        "nccl_graph_p90_us": 5.0, "nccl_graph_ratio": 3.0,
    }  # fmt: skip


def test_a_collective_that_torch_has_not_is_left_out_of_the_comparison_only(here, monkeypatch):
    monkeypatch.setitem(COLLECTIVES, "all_to_some", Collective("all_to_some"))
    with pytest.raises(Unavailable, match="does not know how torch.distributed calls all_to_some"):
        baselines.gloo(ComparedCall(here, "all_to_some", torch.float32, 8))


def test_a_cube_kernel_is_offered_to_eight_ranks_only():
    for collective in COLLECTIVES:
        names = {n: set(comparison.offered(collective, n, False)) for n in (4, 8)}
        cube = {
            k.name.replace(collective, "tricomm") for k in registry.of(collective, 8) if k.needs_cube and compiles(k)
        }
        assert names[8] - names[4] == cube and names[4] < names[8] or not cube
