"""The driver layer over the real bindings as far as they go without a GPU, and the fake's rules, each one broken."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

import pytest

from tests.store.cuda.fake_driver import FakeCuda, FakeDriver
from tricomm.errors import ResourceError
from tricomm.store.cuda.cuda_driver import Driver, load_driver


def no_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def current_in(driver: Driver) -> None:
    with driver.current(1):
        pass


CALLS: dict[str, Callable[[Driver], object]] = {
    "cuInit": lambda d: d.init(),
    "cuDeviceGetCount": lambda d: d.device_count(),
    "cuDeviceGet": lambda d: d.device_uuid(0),
    "cuThreadExchangeStreamCaptureMode": lambda d: d.relax_capture(),
    "cuCtxPushCurrent": current_in,
    "cuMemAlloc": lambda d: d.mem_alloc(8),
    "cuMemFree": lambda d: d.mem_free(8),
    "cuMemGetAddressRange": lambda d: d.mem_range(8),
    "cuMemsetD8": lambda d: d.memset(8, 0, 8),
    "cuMemcpyDtoH": lambda d: d.read(8, 8),
    "cuMemcpyHtoD": lambda d: d.write(8, b"12345678"),
    "cuCtxSynchronize": lambda d: d.synchronize(),
    "cuIpcGetMemHandle": lambda d: d.ipc_get_handle(8),
    "cuIpcOpenMemHandle": lambda d: d.ipc_open_handle(bytes(64)),
    "cuIpcCloseMemHandle": lambda d: d.ipc_close_handle(8),
    "cuMemHostRegister": lambda d: d.host_register(4096, 4096),
    "cuMemHostUnregister": lambda d: d.host_unregister(4096),
}
ON_A_DEVICE = {
    "cuDeviceGetUuid": lambda d: d.device_uuid(0),
    "cuDeviceGetPCIBusId": lambda d: d.device_bus_id(0),
    "cuDeviceCanAccessPeer": lambda d: d.can_access_peer(0, 1),
    "cuDevicePrimaryCtxRetain": lambda d: d.retain_context(0),
    "cuDevicePrimaryCtxRelease": lambda d: d.release_context(0),
}


@pytest.mark.skipif(not no_libcuda(), reason="has NVIDIA's driver")
@pytest.mark.parametrize("name", sorted(CALLS.keys() | ON_A_DEVICE.keys()))
def test_real_bindings_take_the_arguments_and_miss_only_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")
    driver = load_driver()
    if name in ON_A_DEVICE:
        monkeypatch.setattr(driver, "_device", lambda ordinal: driver._bindings.CUdevice(ordinal))
    with pytest.raises(ResourceError, match=rf"{name}.*libcuda\.so\.1.*pip install tricomm\[cuda\]"):
        {**CALLS, **ON_A_DEVICE}[name](driver)


def test_real_handle_carries_64_bytes() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    handle = bindings.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    assert ctypes.string_at(handle.getPtr(), 64) == bytes(range(64))
    assert bindings.CU_MEMHOSTREGISTER_PORTABLE | bindings.CU_MEMHOSTREGISTER_DEVICEMAP == 3
    assert bindings.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1
    assert len(bytes(bindings.CUuuid().bytes)) == 16


def test_missing_bindings_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    load_driver.cache_clear()
    try:
        with pytest.raises(ResourceError, match=r"pip install tricomm\[cuda\]"):
            load_driver()
    finally:
        load_driver.cache_clear()


def test_older_bindings_name_mig_instances_by_the_second_form() -> None:
    driver = ready()
    driver.process.cuDeviceGetUuid_v2 = lambda device: (0, type("U", (), {"bytes": b"2" * 16})())  # type: ignore
    assert driver.device_uuid(0) == b"2" * 16


def test_facts_of_a_device() -> None:
    driver = FakeCuda(2).process([1, 0])
    driver.init()
    assert driver.device_count() == 2
    assert driver.device_bus_id(0) == "0000:01:00.0"
    assert driver.can_access_peer(0, 1)
    assert driver.device_uuid(0) == ready(FakeCuda(2)).device_uuid(1) != driver.device_uuid(1)


def test_a_page_that_cannot_be_mapped_is_not_left_pinned() -> None:
    driver, page = ready(), mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    driver.fail_at("cuMemHostGetDevicePointer")
    with driver.current(CONTEXT), pytest.raises(ResourceError, match="cuMemHostGetDevicePointer"):
        driver.host_register(address, 4096)
    assert driver.calls[-2:] == ["cuMemHostUnregister", "cuCtxPopCurrent"]


CONTEXT = 1000


def ready(world: FakeCuda | None = None) -> FakeDriver:
    """The first process of a world, with its first GPU's context retained."""
    driver = (world or FakeCuda()).process()
    driver.init()
    driver.retain_context(0)
    return driver
