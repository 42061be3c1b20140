"""Kernels are compiled and loaded before their calls, which then compile nothing."""

from __future__ import annotations

import pytest
import torch

import tricomm
from tests.core import compiles
from tests.core.bodies.common_bodies import communicator
from tests.core.gpu.conftest import MINE, device_of, over
from tests.fake_cuda import OnFakeGpu
from tricomm import Options
from tricomm.core import machine_code
from tricomm.core.fused.fused_call import FUSED
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.kernels.launch import cuda_launcher
from tricomm.options import with_environment


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that are compiled from here on; the caches are empty."""
    return compiles.counted(monkeypatch)


@pytest.fixture
def strict(world):
    with world.device(MINE), over(OnFakeGpu(world, MINE), compile_after_set_up=False) as made:
        yield made


def test_a_prepared_call_compiles_and_loads_nothing(strict, compiled):
    assert strict.prepare("all_reduce", torch.float32, most_bytes=1 << 12) > 0
    assert set(compiled) == {"all_reduce_one_shot"} and len(compiled) == len(set(cuda_launcher._compiled))
    before, calls = len(compiled), list(device_of(strict).calls)
    x = torch.ones(1000)
    strict.all_reduce(x)
    strict.all_reduce(torch.ones(1001)[1:])  # no multiple of 16
    assert len(compiled) == before and device_of(strict).calls.count("cuModuleLoadData") == calls.count(
        "cuModuleLoadData"
    )


@pytest.mark.parametrize("collective", ["barrier", "all_gather", "broadcast", "all_to_all_v"])
def test_every_collective_is_prepared(collective, strict, compiled):
    strict.prepare(collective, torch.float32, most_bytes=64)
    before, x = len(compiled), torch.ones(16)
    arguments = {"barrier": (), "all_gather": (x,), "broadcast": (x, 0), "all_to_all_v": (x, [16], [16])}
    getattr(strict, collective)(*arguments[collective])
    assert before == len(compiled) > 0


def test_a_quantised_all_reduce_is_prepared(strict, compiled):
    strict.prepare("all_reduce", torch.float32, wire="int8", most_bytes=4096)
    before = len(compiled)
    strict.all_reduce(torch.ones(700), wire="int8")
    assert before == len(compiled) > 0 and set(compiled) == {"all_reduce_two_shot_quantized"}
    with pytest.raises(InvalidArgument, match="prepare: wire='int8' of 'all_gather': only an all_reduce has it"):
        strict.prepare("all_gather", wire="int8")


def test_without_preparing_the_call_is_refused_by_name(strict, compiled):
    words = r"for sm_90 would have to be compiled \(it is neither prebuilt nor prepared\)"
    with pytest.raises(ResourceError, match=rf"{words}.*compile_after_set_up=False.*prepare"):
        strict.all_reduce(torch.ones(8))
    assert compiled == []
    with pytest.raises(tricomm.GroupAborted, match="would have to be compiled"):
        strict.all_reduce(torch.ones(8))


def calls_that_nothing_prepares(comm):
    handle = comm.symmetric((8,), torch.float32)
    return {
        "symmetric": lambda: comm.all_reduce(handle),
        "message": lambda: comm._messages._half("send", torch.ones(8), 0, 0, None),
    }


@pytest.mark.parametrize("kind", ["symmetric", "message"])
def test_a_call_that_nothing_prepares_compiles(kind, strict, compiled):
    strict.prepare("barrier")
    before = len(compiled)
    calls_that_nothing_prepares(strict)[kind]()
    assert len(compiled) > before


@pytest.mark.parametrize("kind", ["symmetric", "message"])
def test_without_that_it_would_be_refused(kind, strict, compiled):
    call = calls_that_nothing_prepares(strict)[kind]
    strict._planner.load = strict._planner.bind
    with pytest.raises(ResourceError, match="would have to be compiled"):
        call()


def test_another_call_than_the_prepared_one_is_refused(strict, compiled):
    strict.prepare("all_reduce", torch.float32, most_bytes=64)
    with pytest.raises(ResourceError, match="all_gather"):
        strict.all_gather(torch.ones(8))


def test_a_kernel_that_another_group_has_loaded_needs_no_compiler(strict, compiled, world):
    with over(OnFakeGpu(world, MINE)) as other:
        other.all_reduce(torch.ones(8))
    assert compiled
    strict.all_reduce(torch.ones(8))


def test_by_default_a_call_compiles(world, compiled):
    with world.device(MINE), over(OnFakeGpu(world, MINE)) as comm:
        comm.all_reduce(torch.ones(8))
    assert compiled


def test_the_environment_refuses_it_for_all_groups(monkeypatch):
    assert with_environment(None).compile_after_set_up
    monkeypatch.setenv("TRICOMM_COMPILE_AFTER_SET_UP", "0")
    assert not with_environment(Options(batch_invariant=True)).compile_after_set_up
    monkeypatch.setenv("TRICOMM_COMPILE_AFTER_SET_UP", "perhaps")
    with pytest.raises(InvalidArgument, match="TRICOMM_COMPILE_AFTER_SET_UP='perhaps'"):
        with_environment(None)


def test_a_kernel_that_cannot_be_prepared_costs_the_group(strict, monkeypatch):
    def fail(*variant, **more):
        raise ResourceError("no compiler")

    monkeypatch.setattr(machine_code, "compiled", fail)
    monkeypatch.setattr(cuda_launcher, "_compiled", {})
    monkeypatch.setattr(cuda_launcher, "_loaded", {})
    with pytest.raises(ResourceError, match="no compiler.*the group is lost"):
        strict.prepare("barrier")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_reduc",), "all_reduc"),
        (("all_reduce", torch.float8_e4m3fn, "band"), "band"),
        (("all_reduce", torch.quint8), "no kernel takes torch.quint8"),
        (("all_reduce", torch.float32, "mean"), "mean"),
        (("all_reduce", "float32"), "a torch.dtype"),
        (("send",), "send"),
        (("all_reduce_rows",), "all_reduce_rows"),
    ],
)
def test_calls_that_do_not_exist_are_refused(arguments, words, url):
    with communicator(0, 1, url) as comm:
        with pytest.raises(InvalidArgument, match=words):
            comm.prepare(*arguments)
        with pytest.raises(InvalidArgument, match="most_bytes=-1"):
            comm.prepare("all_reduce", most_bytes=-1)
        assert comm.all_reduce(torch.ones(2)).tolist() == [1, 1]


def test_on_a_cpu_nothing_is_compiled(url):
    with communicator(0, 1, url) as comm:
        names = "all_reduce", "all_gather", "broadcast", "all_to_all", "all_to_all_v", "barrier"
        assert [comm.prepare(name) for name in names] == [0] * 6
        assert comm.prepare(FUSED, torch.bfloat16, hidden=64) == 0


def test_prepare_is_refused_in_a_capture_and_after_close(strict, world):
    with world.capture(world.new_stream()), pytest.raises(InvalidArgument, match="prepare before or after the capture"):
        strict.prepare("barrier")
    strict.close()
    with pytest.raises(tricomm.GroupAborted):
        strict.prepare("barrier")
