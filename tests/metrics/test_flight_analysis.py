"""Torch's own analyser reads the dumps of all ranks, and names the rank and the call of a fault."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

import tricomm
from tests import ranks
from tests.c10d.bodies.groups import default_group
from tests.core.bodies.common_bodies import attempt, communicator
from tricomm.deadline import poll

ONES = torch.ones(8)


def analysed(folder: Path, *more: str) -> list[Any]:
    """The collectives that torch's analyser finds fault with. It trusts the rank that it reads first: rank 0."""
    arguments: Any = JobConfig().parse_args([str(folder), *more])
    details, version = read_dir(arguments)
    db = build_db(dict(sorted(details.items())), arguments, version)
    return [c for c in db.collectives if c.missing_ranks or c.mismatch_collectives]


def loaded(path: Path) -> dict[str, Any]:
    return pickle.loads(path.read_bytes())


def dumping(folder: Path) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"


def direct(rank, world_size, tell, url, folder, fault):
    """Three good calls, and then a fault, on the kernels."""
    dumping(folder)
    with communicator(rank, world_size, url, timeout=1.5) as comm:
        comm.all_reduce(ONES.clone())
        comm.all_gather(ONES)
        comm.barrier()
        ranks.together(url, rank, range(world_size))  # a fault may be heard by a rank that is still in its last call
        outcome = attempt(lambda: fault(comm))
    return outcome


def late(comm, rank):
    """A rank that hears of the fault before its own call records none, so the wrong call comes after the others."""
    if comm.rank == rank:
        time.sleep(0.7)


def another_size(comm):
    late(comm, 1)
    comm.all_reduce(torch.ones(16 if comm.rank == 1 else 8))


def another_call(comm):
    late(comm, 2)
    comm.broadcast(ONES.clone(), 0) if comm.rank == 2 else comm.all_reduce(ONES.clone())


def absent(comm):
    if comm.rank == 2:
        poll(lambda: comm._monitor.fault is not None, 20.0, 0.01)
        comm.check()
    comm.all_reduce(ONES.clone())


def unsent(comm):
    """Rank 0 gets one message of the two that it waits for from rank 1."""
    if comm.rank == 1:
        comm.send(ONES, 0, tag=7)
    elif comm.rank == 0:
        comm.recv(ONES.clone(), 1, tag=7)
        comm.recv(ONES.clone(), 1, tag=7)
    poll(lambda: comm._monitor.fault is not None, 20.0, 0.01)
    comm.check()


@pytest.mark.parametrize(
    ("fault", "error", "number", "culprits", "missing"),
    [
        (another_size, "CollectiveMismatch", 4, {1}, None),
        (another_call, "CollectiveMismatch", 4, {2}, None),
        (absent, "CollectiveTimeout", 4, None, {2}),
        (unsent, "CollectiveTimeout", 2, None, {1}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_analyser_names_rank_and_call_of_a_fault_of_the_kernels(
    fault, error, number, culprits, missing, url, tmp_path
):
    for rank, (kind, text, _) in enumerate(ranks.run(3, direct, url, tmp_path / "dumps", fault)):
        assert kind in (error, "GroupAborted") and text.endswith(f" Last calls: {tmp_path}/dumps/rank_{rank}."), text
    (found,) = analysed(tmp_path / "dumps")
    assert (found.collective_seq_id, found.missing_ranks) == (number, missing)
    assert culprits is None or set(found.mismatch_collectives) == culprits


def through_torch(rank, world_size, tell, url, folder, route, fault):
    dumping(folder)
    with default_group(rank, world_size, url, route, timeout=30.0):
        dist.all_reduce(ONES.clone())
        dist.all_reduce(ONES.clone(), async_op=True).wait()
        ranks.together(url, rank, range(world_size))
        outcome = attempt(lambda: fault(rank))
        dist.barrier() if route == "gloo" else None
    return outcome


def another_type(rank):
    dist.all_reduce(torch.ones(8, dtype=torch.float64 if rank == 1 else torch.float32))


def another_kind(rank):
    dist.all_gather_into_tensor(torch.ones(24), ONES) if rank == 2 else dist.reduce_scatter_tensor(ONES, torch.ones(24))


@pytest.mark.parametrize("route", ["gloo", "kernels"])
@pytest.mark.parametrize(("fault", "culprit"), [(another_type, 1), (another_kind, 2)], ids=["type", "kind"])
def test_the_analyser_names_rank_and_call_of_a_fault_under_torch(route, fault, culprit, url, tmp_path):
    folder = tmp_path / "dumps"
    for rank, (kind, text, _) in enumerate(ranks.run(3, through_torch, url, folder, route, fault)):
        assert kind == "CollectiveMismatch" and text.endswith(f" Last calls: {folder}/rank_{rank}."), text
    (found,) = analysed(folder)
    assert found.collective_seq_id == 3 and set(found.mismatch_collectives) == {culprit}
    assert found.pg_desc == "0:cpu:tricomm" and found.mismatch_collectives[culprit].collective_state == "started"


def stuck(rank, world_size, tell, url, folder, kind):
    """Rank 2 makes a call only after it has received a signal; no rank fails."""
    dumping(folder)
    os.environ["TRICOMM_DUMP_SIGNAL"] = "SIGUSR2"
    came: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))

    def wait(call):
        tell(os.getpid())
        if rank == 2:
            while not came:
                time.sleep(0.01)
        call()

    if kind == "kernels":
        with communicator(rank, world_size, url) as comm:
            comm.barrier()
            wait(comm.barrier)
    else:
        with default_group(rank, world_size, url):
            dist.barrier()
            wait(dist.barrier)
    return len(came), signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.parametrize("kind", ["kernels", "gloo"])
def test_a_signal_dumps_a_job_that_waits_and_the_job_and_its_handler_go_on(kind, url, tmp_path):
    folder = tmp_path / "dumps"
    with ranks.start(3, stuck, url, folder, kind) as started:
        pids = started.messages()
        for pid in (pids[0], pids[1], pids[2]):
            time.sleep(0.3)
            os.kill(pid, signal.SIGUSR2)
        for outcome in started.results():
            assert outcome.error is None and outcome.value == (1, True), outcome
    (found,) = analysed(folder)
    assert (found.collective_name, found.collective_seq_id, found.missing_ranks) == ("nccl:all_reduce_barrier", 2, {2})
    states = [[call["state"] for call in loaded(folder / f"rank_{rank}")["entries"]] for rank in range(3)]
    assert states == [["completed", "started"], ["completed", "started"], ["completed"]]


def test_the_command_line_of_torch_reads_a_folder(url, tmp_path, caplog):
    ranks.run(3, direct, url, tmp_path / "dumps", absent)
    with caplog.at_level("INFO"):
        fr_trace.main([str(tmp_path / "dumps")])
    assert "missing ranks: {2}" in caplog.text and "sequence number: 4" in caplog.text


# The contents of a dump


def every_call(rank, world_size, tell, url, folder):
    with communicator(rank, world_size, url) as comm:
        comm.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
        comm.all_gather(ONES)
        comm.reduce_scatter(ONES)
        comm.all_to_all_v(torch.ones(3, 2), [1, 2], [1 + rank] * 2)
        comm.send(ONES, 1, tag=5) if rank == 0 else comm.recv(ONES.clone(), tag=5)
        (path,) = tricomm.dump(folder / "calls_")
        half = comm.split([1])  # one of another order of ranks
        if half is not None:
            half.close()
    return path, comm.group


def test_a_dump_has_the_sizes_that_the_ranks_agree_on(url, tmp_path):
    (path, name), (other, _) = ranks.run(2, every_call, url, tmp_path)
    assert sorted(tmp_path.glob("calls*")) == [path, other] == [tmp_path / "calls_0", tmp_path / "calls_1"]
    dump = loaded(path)
    assert dump["version"] == "2.10" and dump["pg_config"][name] == {"name": name, "desc": "tricomm", "ranks": "[0, 1]"}
    calls = [
        (c["process_group"][0], c["profiling_name"], c["input_sizes"], c["output_sizes"], c["input_dtypes"], c["state"])
        for c in dump["entries"]
    ]
    done = "completed"
    assert calls == [
        (name, "nccl:all_reduce", [[6]], [[6]], ["BFloat16"], done),
        (name, "nccl:all_gather", [[8]], [[16]], ["Float"], done),
        (name, "nccl:reduce_scatter", [[8]], [[4]], ["Float"], done),
        (name, "nccl:all_to_all", [[6]], [[4]], ["Float"], done),
        (f"{name} 0->1 tag 5", "nccl:send 0->1", [[8]], [[8]], ["Float"], done),
    ]
    assert loaded(other)["entries"][-1]["profiling_name"] == "nccl:recv 1<-0"
    assert analysed(tmp_path, "--prefix", "calls_") == []


def with_a_dead_rank(rank, world_size, tell, url, folder):
    dumping(folder)
    with communicator(rank, world_size, url) as comm:
        comm.barrier()
        ranks.together(url, rank, range(world_size))
        if rank == 2:
            os._exit(0)
        outcome = attempt(comm.barrier)
    return outcome


def test_the_dumps_of_those_that_live_are_enough(url, tmp_path, caplog):
    with ranks.start(3, with_a_dead_rank, url, tmp_path / "dumps") as started:
        assert [outcome.value[0] for outcome in started.results([0, 1])[:2]] == ["PeerDied"] * 2
    with caplog.at_level("INFO"):
        assert analysed(tmp_path / "dumps", "--allow-incomplete-ranks") == []
    assert "missed FR dumps from ranks ({2})" in caplog.text


def in_a_part_of_a_job(rank, world_size, tell, url, folder):
    """Ranks 2 and 1 of a job make a group, in this order; one of them makes a call too many."""
    dumping(folder)
    os.environ["RANK"] = str(rank)
    with communicator(rank, world_size, url, timeout=1.5) as comm:
        half = comm.split([2, 1])
        if half is not None:
            half.barrier()
            if rank == 2:
                attempt(lambda: half.all_reduce(ONES.clone()))
            else:
                poll(lambda: half._monitor.fault is not None, 20.0, 0.01)
            half.close()
        tricomm.dump()


def test_a_part_of_a_job_has_the_ranks_of_the_job(url, tmp_path):
    ranks.run(3, in_a_part_of_a_job, url, tmp_path / "dumps")
    (found,) = analysed(tmp_path / "dumps")
    assert (found.expected_ranks, found.missing_ranks, found.collective_seq_id) == ({1, 2}, {1}, 2)
