"""Discovery on machines of a fake NVML and a fake CUDA: devices and links are found, missing ones are explained."""

import sys
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from tests.store.cuda.fake_driver import FakeCuda as FakeCudaWorld
from tests.topology import fake_nvml, shapes
from tests.topology.fake_ml_py import FakeMlPy, c_old_fabric_info
from tests.topology.fake_nvml import Card, FakeCuda, FakeNvml, known, look, meshed, switched, uuid_of
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.topology import discovery, nvml
from tricomm.topology.discovery import Discovery

DGX1V = shapes.dgx1v()
UNLINKED = {frozenset({i, j}) for i in range(8) for j in range(8) if i != j and not DGX1V.links[i][j]}


def dgx1v() -> FakeNvml:
    fake = FakeNvml(meshed(DGX1V.links))
    fake.forbidden = set(UNLINKED)
    return fake


def test_the_dgx_1() -> None:
    result = look(dgx1v(), list(range(8)), UNLINKED)
    topology = known(result)
    assert topology.digest == DGX1V.digest and topology.kind == "hybrid_cube_mesh"
    assert topology.names == ("Fake V100",) * 8 and result.notes == () and result.fabric == ()


@pytest.mark.parametrize("visible", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 7, 2, 5, 4], [5], [6, 2], [4, 5, 0, 3, 1]])
def test_devices_are_numbered_as_cuda_does_whatever_order_nvml_has(visible: list[int]) -> None:
    assert known(look(dgx1v(), visible, UNLINKED)).canonical == DGX1V.of(visible).canonical


def test_facts_from_the_cuda_driver() -> None:
    """`store.cuda.cuda_driver.Driver` serves as the CUDA of discovery."""
    driver = FakeCudaWorld(8, lambda a, b: frozenset({a, b}) not in UNLINKED).process([6, 1, 2, 5])
    driver.init()
    fake = dgx1v()
    result = discovery.read(driver, fake.nvml())
    assert known(result).canonical == DGX1V.of([6, 1, 2, 5]).canonical
    fake.verify()


def test_a_groups_topology_does_not_depend_on_the_gpus_visible_to_its_ranks() -> None:
    ranks = [5, 1, 5, 7]
    seen = set()
    for visible in ([5, 1, 7], [7, 6, 5, 4, 3, 2, 1, 0], [5], [1], []):
        fake = dgx1v()
        fake.unreachable = set(UNLINKED)
        result = discovery.of_devices([uuid_of(rank) for rank in ranks], FakeCuda(visible, UNLINKED), fake.nvml())
        fake.verify()
        seen.add(known(result).canonical)
    assert seen == {DGX1V.of(ranks).canonical}


@pytest.mark.parametrize("uuids", [[], [b"short"], ["GPU-1"], [uuid_of(1), None]])
def test_texts_that_name_no_devices(uuids: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="16 bytes"):
        discovery.of_devices(uuids, FakeCuda([]), dgx1v().nvml())


@pytest.mark.parametrize("instance", [True, False])
def test_mig_has_no_links_and_no_peers(instance: bool) -> None:
    """CUDA may name an instance, or the GPU that is split; NVML knows both."""
    cards = switched(3)
    cards[1].mig, cards[1].instance = not instance, instance
    result = look(FakeNvml(cards), [0, 1, 2])
    assert known(result).links == ((0, 0, 18), (0, 0, 0), (18, 0, 0))
    assert known(result).peers == ((True, False, True), (False, True, False), (True, False, True))
    assert result.notes == ("device 1: MIG, so no NVLink and no peer access or CUDA IPC with other instances",)


def test_ranks_that_share_a_mig_instance_reach_each_other() -> None:
    fake = FakeNvml([Card(0, instance=True), Card(1, instance=True)])
    result = discovery.of_devices([uuid_of(0), uuid_of(0), uuid_of(1)], FakeCuda([0]), fake.nvml())
    fake.verify()
    assert known(result).peers == ((True, True, False), (True, True, False), (False, False, True))


def test_peer_access_is_asked_of_cuda_and_may_be_one_way() -> None:
    cuda = FakeCuda([0, 1])
    cuda.can_access_peer = lambda i, j: (i, j) == (0, 1)  # type: ignore[method-assign]
    fake = FakeNvml([Card(0), Card(1)])
    assert known(discovery.read(cuda, fake.nvml())).peers == ((True, True), (False, True))
    fake.verify()


def test_peer_access_of_cards_that_this_process_does_not_see_may_go_over_pcie() -> None:
    fake = FakeNvml(meshed(shapes.pairs(4).links))
    fake.forbidden = {frozenset({0, 2}), frozenset({1, 2})}
    fake.unreachable = {frozenset({1, 2})}
    result = discovery.of_devices([uuid_of(0), uuid_of(2), uuid_of(1)], FakeCuda([0]), fake.nvml())
    fake.verify()
    assert known(result).peers == ((True, True, True), (True, True, False), (True, False, True))
    assert known(result).links == ((0, 0, 4), (0, 0, 0), (4, 0, 0)) and result.notes == ()


def test_peer_access_is_unknown_without_cuda() -> None:
    fake = FakeNvml([Card(0), Card(1)])
    fake.silent = True
    result = discovery.of_devices([uuid_of(0), uuid_of(1)], FakeCuda([0]), fake.nvml())
    fake.verify()
    assert not known(result).all_peers
    assert (
        result.notes[0] == "device 0 to 1: no peer access, because neither CUDA nor NVML tells"
        and len(result.notes) == 2
    )


def test_cuda_that_fails_at_peer_access() -> None:
    cuda = FakeCuda([0, 1])

    def broken(*_: int) -> bool:
        raise RuntimeError("CUDA error: system not yet initialized")

    cuda.can_access_peer = broken  # type: ignore[method-assign]
    result = discovery.read(cuda, FakeNvml(meshed(((0, 1), (1, 0)))).nvml())
    assert known(result).peers == ((True, False), (False, True))
    assert "device 0 to 1: no peer access" in result.notes[0] and "not yet initialized" in result.notes[0]
    cuda.device_uuid = broken  # type: ignore[assignment,method-assign]
    result = discovery.of_devices([uuid_of(0), uuid_of(1)], cuda, FakeNvml([Card(0), Card(1)]).nvml())
    assert known(result).all_peers and result.notes[0].startswith("peer access is NVML's answer")
    result = discovery.read(cuda, FakeNvml([]).nvml())
    assert result.topology is None and "not yet initialized" in result.reason


def test_no_devices() -> None:
    fake = FakeNvml([Card(0)])
    assert look(fake, []) == Discovery(None, "this process sees no CUDA device")
    assert not fake.calls


def test_two_devices_of_one_uuid() -> None:
    result = look(FakeNvml([Card(0)]), [0, 0])
    assert result.topology is None and "same UUID" in result.reason


def test_more_devices_than_there_may_be() -> None:
    result = discovery.of_devices([uuid_of(0)] * 65, FakeCuda([0]), FakeNvml([Card(0)]).nvml())
    assert result.topology is None and result.reason == "65 devices; 64 are the most"


FATAL = [
    "init_v2",
    "device_get_handle_by_uuid",
    "device_get_pci_info_v3",
    "device_get_nvlink_capability",
    "device_get_nvlink_state",
]


def failing(call: str) -> FakeNvml:
    fake = FakeNvml(meshed(DGX1V.links))
    fake.failures[call, 0] = fake_nvml.GpuIsLostError
    if call == "device_get_handle_by_uuid":
        fake.missing = (call,)
    return fake


@pytest.mark.parametrize("call", FATAL)
def test_a_call_that_fails_leaves_the_links_unknown_with_the_reason(call: str) -> None:
    result = look(failing(call), [1, 0])
    assert result.topology is None
    assert result.reason.startswith("NVML: ") and ("Lost" in result.reason or "not found" in result.reason)


@pytest.mark.parametrize("call", FATAL)
def test_one_device_needs_no_links_to_be_known(call: str) -> None:
    fake = failing(call)
    result = discovery.of_devices([uuid_of(0)] * 2, FakeCuda([0]), fake.nvml())
    assert known(result).canonical == shapes.pcie(1).of([0, 0]).canonical
    assert result.notes[0].startswith("NVML: ")
    fake.verify()


def test_every_optional_call_may_fail() -> None:
    every = {name for name in dir(FakeNvml) if name.startswith("device_")} - set(FATAL)
    assert len(every) == 9
    fake = FakeNvml(meshed(DGX1V.links), tuple(every - {"device_get_nvlink_remote_pci_info_v2"}))
    assert known(look(fake, list(range(8)), UNLINKED)).canonical == DGX1V.canonical
    assert known(look(FakeNvml(meshed(DGX1V.links), tuple(every)), [0, 1])).links == ((0, 0), (0, 0))


def test_a_device_that_nvml_does_not_have() -> None:
    result = look(FakeNvml(meshed(((0, 1), (1, 0)))), [0, 3])
    assert result.topology is None
    assert str(UUID(bytes=uuid_of(3))) in result.reason and "container" in result.reason


def test_an_unexpected_answer_is_a_reason() -> None:
    class Strange(FakeNvml):
        def device_get_pci_info_v3(self, device: int) -> Any:
            return SimpleNamespace()

    result = look(Strange([Card(0), Card(1)]), [0, 1])
    assert result.topology is None and "bus_id" in result.reason


def test_names_that_would_move_the_cursor() -> None:
    result = look(FakeNvml([Card(0, name="Tesla\x1b[2J V100")]), [0])
    assert known(result).names == ("Tesla[2J V100",)


def test_bindings_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    monkeypatch.delattr("cuda.bindings.nvml", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ResourceError, match="pip install nvidia-ml-py"):
        nvml.load_nvml()
    result = discovery.read(FakeCuda([0, 1]))
    assert result.topology is None and "pip install nvidia-ml-py" in result.reason


def test_nvidia_ml_py_replaces_bindings_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeMlPy(dgx1v()))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", dgx1v())
    assert nvml.load_nvml().source.startswith("cuda-bindings ")  # the first choice, where it is there
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", None)
    result = nvml.load_nvml()
    assert result.source == "nvidia-ml-py"
    with result.session():
        assert [len(result.links(device)) for device in result.handles()] == [6] * 8


MACHINES: list[tuple[FakeNvml, int]] = [
    (dgx1v(), 8),
    (FakeNvml(switched(4)), 4),
    (FakeNvml([Card(0, mig=True), Card(1)]), 2),
    (FakeNvml([Card(0, instance=True), Card(1, instance=True)]), 2),
    (FakeNvml([Card(n, fabric=(3, 0, b"ab\0cdefghijklmno", 7)) for n in range(2)]), 2),
    (FakeNvml([Card(n, fabric=(2, 0, bytes(16), 0)) for n in range(2)]), 2),
    (FakeNvml([Card(n) for n in range(4)]), 4),
]


@pytest.mark.parametrize("fake, cards", MACHINES)
def test_nvidia_ml_py_and_the_bindings_give_the_same_topology(fake: FakeNvml, cards: int) -> None:
    seen = list(range(cards))
    result = discovery.read(FakeCuda(seen), FakeMlPy(fake).nvml())
    fake.verify()
    assert result == look(fake, seen) and result.topology is not None


def test_an_nvidia_ml_py_with_a_wrong_structure_reports_no_fabric() -> None:
    fake = FakeNvml([Card(n, fabric=(3, 0, bytes(16), 7)) for n in range(2)])
    module = FakeMlPy(fake)
    module.c_nvmlGpuFabricInfoV_t = c_old_fabric_info
    result = discovery.read(FakeCuda([0, 1]), module.nvml())
    assert result.topology is not None and result.fabric == ()


def test_the_real_nvidia_ml_py_has_all_that_is_called() -> None:
    module = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeMlPy) if name.startswith(("nvmlD", "NVML", "c_nvml"))]
    assert [name for name in (*names, "nvmlInit", "nvmlShutdown") if not hasattr(module, name)] == []
    assert module.c_nvmlGpuFabricInfoV_t.clusterUuid.size == 16
    with pytest.raises(ResourceError, match="NVMLError"):
        nvml.Nvml(nvml.MlPy(module)).handle(bytes(16))


def test_the_real_bindings_have_all_that_is_called() -> None:
    bindings = pytest.importorskip("cuda.bindings.nvml")
    called = [name for name in dir(FakeNvml) if name.startswith(("device_", "init_", "shutdown"))]
    assert len(called) == 15
    for name in (*called, "NotSupportedError", "InvalidArgumentError", "NotFoundError", "NVLINK_MAX_LINKS"):
        assert hasattr(bindings, name), name
    assert hasattr(bindings.PciInfo(), "bus_id")
    fabric = bindings.GpuFabricInfo_v3()
    assert len(bytes(bytearray(fabric.cluster_uuid))) == 16
    assert (int(fabric.state), int(fabric.status), int(fabric.clique_id)) == (0, 0, 0)
    for kind, number, name in [
        ("IntNvLinkDeviceType", 0, "GPU"),
        ("IntNvLinkDeviceType", 2, "SWITCH"),
        ("IntNvLinkDeviceType", 255, "UNKNOWN"),
        ("NvLinkCapability", 0, "P2P_SUPPORTED"),
        ("GpuP2PCapsIndex", 0, "READ"),
        ("GpuP2PCapsIndex", 1, "WRITE"),
        ("GpuP2PCapsIndex", 2, "NVLINK"),
        ("GpuP2PStatus", 0, "OK"),
        ("GpuFabricState", 3, "COMPLETED"),
    ]:
        assert getattr(bindings, kind)(number).name.endswith(name)


def test_torch_reports_the_same_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [SimpleNamespace(uuid=text + str(UUID(bytes=uuid_of(3)))) for text in ("", "GPU-")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (1, 0))
    cuda = discovery.TorchCuda()
    assert cuda.device_count() == 2 and {cuda.device_uuid(0), cuda.device_uuid(1)} == {uuid_of(3)}
    assert cuda.can_access_peer(1, 0) and not cuda.can_access_peer(0, 1)


def test_pci_addresses_have_the_form_of_sysfs(tmp_path: Any) -> None:
    assert nvml.pci_class("ffff:ff:1f.7") is None
    assert nvml.pci_class("../nowhere") is None
    assert nvml._address("00000000:0A:00.0") == "0000:0a:00.0"
    assert nvml._address("0001:0A:1F.1") == "0001:0a:1f.1"
    assert nvml._address("0007C2DE:04:00.0") == "7c2de:04:00.0"
    assert nvml._address("ffffffff:ffff:ff") is None and nvml._address("") is None
