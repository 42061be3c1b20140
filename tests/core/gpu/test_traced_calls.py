"""A profiler sees the calls on a GPU, which make the same calls of CUDA with it, captured in a graph or not."""

from __future__ import annotations

import json

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import profile

from tests.core.gpu.conftest import device_of
from tricomm.core.launcher import Launcher


def calls(comm, world):
    comm.all_reduce(torch.ones(8))
    comm.all_gather(torch.ones(8))
    x = torch.ones(8)
    with world.capture(world.new_stream("cuda:1")) as graph:
        comm.all_reduce(x)
    for node in graph:
        node()
    comm.barrier()


def events_of(prof, folder):
    prof.export_chrome_trace(str(folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def driver_calls(comm, world):
    before = len(device_of(comm).calls)
    calls(comm, world)
    return device_of(comm).calls[before:]


def test_calls_are_shown_where_they_are_launched_and_captures_go_on(comm, world, tmp_path):
    calls(comm, world)
    plain, began = driver_calls(comm, world), comm._launcher.sequence
    with profile(record_shapes=True) as prof:
        traced = driver_calls(comm, world)
    assert traced == plain
    shown = [event["args"] for event in events_of(prof, tmp_path) if str(event.get("name")).startswith("tricomm:")]
    assert [(facts["Collective name"], facts["Mode"], facts["Seq"] - began) for facts in shown] == [
        ("allreduce", "eager", 1),
        ("_allgather_base", "eager", 2),
        ("allreduce", "graph", 3),
        ("barrier", "eager", 4),
    ]


def launched_inside(comm, monkeypatch, tmp_path):
    """Whether the driver launches the kernel inside of the call's event, to which Kineto then links the kernel's."""
    fake = type(device_of(comm))
    launch = fake._launch

    def marked(*arguments):
        with _RecordFunctionFast("launch"):
            return launch(*arguments)

    monkeypatch.setattr(fake, "_launch", marked)
    with profile() as prof:
        comm.all_reduce(torch.ones(8))
    call, at = [e for e in events_of(prof, tmp_path) if e["name"] in ("tricomm:all_reduce", "launch")]
    if at["name"] != "launch":
        call, at = at, call
    return call["ts"] <= at["ts"] and at["ts"] + at["dur"] <= call["ts"] + call["dur"]


def test_a_kernel_is_launched_inside_of_its_event(comm, monkeypatch, tmp_path):
    assert launched_inside(comm, monkeypatch, tmp_path)


def test_without_the_scope_the_launch_would_be_outside_of_it(comm, monkeypatch, tmp_path):
    show = Launcher._show

    def after(launcher, launch, *arguments):
        show(launcher, lambda: None, *arguments)
        launch()

    monkeypatch.setattr(Launcher, "_show", after)
    assert not launched_inside(comm, monkeypatch, tmp_path)
