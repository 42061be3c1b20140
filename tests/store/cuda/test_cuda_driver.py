"""The driver layer over the real bindings, as far as possible without a GPU, and the rules that the fake enforces."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.store.cuda.fake_bindings import GRANULE, CUipcMemHandle
from tests.store.cuda.fake_driver import CudaRuleBroken, FakeCuda, FakeDriver
from tricomm.errors import ResourceError
from tricomm.store.cuda.cuda_driver import Driver, load_driver
from tricomm.store.segments import Segment


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
def test_real_bindings_take_the_arguments_and_miss_only_the_library(name, monkeypatch):
    pytest.importorskip("cuda.bindings.driver")
    driver = load_driver()
    if name in ON_A_DEVICE:
        monkeypatch.setattr(driver, "_device", lambda ordinal: driver._bindings.CUdevice(ordinal))
    with pytest.raises(ResourceError, match=rf"{name}.*libcuda\.so\.1.*pip install tricomm\[cuda\]"):
        {**CALLS, **ON_A_DEVICE}[name](driver)


def test_real_handle_carries_64_bytes():
    bindings = pytest.importorskip("cuda.bindings.driver")
    handle = bindings.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
    assert ctypes.string_at(handle.getPtr(), 64) == bytes(range(64))
    assert bindings.CU_MEMHOSTREGISTER_PORTABLE | bindings.CU_MEMHOSTREGISTER_DEVICEMAP == 3
    assert bindings.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1
    assert len(bytes(bindings.CUuuid().bytes)) == 16


def test_missing_bindings_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    load_driver.cache_clear()
    try:
        with pytest.raises(ResourceError, match=r"pip install tricomm\[cuda\]"):
            load_driver()
    finally:
        load_driver.cache_clear()


def test_older_bindings_name_mig_instances_by_the_second_form():
    driver = ready()
    driver.process.cuDeviceGetUuid_v2 = lambda device: (0, type("U", (), {"bytes": b"2" * 16})())  # type: ignore
    assert driver.device_uuid(0) == b"2" * 16


def test_facts_of_a_device():
    driver = FakeCuda(2).process([1, 0])
    driver.init()
    assert driver.device_count() == 2
    assert driver.device_bus_id(0) == "0000:01:00.0"
    assert driver.can_access_peer(0, 1)
    assert driver.device_uuid(0) == ready(FakeCuda(2)).device_uuid(1) != driver.device_uuid(1)


def test_a_page_that_cannot_be_mapped_is_not_left_pinned():
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


def exported(world: FakeCuda) -> tuple[FakeDriver, int, bytes]:
    owner = ready(world)
    with owner.current(CONTEXT):
        base = owner.mem_alloc(GRANULE)
        return owner, base, owner.ipc_get_handle(base)


def importer(world: FakeCuda, ordinal: int = 0) -> tuple[FakeDriver, int]:
    driver = world.process()
    driver.init()
    return driver, driver.retain_context(ordinal)


@contextmanager
def exporting(world: FakeCuda) -> Iterator[tuple[FakeDriver, int]]:
    """A process in its context, and a block whose handle it has exported."""
    owner, base, _ = exported(world)
    with owner.current(CONTEXT):
        yield owner, base


@contextmanager
def mapped(world: FakeCuda) -> Iterator[tuple[FakeDriver, int]]:
    """Another process in its context, and the address at which it has mapped the first one's block."""
    _, _, handle = exported(world)
    peer, context = importer(world)
    with peer.current(context):
        yield peer, peer.ipc_open_handle(handle)


def free_while_mapped(world: FakeCuda) -> None:
    owner, base, handle = exported(world)
    peer, context = importer(world)
    with peer.current(context):
        peer.ipc_open_handle(handle)
    with owner.current(CONTEXT):
        owner.mem_free(base)


def double_close(world: FakeCuda) -> None:
    with mapped(world) as (peer, address):
        peer.ipc_close_handle(address)
        peer.ipc_close_handle(address)


def open_after_free(world: FakeCuda) -> None:
    owner, base, handle = exported(world)
    with owner.current(CONTEXT):
        owner.mem_free(base)
    peer, context = importer(world)
    with peer.current(context):
        peer.ipc_open_handle(handle)


def use_after_close(world: FakeCuda) -> None:
    with mapped(world) as (peer, address):
        peer.ipc_close_handle(address)
        peer.write(address, b"1")


def write_without_peer_access(world: FakeCuda) -> None:
    _, _, handle = exported(world)
    peer, context = importer(world, ordinal=1)
    structure = CUipcMemHandle()
    ctypes.memmove(structure.getPtr(), handle, 64)
    with peer.current(context):
        peer.write(peer._call("cuIpcOpenMemHandle", structure, 0), b"1")


def free_under_a_kernel(world: FakeCuda) -> None:
    with exporting(world) as (owner, base):
        owner.process.kernel_running = True
        owner.mem_free(base)


def release_a_context_in_use(world: FakeCuda) -> None:
    exported(world)[0].release_context(0)


def pinned(driver: FakeDriver) -> tuple[Segment, int]:
    """Registered memory of this process, and its address on the device."""
    memory = Segment.create("tricomm-test", 4096)
    with driver.current(CONTEXT):
        return memory, driver.host_register(memory.address, 4096)


def touch_a_page_that_went(world: FakeCuda) -> None:
    driver = ready(world)
    memory, address = pinned(driver)
    memory.close()
    with driver.current(CONTEXT):
        driver.write(address, b"1")


def unpin_under_a_kernel(world: FakeCuda) -> None:
    driver = ready(world)
    memory, _ = pinned(driver)
    driver.process.kernel_running = True
    with driver.current(CONTEXT):
        driver.host_unregister(memory.address)


WRONG = [
    free_while_mapped,
    double_close,
    open_after_free,
    use_after_close,
    write_without_peer_access,
    free_under_a_kernel,
    release_a_context_in_use,
    touch_a_page_that_went,
    unpin_under_a_kernel,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_fake_complains(wrong):
    world = FakeCuda(2)
    with pytest.raises(CudaRuleBroken):
        wrong(world)
    with pytest.raises(AssertionError):
        world.verify()


def test_the_fake_finds_every_kind_of_leak():
    world = FakeCuda()
    owner, _, handle = exported(world)
    peer, context = importer(world)
    page = mmap.mmap(-1, 4096)
    with peer.current(context):
        peer.ipc_open_handle(handle)
        peer.host_register(ctypes.addressof(ctypes.c_char.from_buffer(page)), 4096)
    assert [text.split()[4] for p in (owner, peer) for text in p.process.holds()] == [
        "block",
        "the",
        "mapping",
        "pinned",
        "the",
    ]
    with pytest.raises(AssertionError, match="process 1 still holds mapping"):
        world.verify()


def test_the_gpu_writes_to_host_memory_that_is_pinned_only_once():
    driver = ready()
    memory, address = pinned(driver)
    with driver.current(CONTEXT):
        driver.write(address + 8, b"from the GPU")
        assert bytes(memory.buffer[8:20]) == b"from the GPU" == driver.read(address + 8, 12)
        with pytest.raises(ResourceError, match="ALREADY_REGISTERED"):
            driver.host_register(memory.address, 4096)
        driver.host_unregister(memory.address)
    driver.release_context(0)
    driver.process.world.verify()


def test_calls_without_a_context_are_refused():
    driver = ready()
    with pytest.raises(ResourceError, match="cuMemAlloc: CUDA_ERROR_INVALID_CONTEXT: CUDA's own words"):
        driver.mem_alloc(8)
