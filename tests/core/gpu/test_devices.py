"""A rank's device exists and belongs to that rank alone unless `share_device` is set. torch's CUDA is a fake."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import tricomm
from tests.store.cuda.fake_driver import FakeCuda
from tests.store.store_ranks import pages, succeed
from tests.topology import shapes
from tests.topology.fake_nvml import uuid_of
from tricomm import env
from tricomm.core import bootstrap, topology_agreement
from tricomm.core.bootstrap import Terms, pick_device
from tricomm.errors import InvalidArgument
from tricomm.kernels import layout
from tricomm.metrics.counters import NCCL
from tricomm.options import Options
from tricomm.perf.bench import measure
from tricomm.store.arenas.open_arena import open_cuda
from tricomm.topology import discovery
from tricomm.topology.model import Topology


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cuda:2", "cuda:9", torch.device("cuda", 7)])
def test_a_device_that_does_not_exist_is_refused_with_a_list_of_devices(device: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"cuda:0 \(GPU number 0\), cuda:1 \(GPU number 1\).*CUDA_VISIBLE_DEVICES"
    ):
        pick_device(device)


@pytest.mark.usefixtures("two_gpus")
def test_a_bad_device_is_refused_before_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: Any) -> Any:
        raise AssertionError("the store was opened")

    monkeypatch.setattr("tricomm.communicator.open_store", meet)
    with pytest.raises(InvalidArgument, match="cuda:9"):
        tricomm.init("tcp://127.0.0.1:1", 0, 2, "cuda:9")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("device", "local", "index"), [("cuda:1", None, 1), ("cuda", None, 0), ("cuda", "1", 1)])
def test_devices_that_exist_are_accepted(
    device: str, local: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert pick_device(device) == torch.device("cuda", index)


class Job:
    """Ranks that join on fake GPUs; `devices[rank]` is the device of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: list[int]) -> None:
        self.devices, self.world = devices, FakeCuda(2)
        self.drivers = [self.world.process() for _ in devices]
        self.plan = layout.plan(len(devices), 2 << 20)
        monkeypatch.setattr(discovery.TorchCuda, "device_uuid", lambda self, ordinal: uuid_of(ordinal))
        monkeypatch.setattr(topology_agreement, "_found", lambda uuids: discovery.Discovery(None, "not asked"))
        monkeypatch.setattr(topology_agreement.agree, "__defaults__", (topology_agreement._found, None))
        monkeypatch.setattr(bootstrap, "fallback", lambda device, options: (NCCL, ""))

        def arena(
            control: Any, nbytes: int, device: torch.device, timeout: float, reach: Any, multicast: bool, lender: Any
        ) -> Any:
            return open_cuda(control, nbytes, device, timeout, self.drivers[control.rank], reach, lender)

        monkeypatch.setattr(bootstrap, "open_arena", arena)

    def join(self, options: Callable[[int], Options]) -> list[str]:
        """The kind of arena, or the error, of every rank."""
        store, size = HashStore(), len(self.devices)

        def run(rank: int) -> str:
            where = torch.device("cuda", self.devices[rank])
            try:
                with ExitStack() as undo:
                    terms = Terms(rank, size, where, 20.0, 20.0, options(rank), self.plan)
                    return bootstrap.join(undo, store, terms).arena.kind
            except InvalidArgument as error:
                return str(error)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, range(size)))


OWN, SHARED = Options(arena_bytes=2 << 20), Options(arena_bytes=2 << 20, share_device=True)


def test_ranks_on_one_gpu_are_refused_on_all_ranks_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [0, 1, 0])
    for text in job.join(lambda rank: OWN):
        assert "ranks 0, 2 are on one GPU" in text and "share_device=True" in text and "TRICOMM_SHARE_DEVICE=1" in text
    assert job.world.log == [], "no GPU memory was allocated"


def test_a_topology_that_is_given_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Options(arena_bytes=2 << 20, topology=shapes.pcie(2))
    for text in Job(monkeypatch, [1, 1]).join(lambda rank: given):
        assert "ranks 0, 1 are on one GPU" in text


@pytest.mark.parametrize("devices", [[0, 0], [0, 1, 0]])
def test_ranks_share_a_gpu_if_share_device_is_set(devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, devices)
    assert job.join(lambda rank: SHARED) == ["cuda_vmm"] * len(devices)
    job.world.verify()


def test_ranks_on_different_gpus_need_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job(monkeypatch, [1, 0]).join(lambda rank: OWN) == ["cuda_vmm"] * 2


@pytest.mark.parametrize("name", ["TRICOMM_SHARE_DEVICE", "NCCL_MULTI_RANK_GPU_ENABLE"])
def test_the_environment_sets_share_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert Job(monkeypatch, [0, 0]).join(lambda rank: OWN) == ["cuda_vmm"] * 2


def test_all_ranks_of_a_gpu_have_to_set_share_device(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [0, 0])
    said = iter([True, False])
    monkeypatch.setattr(env, "share_device", lambda: next(said))  # the ranks are threads of one process here
    assert all("ranks 0, 1 are on one GPU" in text for text in job.join(lambda rank: OWN))


def test_without_the_check_they_share_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_agreement, "_refuse_shared", lambda uuids, may_share: None)
    assert Job(monkeypatch, [0, 0]).join(lambda rank: OWN) == ["cuda_vmm"] * 2


@pytest.mark.usefixtures("two_gpus")
def test_local_rank_beyond_the_gpus_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above then finds the difference."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert pick_device(None) == torch.device("cuda", 0) == measure.pick_device("cuda", 2)


def test_links_that_ranks_see_differently_are_not_relied_on(caplog: pytest.LogCaptureFixture) -> None:
    def agreed(*found: Topology) -> list[Any]:
        def agree(rank: int) -> Topology | None:
            device, here = torch.device("cuda:0"), discovery.Discovery(found[rank])
            return topology_agreement.agree(group[rank], Options(), device, 10.0, lambda _: here, uuid_of(rank))

        with pages(4) as group:
            return succeed(4, agree)

    four = shapes.pcie(4)
    assert agreed(*[four] * 4) == [four] * 4 and not caplog.records
    assert agreed(four, shapes.pairs(4), four, four) == [None] * 4
    assert "ranks find different links between their GPUs" in caplog.text


class Alone:
    """A control page that exchanges records with a rank of the given facts."""

    def __init__(self, uuid: str, processors: int) -> None:
        self.theirs = topology_agreement._DEVICE.pack(uuid.encode(), b"sm_90", processors)

    def exchange(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        return [payload, self.theirs]


@pytest.mark.parametrize(
    ("uuid", "processors", "most"), [("a", 132, 64), ("b", 132, 64), ("b", 40, 40), ("a", 40, 20), ("a", 1, 1)]
)
def test_ranks_that_share_a_gpu_share_its_processors(uuid: str, processors: int, most: int) -> None:
    mine = topology_agreement.DeviceFacts("a", "sm_90", processors)
    page: Any = Alone(uuid, processors)
    assert topology_agreement.agree_on_devices(page, mine, None, 1.0)[1] == most
    assert topology_agreement.agree_on_devices(page, mine, 7, 1.0)[1] == min(7, most)


@pytest.mark.parametrize(("given", "queues"), [("", 8), ("1", 1), ("32", 32), ("many", 8)])
def test_hardware_queues_are_those_that_the_driver_makes(
    given: str, queues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert env.hardware_queues() == queues


def test_share_device_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="share_device='yes'"):
        Options(share_device="yes")  # type: ignore[arg-type]
