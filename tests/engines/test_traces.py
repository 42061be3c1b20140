"""HolisticTraceAnalysis, Perfetto and NVTX read what tricomm shows of training on two CPU ranks: make engines.

A CPU's trace has no kernels, and HolisticTraceAnalysis finds overlap among kernels only. So for that, and only there,
rows of kernels and launches in Kineto's format are added to the real trace: no GPU has made them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

from tests import ranks
from tests.c10d.bodies.groups import default_group

pytestmark = pytest.mark.engines
WEIGHTS = 2 * (64 * 64 + 64)
KERNELS = re.compile(r"^nccl.*Kernel|(all_|reduce_|broadcast|gather|scatter|barrier|send|recv)")


def trained(rank, world_size, tell, url, how, folder):
    torch.set_num_threads(1)
    with default_group(rank, world_size, url):
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        model = DistributedDataParallel(net) if how == "ddp" else fully_shard(net)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.125)

        def keep(prof):
            prof.export_chrome_trace(f"{folder}/rank{rank}.json")

        steps = schedule(wait=0, warmup=1, active=2, repeat=1)
        with profile(record_shapes=True, schedule=steps, on_trace_ready=keep) as prof:
            for _ in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
                optimiser.step()
                optimiser.zero_grad()
                prof.step()


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def trace(request, tmp_path_factory):
    """The kind of training, and the folder with its ranks' traces."""
    folder = tmp_path_factory.mktemp(request.param)
    ranks.run(2, trained, f"file://{folder}/store", request.param, folder)
    (folder / "store").unlink(missing_ok=True)
    return request.param, folder


def calls_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if str(event.get("name")).startswith("tricomm:")]


def analysis(folder):
    from hta.configs.parser_config import ParserConfig
    from hta.trace_analysis import TraceAnalysis

    config = ParserConfig.get_default_cfg()
    config.add_args(ParserConfig.ARGS_COMMUNICATION)
    ParserConfig.set_default_cfg(config)
    return TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=True)


def test_message_sizes(trace):
    how, folder = trace
    read = analysis(folder).t
    names = read.symbol_table.get_sym_table()
    for rank in range(2):
        rows = read.get_trace(rank)
        rows = rows[[names[place].startswith("tricomm:") for place in rows["name"]]]
        assert len(rows) == len(calls_in(folder / f"rank{rank}.json")) > 0
        sizes = Counter(zip(rows["collective_name"], rows["in_msg_nelems"], rows["out_msg_nelems"], strict=True))
        if how == "ddp":
            assert sizes["allreduce", WEIGHTS, WEIGHTS] == 2
        else:
            assert sizes["_allgather_base", WEIGHTS // 2, WEIGHTS] == 2
            assert sizes["_reduce_scatter_base", WEIGHTS, WEIGHTS // 2] == 2
        assert set(rows["msg_dtype"]) <= {"Float", "Int", "Long"} and set(rows["group_size"]) == {2}


def with_kernels(folder, to):
    """The traces with a launch and a kernel for each call, and a kernel that computes during its second half."""
    for rank in range(2):
        content = json.loads((folder / f"rank{rank}.json").read_text())
        calls = calls_in(folder / f"rank{rank}.json")
        end = 1 + max(int(event["ts"] + event.get("dur", 0)) for event in content["traceEvents"] if event["ph"] == "X")
        for place, call in enumerate(calls):
            at = end + 1000 * place  # whole microseconds, to which HolisticTraceAnalysis rounds
            for name, stream, begins in ((call["name"].split(":")[1], 20, at), ("gemm", 7, at + 50)):
                facts = {"correlation": 10_000 + 100 * place + stream, "External id": call["args"]["External id"]}
                launch = {
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": call["ts"],
                    "dur": 1.0,
                    "args": facts,
                }
                content["traceEvents"].append({"ph": "X", "pid": call["pid"], "tid": call["tid"]} | launch)
                kernel = {"cat": "kernel", "name": f"{name}_one_shot", "ts": begins, "dur": 100.0}
                more = {"args": facts | {"stream": stream, "device": 0}}
                content["traceEvents"].append({"ph": "X", "pid": 0, "tid": stream} | kernel | more)
        (to / f"rank{rank}.json").write_text(json.dumps(content))
    return to


def test_overlap_of_kernels_that_a_fake_has_added(trace, tmp_path, monkeypatch):
    from hta.utils import utils

    read = analysis(with_kernels(trace[1], tmp_path))
    monkeypatch.setattr(utils, "NCCL_KERNEL_RE", KERNELS)  # as docs/troubleshooting.md says
    assert list(read.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]) == [50.0, 50.0]
    monkeypatch.undo()
    assert not (read.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"] > 0).any()


def test_perfettos_trace_processor(trace):
    from perfetto.trace_processor import TraceProcessor

    path = trace[1] / "rank0.json"
    try:
        processor = TraceProcessor(trace=str(path))
    except Exception as error:
        pytest.skip(f"the package fetches its binary, and that failed: {error}")
    found = list(processor.query("select name from slice where name glob 'tricomm:*' order by ts"))
    assert [row.name for row in found] == [call["name"] for call in calls_in(path)]
    processor.close()


ONE_RANK = """
import sys
import torch
import tricomm
with tricomm.init(sys.argv[1], 0, 1, "cpu") as comm:
    comm.all_reduce(torch.ones(8))
    comm.all_gather(torch.ones(4))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_tool_gets_the_ranges_of_the_real_nvtx(url, tmp_path):
    listener = Path(__file__).parent / "bodies" / "nvtx_listener.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "listener.so", listener], check=True)
    variables = os.environ | {"TRICOMM_NVTX": "1", "NVTX_INJECTION64_PATH": str(tmp_path / "listener.so")}
    command = [sys.executable, "-c", ONE_RANK, url]
    said = subprocess.run(command, env=variables, check=True, capture_output=True, text=True, timeout=120).stdout
    assert said.splitlines() == [
        "push tricomm: all_reduce 32 bytes one_shot/ll, 1",
        "pop tricomm",
        "push tricomm: all_gather 16 bytes one_shot/ll, 2",
        "pop tricomm",
    ]
