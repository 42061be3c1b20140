"""torch's profiler shows every call once, by the keys of NCCL's events, and costs no call."""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile, schedule

from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import alone, communicator
from tricomm.metrics import call_trace

pytestmark = pytest.mark.usefixtures("forgotten")
ONES = torch.ones(8)
# Of torch's csrc/profiler/util.h; the ranks' stride is there if they have one.
NCCL_KEYS = {
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Seq",
    "Rank",
    "In split size",
    "Out split size",
    "Global rank start",
    "Global rank stride",
}
OUR_KEYS = {"Route", "Algorithm", "Protocol", "Blocks", "Table", "Table row", "Reason", "Mode"}


def shown(prof, folder):
    """The events of tricomm's calls in a profile, in order."""
    path = folder / "trace.json"
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if str(event.get("name")).startswith("tricomm:")]


def sized(events):
    """Name, elements in and out, type, number, and splits."""
    keys = ("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Seq", "In split size", "Out split size")
    return [tuple(event["args"][key] for key in keys) for event in events]


# The keys


def direct(rank, world_size, tell, url, folder):
    with communicator(rank, world_size, url) as comm:
        with profile(record_shapes=True) as prof:
            comm.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
            comm.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))  # a prepared call
            comm.all_gather(ONES)
            comm.reduce_scatter(ONES, algorithm="one_shot")
            comm.broadcast(ONES.clone(), 1)
            comm.all_to_all_v(torch.ones(3, 2), [1, 2], [1 + rank] * 2)
            comm.barrier()
            comm.send(ONES, 1, tag=5) if rank == 0 else comm.recv(ONES.clone(), 0, tag=5)
            comm.send(ONES, 1, tag=5) if rank == 0 else comm.recv(ONES.clone(), tag=5)
            comm.all_reduce_rms_norm(torch.ones(2, 64), torch.ones(2, 64), torch.ones(64))
        (folder / str(rank)).mkdir()
        return shown(prof, folder / str(rank)), comm.group


def test_calls_of_a_communicator_have_the_keys_of_nccls_events_and_ours(url, tmp_path):
    (mine, name), (theirs, _) = ranks.run(2, direct, url, tmp_path)
    none = "[]", "[]"
    wanted = [
        ("allreduce", 6, 6, "BFloat16", 1, *none),
        ("allreduce", 6, 6, "BFloat16", 2, *none),
        ("_allgather_base", 8, 16, "Float", 3, *none),
        ("_reduce_scatter_base", 8, 4, "Float", 4, *none),
        ("broadcast", 8, 8, "Float", 5, *none),
        ("all_to_allv", 6, 4, "Float", 6, "[2, 4]", "[2, 2]"),
        ("barrier", 0, 0, "Byte", 7, *none),
        ("send", 8, 8, "Float", 1, *none),
        ("send", 8, 8, "Float", 2, *none),
        ("allreduce", 128, 128, "Float", 8, *none),
    ]
    assert sized(mine) == wanted
    assert sized(theirs)[:5] == wanted[:5] and sized(theirs)[5][-1] == "[4, 4]"
    for event in mine + theirs:
        assert event["cat"] == "cpu_op" and event["ph"] == "X" and event["dur"] > 0
        facts = event["args"]
        assert NCCL_KEYS | OUR_KEYS <= facts.keys()
        assert (facts["Group size"], facts["Process Group Ranks"], facts["Process Group Name"]) == (2, "[0, 1]", name)
        assert (facts["Global rank start"], facts["Global rank stride"], facts["Route"]) == (0, 1, "kernels")
    reduced, scattered, broadcast = [mine[place]["args"] for place in (0, 3, 4)]
    assert (reduced["Algorithm"], reduced["Protocol"], reduced["Blocks"]) == ("one_shot", "ll", 1)
    assert (reduced["Table"], reduced["Table row"], reduced["Op"], reduced["Rank"]) == ("cpu", 0, "sum", 0)
    assert scattered["Table row"] == -1 and "forced by the caller" in scattered["Reason"]
    assert broadcast["Rank"] == 1 and reduced["Input Dims"] == [[2, 3]]
    assert mine[-1]["name"] == "tricomm:all_reduce_rms_norm"
    sent, received, from_any = mine[7]["args"], theirs[7]["args"], theirs[8]["args"]
    assert (sent["Rank"], sent["Dst Rank"], received["Rank"], received["Src Rank"]) == (1, 1, 0, 0)
    assert "Src Rank" not in from_any and from_any["Op"] == "tag 5"


def in_a_part_of_a_job(rank, world_size, tell, url, folder):
    os.environ.update(TORCH_FR_BUFFER_SIZE="0", RANK=str(rank + 4))
    with communicator(rank, world_size, url) as comm:
        half = comm.split([2, 1])
        events = []
        if half is not None:
            with profile(record_shapes=True) as prof:
                half.barrier()
                half.send(ONES, 1) if rank == 2 else half.recv(ONES.clone(), 0)
            (folder / str(rank)).mkdir()
            events = [event["args"] for event in shown(prof, folder / str(rank))]
            half.close()
        return events


def test_ranks_are_those_of_the_job_with_the_flight_recorder_off_too(url, tmp_path):
    none, received, sent = ranks.run(3, in_a_part_of_a_job, url, tmp_path)
    assert none == [] and [facts["Process Group Ranks"] for facts in sent + received] == ["[6, 5]"] * 4
    assert [facts["Rank"] for facts in (sent[0], received[0])] == [0, 1] and "Global rank stride" not in sent[0]
    assert (sent[1]["Dst Rank"], received[1]["Src Rank"]) == (5, 6)


def over_c10d(rank, world_size, tell, url, folder, route):
    with default_group(rank, world_size, url, route=route):
        dist.barrier()
        with profile(record_shapes=True) as prof:
            dist.all_reduce(ONES.clone())
            dist.all_reduce(ONES.clone(), async_op=True).wait()
            dist.all_gather([torch.empty(1), torch.empty(2)], torch.ones(rank + 1))
            dist.all_to_all_single(torch.empty(2 + 2 * rank), torch.ones(3), [1 + rank] * 2, [1, 2])
            dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
            dist.send(ONES, 1, tag=3) if rank == 0 else dist.recv(ONES.clone(), 0, tag=3)
            dist.barrier()
        (folder / str(rank)).mkdir()
        return shown(prof, folder / str(rank))


@pytest.mark.parametrize("route", ["gloo", "kernels"])
def test_calls_of_torch_distributed_are_shown_once(route, url, tmp_path):
    mine, theirs = ranks.run(2, over_c10d, url, tmp_path, route)
    none = "[]", "[]"
    assert sized(mine) == [
        ("allreduce", 8, 8, "Float", 2, *none),
        ("allreduce", 8, 8, "Float", 3, *none),
        ("all_gather", 1, 3, "Float", 4, *none),
        ("all_to_allv", 3, 2, "Float", 5, "[1, 2]", "[1, 1]"),
        ("allreduce_coalesced", 5, 5, "Float", 6, *none),
        ("send", 8, 8, "Float", 1, *none),
        ("barrier", 0, 0, "Byte", 7, *none),
    ]
    assert [event["args"]["Seq"] for event in theirs] == [event["args"]["Seq"] for event in mine]
    assert sized(theirs)[2][1:3] == (2, 3) and theirs[5]["args"]["Src Rank"] == 0
    for event in mine + theirs:
        facts = event["args"]
        assert NCCL_KEYS | {"Route"} <= facts.keys() and facts["Process Group Name"] == "0"
    facts = mine[0]["args"]
    assert facts["Route"] == route and "Reason" in facts and mine[2]["args"]["Route"] == "gloo"
    assert OUR_KEYS <= facts.keys() if route == "kernels" else "Algorithm" not in facts


def twice(rank, world_size, tell, url, folder):
    """The kernels' communicator of a c10d group, whose recorder has no name, given one."""
    with default_group(rank, world_size, url, route="kernels") as group:
        dist.all_reduce(ONES.clone())
        (comm,) = group._dispatcher._comms.values()
        comm._group.recorder.group, comm._group.recorder.ranks = "0", (0, 1)
        comm._group.recorder.rank = rank
        with profile(record_shapes=True, experimental_config=_all_threads()) as prof:
            dist.all_reduce(ONES.clone())
        (folder / str(rank)).mkdir()
        return shown(prof, folder / str(rank))


def _all_threads():
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def test_without_a_recorder_that_has_no_name_a_call_is_shown_twice(url, tmp_path):
    assert [len(events) for events in ranks.run(2, twice, url, tmp_path)] == [2, 2]


# When nothing is to be shown


def test_without_a_profiler_nothing_is_made_for_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(call_trace.CallTrace, "shown", lambda *a, **k: asked.append(a))
    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        comm.all_reduce(ONES.clone())
        comm.barrier()
        assert asked == []
        with profile(), suppress(TypeError, AttributeError):
            comm.all_reduce(ONES.clone())
        assert len(asked) == 1


def test_shapes_are_recorded_only_if_asked_for_and_a_schedule_is_followed(tmp_path):
    kept = []
    with alone(tmp_path) as comm:
        with profile() as plain:
            comm.all_reduce(ONES.clone())
        steps = schedule(wait=1, warmup=1, active=2)
        with profile(
            record_shapes=True, schedule=steps, on_trace_ready=lambda p: kept.append(shown(p, tmp_path))
        ) as prof:
            for _ in range(4):
                comm.all_reduce(ONES.clone())
                prof.step()
    (event,) = shown(plain, tmp_path)
    assert "Seq" not in event["args"] and event["name"] == "tricomm:all_reduce"
    assert [event["args"]["Seq"] for event in kept[0]] == [4, 5]


# In the middle of a call


def test_a_profiler_may_start_and_stop_in_the_middle_of_a_call(tmp_path, monkeypatch):
    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        comm.all_gather(ONES)
        prof, run = profile(record_shapes=True), comm._launcher._announce
        turns = [prof.start, prof.stop]

        def turning(*arguments):
            run(*arguments)
            if turns:
                turns.pop(0)()

        comm._launcher._announce = turning
        assert torch.equal(comm.all_reduce(ONES.clone()), ONES)  # begins before the profile
        assert torch.equal(comm.all_gather(ONES), ONES)
        assert [event["name"] for event in shown(prof, tmp_path)] == ["tricomm:all_reduce"]
        other = profile(record_shapes=True)
        other.start()
        with comm._launcher.trace.shown(("all_reduce", "sum", torch.float32, 8, -1), dict, ONES, 9):
            other.stop()  # while an event is open
        assert torch.equal(comm.all_reduce(ONES.clone()), ONES)
        with profile(record_shapes=True) as again:
            comm.all_reduce(ONES.clone())
        assert [event["args"]["Seq"] for event in shown(again, tmp_path)] == [6]


def test_an_exception_ends_the_event(tmp_path):
    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        with profile(record_shapes=True) as prof:
            trace, made = comm._launcher.trace, ("all_reduce", "sum", torch.float32, 8, -1)
            with pytest.raises(KeyError), trace.shown(made, dict, ONES, 1):
                raise KeyError
            with trace.shown(made, dict, ONES, 2), trace.shown(made, dict, ONES, 3):  # a call inside of another
                pass
            comm.all_reduce(ONES.clone())
    first, outer, inner, last = shown(prof, tmp_path)
    assert first["ts"] + first["dur"] <= outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] <= last["ts"]
    assert [event["args"]["Seq"] for event in (first, outer, inner, last)] == [1, 2, 3, 2]


def test_a_call_of_a_callback_has_the_name_of_its_line(tmp_path):
    with alone(tmp_path) as comm, profile(record_shapes=True) as prof:
        made = [("all_gather", "none", torch.float32, 8, -1), ("all_gather", "none", torch.float32, 2, -1)]
        with comm._launcher.trace.shown(made, dict, None, 3, "2/1/"):
            pass
    (event,) = shown(prof, tmp_path)
    assert event["args"]["Process Group Name"] == f"{comm.group}/2/1"
    assert sized([event]) == [("all_gather_into_tensor_coalesced", 10, 10, "Float", 3, "[]", "[]")]


def test_text_with_quotation_marks_is_kept(tmp_path):
    with alone(tmp_path) as comm, profile(record_shapes=True) as prof:
        made = ("all_reduce", "sum", torch.float32, 8, -1)
        with comm._launcher.trace.shown(made, lambda: {"Reason": 'say "a"\nor \\'}, ONES, 1):
            pass
        with call_trace._RecordFunctionFast("tricomm:without", [], {"Reason": 'say "a"'}):
            pass
    assert [event["args"]["Reason"] for event in shown(prof, tmp_path)] == ["say 'a'or /", "None"]


def test_calls_of_several_threads(tmp_path):
    def calls():
        for _ in range(3):
            comm.all_reduce(ONES.clone())

    with alone(tmp_path) as comm:
        comm.all_reduce(ONES.clone())
        for config, seen in ((None, 0), (_all_threads(), 6)):
            with profile(record_shapes=True, experimental_config=config) as prof:
                workers = [threading.Thread(target=calls) for _ in range(2)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            events = shown(prof, tmp_path)
            assert [event["name"] for event in events] == ["tricomm:all_reduce"] * seen
            assert not any("Seq" in event["args"] for event in events)  # torch drops the keys


def broken(comm, monkeypatch, caplog):
    monkeypatch.setattr(call_trace, "_facts", lambda *a: {}["absent"])
    with caplog.at_level(logging.WARNING), profile():
        assert torch.equal(comm.all_reduce(ONES.clone()), ONES)
        assert torch.equal(comm.all_reduce(ONES.clone()), ONES)


def test_what_cannot_be_shown_costs_no_call(tmp_path, monkeypatch, caplog):
    with alone(tmp_path) as comm:
        broken(comm, monkeypatch, caplog)
        comm.check()
    assert [record.message for record in caplog.records] == [
        "a call could not be shown to the profiler: KeyError: 'absent'"
    ]


def test_without_that_the_group_would_be_lost(tmp_path, monkeypatch, caplog):
    def raising(about, text):
        raise ValueError(text)

    monkeypatch.setattr(call_trace, "warn_once", raising)
    with alone(tmp_path) as comm:
        with pytest.raises(ValueError, match="absent"):
            broken(comm, monkeypatch, caplog)
        assert comm._monitor.fault is not None


def compiled(rank, world_size, tell, url, folder):
    from torch.distributed._functional_collectives import all_reduce

    with default_group(rank, world_size, url) as group:

        def doubled(x):
            return all_reduce(x, "sum", group) * 2

        with profile(record_shapes=True) as prof:
            y = torch.compile(doubled, backend="aot_eager", fullgraph=True)(ONES)
        (folder / str(rank)).mkdir()
        return y.tolist(), sized(shown(prof, folder / str(rank)))


def test_a_compiled_call_is_shown(url, tmp_path):
    wanted = [4.0] * 8, [("allreduce", 8, 8, "Float", 1, "[]", "[]")]
    assert ranks.run(2, compiled, url, tmp_path) == [wanted] * 2
