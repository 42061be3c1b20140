"""The adapter for vLLM without vLLM: the classes that it extends or uses are fakes."""

from __future__ import annotations

import logging
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tricomm.engines import engine_group, vllm_communicator, vllm_plugin
from tricomm.engines.engine_group import Engine
from tricomm.engines.versions import VersionRange
from tricomm.errors import InvalidArgument, ResourceError

LOG = logging.getLogger("engine")


class CudaCommunicator:
    """The part of vLLM's class that the adapter uses; counts the calls that it gets."""

    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        self.cpu_group = cpu_group
        self.device = device
        self.unique_name = unique_name
        self.world_size = 2
        self.ca_comm = None
        self.own = []

    def all_reduce(self, input_):
        self.own.append("all_reduce")
        return input_

    def all_gather(self, input_, dim=-1):
        self.own.append("all_gather")

    def reduce_scatter(self, input_, dim=-1):
        self.own.append("reduce_scatter")

    def suspend(self):
        self.own.append("suspend")

    def resume(self):
        self.own.append("resume")

    def destroy(self):
        self.own.append("destroy")


def _made(refusal=lambda: None, base=CudaCommunicator):
    name = vllm_communicator.communicator_class(base, Engine("vLLM", LOG), refusal)
    assert name == "tricomm.engines.vllm_communicator.TricommCudaCommunicator"
    return getattr(vllm_communicator, name.rpartition(".")[2])


def test_it_extends_vllms_class_and_does_nothing_without_a_store(caplog):
    made = _made()(object(), torch.device("cpu"), None, unique_name="tp:0")
    assert isinstance(made, CudaCommunicator)  # vLLM's graph_capture requires these
    made.all_reduce(torch.ones(2))
    made.all_gather(torch.ones(2), 0)
    made.reduce_scatter(torch.ones(2), 0)
    made.suspend()
    made.resume()
    made.destroy()
    assert made.own == ["all_reduce", "all_gather", "reduce_scatter", "suspend", "resume", "destroy"]
    assert "every call is left to vLLM: torch.distributed did not make this group" in caplog.text


def test_microbatches_and_other_groups_are_left_to_vllm(caplog):
    made = _made(lambda: "two streams")
    assert made(object(), torch.device("cpu"), unique_name="tp:0").tricomm.why_not == "two streams"
    assert "two streams" in caplog.text
    caplog.clear()
    assert "only the groups dcp, tp" in made(object(), torch.device("cpu"), unique_name="ep:0").tricomm.why_not
    assert caplog.text == ""


def test_members_that_a_newer_vllm_lacks_are_named():
    class Changed(CudaCommunicator):
        def __init__(self, cpu_group, device=None, device_group=None, name=""):
            self.cpu_group = cpu_group

        def all_gather(self, input_, axis=-1):
            pass

        def reduce_scatter(self, input_, dim, stream):
            pass

        resume = None

    assert vllm_communicator.misfits(CudaCommunicator) == []
    assert vllm_communicator.misfits(Changed) == [
        "Changed.__init__ has no parameter 'unique_name'",
        "Changed.all_gather has no parameter 'dim'",
        "Changed.reduce_scatter needs the parameter 'stream'",
        "Changed.resume is gone",
    ]


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_a_version_outside_the_tested_range_is_refused_by_name(version):
    text = VersionRange((0, 32), (0, 33)).refusal("vLLM", version)
    assert text is not None and f"vLLM {version} is outside the range" in text and "0.32 to 0.33" in text


@pytest.mark.parametrize("version", ["0.32.0", "0.33.7rc1", "0.33.0+cpu"])
def test_a_version_in_the_tested_range_is_accepted(version):
    assert VersionRange((0, 32), (0, 33)).refusal("vLLM", version) is None


@pytest.fixture
def vllm(monkeypatch):
    """Fake modules with the names that the plugin imports, and a platform that tests may patch."""

    class CudaPlatform:
        kind = "cuda"

        @classmethod
        def get_device_communicator_cls(cls):
            return "tests.engines.test_vllm_fakes.CudaCommunicator"

        def is_cuda(self):
            return self.kind == "cuda"

        def is_cpu(self):
            return False

    def module(name, **values):
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    parallel = types.SimpleNamespace(use_ubatching=False)
    result = module("vllm", __version__="0.32.0", envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.config", get_current_vllm_config_or_none=lambda: types.SimpleNamespace(parallel_config=parallel))
    module("vllm.platforms", current_platform=CudaPlatform())
    module("vllm.utils")
    module("vllm.utils.import_utils", resolve_obj_by_qualname=lambda name: CudaCommunicator)
    result.platform, result.parallel = CudaPlatform, parallel
    return result


def test_the_plugin_patches_one_classmethod_once(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_TRICOMM", "1")
    vllm_plugin.register()
    vllm_plugin.register()
    name = vllm.platform.get_device_communicator_cls()
    assert name == "tricomm.engines.vllm_communicator.TricommCudaCommunicator"
    made = getattr(vllm_communicator, "TricommCudaCommunicator")  # noqa: B009
    assert made.__mro__[1:3] == (vllm_communicator.VllmCollectives, CudaCommunicator)
    vllm.parallel.use_ubatching = True
    assert "microbatches" in made(object(), torch.device("cpu"), unique_name="tp:0").tricomm.why_not


def test_without_the_variable_the_plugin_does_nothing(monkeypatch):
    monkeypatch.delenv("VLLM_TRICOMM", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    vllm_plugin.register()


def test_a_variable_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TRICOMM", "maybe")
    with pytest.raises(InvalidArgument, match="VLLM_TRICOMM='maybe'"):
        vllm_plugin.register()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"__version__": "0.40.1"}, "vLLM 0.40.1 is outside the range"), ({}, "there are no kernels for the")],
)
def test_an_unsupported_vllm_is_left_unpatched(vllm, monkeypatch, caplog, change, said):
    monkeypatch.setenv("VLLM_TRICOMM", "1")
    vars(vllm).update(change)
    if not change:
        monkeypatch.setattr(vllm.platform, "kind", "rocm")
    vllm_plugin.register()
    assert f"VLLM_TRICOMM=1 has no effect: {said}" in caplog.text
    assert vllm.platform.get_device_communicator_cls() == "tests.engines.test_vllm_fakes.CudaCommunicator"


@pytest.mark.parametrize("text", ["-1", "many"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(monkeypatch, text):
    monkeypatch.setenv("TRICOMM_ENGINE_MAX_BYTES", text)
    with pytest.raises(InvalidArgument, match="TRICOMM_ENGINE_MAX_BYTES"):
        engine_group.max_bytes()


def test_the_group_of_an_engine_quantises_by_the_variable(monkeypatch):
    monkeypatch.setenv("TRICOMM_CPU", "kernels")
    monkeypatch.setenv("TRICOMM_WIRE", "int8")
    seat = engine_group.Seat(HashStore(), 0, 1, torch.device("cpu"), "tp:0")
    group = engine_group.EngineGroup(seat, Engine("vLLM", LOG))
    assert group.comm.options.wire == "int8", group.why_not
    group.comm.close()


def test_an_invalid_limit_on_one_rank_is_reported_on_all_at_once(monkeypatch):
    monkeypatch.setattr(
        engine_group, "max_bytes", lambda: _raising(InvalidArgument("no bytes"))() if who.rank else None
    )
    store, who = HashStore(), threading.local()

    def run(rank):
        who.rank = rank
        seat = engine_group.Seat(store, rank, 2, torch.device("cpu"), "tp:0")
        return engine_group.EngineGroup(seat, Engine("vLLM", LOG)).why_not

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        reasons = list(pool.map(run, range(2)))
    assert all("no bytes" in why for why in reasons) and time.monotonic() - began < 10


def _pretending(engine, device="cuda", invariant=False):
    """A group that claims to run on two GPUs, and to have reduced 4 elements; it captures if `.comm.gpu.now`."""
    gpu = types.SimpleNamespace(now=False)
    gpu.capturing = lambda: gpu.now
    made = {("all_reduce", 4)}
    planner = types.SimpleNamespace(may_capture=lambda request, dtype, count: (request.collective, count) in made)
    closed: list[bool] = []
    group = engine_group.without("tp:0", engine, "", logging.DEBUG)
    group.comm = types.SimpleNamespace(
        gpu=gpu,
        device=torch.device("cpu"),
        world_size=2,
        options=tricomm.Options(),
        close=lambda: closed.append(True),
        suspended=False,
        _internal=types.SimpleNamespace(planner=planner),
    )
    most = engine_group._ANY_SIZE if invariant or engine.invariant else None
    facts = engine_group.GroupFacts(device, 2, 1, None, "nccl", batch_invariant=invariant, most_bytes=most)
    group._router = engine_group.Router(facts, "tp:0", 1, engine.name)
    group._seat = engine_group.Seat(None, 1, 2, torch.device("cpu"), "tp:0")
    return group, closed


def test_a_capture_takes_only_sizes_that_were_called_before_and_keeps_its_memory(caplog):
    group, closed = _pretending(Engine("vLLM", LOG))
    x, y = torch.ones(4), torch.ones(5)
    comm = group.comm
    assert group.takes("all_reduce", x)
    comm.gpu.now = True
    assert not group.takes("all_reduce", y) and not group.takes("all_gather", x)
    assert not group._captured and group.takes("all_reduce", x)
    comm.suspend = _raising(InvalidArgument("legacy CUDA IPC cannot"))
    group.suspend()
    assert closed == [] and group.comm is comm and "legacy CUDA IPC cannot" in caplog.text
    assert "captured without a call of that size before" in caplog.text
    assert "CUDA graphs hold their addresses" in caplog.text
    group.close()
    assert closed == [True] and not group.takes("all_reduce", x)
    with pytest.raises(InvalidArgument, match="it is closed"):
        group.all_reduce(x)


def test_nvls_raises_the_size_up_to_which_calls_are_taken():
    group, _ = _pretending(Engine("vLLM", LOG))
    group._router.facts = engine_group.GroupFacts("cuda", 8, 1, None, "nccl", switch=True)
    assert group._up_to("all_reduce") == f"up to {16 << 20} bytes"
    assert group._up_to("all_gather") == f"up to {8 << 20} bytes"
    x = torch.empty(9 << 20, dtype=torch.uint8)
    assert not group.takes("all_reduce", x), "NVLS does not reduce bytes"
    assert group.takes("all_reduce", x.view(torch.bfloat16)) and not group.takes("all_gather", x.view(torch.bfloat16))


def _raising(error):
    def refuse():
        raise error

    return refuse


def test_sleep_keeps_a_communicator_whose_addresses_can_be_kept(caplog):
    group, closed = _pretending(Engine("vLLM", LOG))
    comm, x = group.comm, torch.ones(4)
    comm.suspend = lambda: setattr(comm, "suspended", True)
    comm.resume = lambda: setattr(comm, "suspended", False)
    for _ in range(2):
        group.suspend()
        assert comm.suspended and not group.takes("all_reduce", x) and not group.takes_rms_norm(x, x)
    for _ in range(2):
        group.resume()
        assert not comm.suspended and group.takes("all_reduce", x) and group.comm is comm and closed == []
    comm.gpu.now = True
    assert group.takes("all_reduce", x)  # captured
    comm.gpu.now = False
    group.suspend()
    comm.resume = _raising(ResourceError("no memory"))
    with pytest.raises(ResourceError, match="no memory"):
        group.resume()
    assert group.comm is comm, "the graph needs the memory, so it may be tried again"
    group._captured = False
    group.resume()
    assert group.comm is None and closed == [True] and "no memory" in caplog.text
    group, closed = _pretending(Engine("vLLM", LOG))
    group.comm.suspend = _raising(InvalidArgument("legacy CUDA IPC cannot"))
    group.suspend()
    assert group.comm is None and closed == [True], "without graphs all memory is freed"


def test_the_table_limits_sizes_unless_reductions_are_batch_invariant():
    largest, larger = torch.empty(8 << 20, dtype=torch.uint8), torch.empty((8 << 20) + 2, dtype=torch.uint8)
    group, _ = _pretending(Engine("vLLM", LOG))
    assert group.takes("all_reduce", largest) and not group.takes("all_reduce", larger)
    assert group.takes("reduce_scatter", largest) and not group.takes("reduce_scatter", torch.ones(3))
    for engine, own in ((Engine("vLLM", LOG, invariant=True), False), (Engine("vLLM", LOG), True)):
        group, _ = _pretending(engine, invariant=own)
        assert group.takes("all_reduce", larger)
    with pytest.raises(InvalidArgument, match="refused in a batch-invariant group"):
        group.takes("all_reduce", torch.ones(2, dtype=torch.uint16))
