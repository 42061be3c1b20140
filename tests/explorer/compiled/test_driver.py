"""The driver of a simulated GPU: the arguments of launches, and CUDA's rules."""

import ctypes
import functools
import gc
import itertools
import struct
from collections import Counter

import pytest
import torch
import triton

from tests.explorer.compiled import small_kernels
from tests.explorer.compiled.small_kernels import scaled
from tests.explorer.compiled.stub_executor import StubExecutor, gpu
from tests.kernels import fake_launch
from tricomm import check
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.explorer.compiled import events, module_table, user_launch
from tricomm.explorer.compiled.compiled_runtime import checked_options
from tricomm.explorer.compiled.driver import CudaResult, FunctionAttribute
from tricomm.explorer.ptx.units import loaded_kernel
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import compiler, cuda_launcher
from tricomm.kernels.launch.cuda_launcher import make_launcher
from tricomm.options import Options

KERNEL = registry.KERNELS[0]
CONSTEXPRS = {**fake_launch.CONSTEXPRS, "ALIGNED": True, **KERNEL.fixed}
GROUP = torch.zeros(512, dtype=torch.int64)
ARGUMENT = layout.group_argument(GROUP, GROUP, 2)
_ranks = itertools.count(100)


def device():
    """A GPU whose context no other test has used."""
    return gpu(StubExecutor(), rank=next(_ranks))


def bound(device):
    return make_launcher(KERNEL.function, 8, CONSTEXPRS, 32, True, (), ARGUMENT, device.driver)


def test_the_machine_gets_ptx_and_parameters_from_the_launch_path_of_a_gpu():
    simulated = device()
    x, y = torch.zeros(64), torch.zeros(64)
    bound(simulated)(x, y, 64, 5 << 32 | 0xFFFFFFFF)
    (launch,) = simulated.streams.executor.started
    assert launch.loaded.kernel.name == launch.loaded.name == KERNEL.function.fn.__name__
    assert launch.loaded.kernel.target.startswith("sm_90")
    words = struct.unpack(f"<{6 + len(ARGUMENT)}Q", launch.parameters)
    assert words == (x.data_ptr(), y.data_ptr(), GROUP.data_ptr(), *ARGUMENT[1:], 64, 5 << 32 | 0xFFFFFFFF, 0, 0)
    assert [(p.offset, p.size) for p in launch.loaded.kernel.parameters] == list(launch.loaded.layout)
    assert (launch.grid, launch.threads, launch.stream) == ((8, 1, 1), (256, 1, 1), 0)


def test_a_users_kernel_is_specialised_and_packed_as_tritons_dispatch_does():
    simulated = device()
    x = torch.zeros(64)
    args = (x, (x, x[1:], 5), 16, 2.5, True, 1, 1 << 40)
    run = user_launch.prepare(simulated.driver, scaled, 3, args, {"N": 64, "num_warps": 2})
    side = simulated.new_stream()
    with side:
        run()
    (launch,) = simulated.streams.executor.started
    assert (launch.grid, launch.threads, launch.stream) == ((3, 1, 1), (64, 1, 1), side.cuda_stream)
    values = struct.unpack("<3Q2If?3xQ", launch.parameters[:48])
    assert values == (x.data_ptr(), x.data_ptr(), x.data_ptr() + 4, 5, 16, 2.5, True, 1 << 40), "the 1 is compiled in"
    assert all(any(t is given for t in launch.tensors) for given in (x,))


def test_a_users_function_is_loaded_again_in_a_new_context(monkeypatch):
    """Handles are numbers that start at the same one in every context."""
    rank, x = next(_ranks), torch.zeros(64)
    for number in range(2):
        monkeypatch.setattr(module_table, "_contexts", {})
        simulated = gpu(StubExecutor(), rank=rank)
        if number == 1:
            bound(simulated)
        user_launch.prepare(simulated.driver, small_kernels.shifted, 1, (x,), {"N": 32})()
        assert simulated.streams.executor.started[-1].loaded.name == "shifted"


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgument, match="scaled: its arguments do not fit"):
        user_launch.prepare(device().driver, scaled, 1, (torch.zeros(4),), {"N": 64})
    with pytest.raises(InvalidArgument, match="grid"):
        user_launch.prepare(device().driver, scaled, 0, (), {"N": 64})


def test_a_global_that_changes_between_two_launches_is_refused(monkeypatch):
    x = torch.zeros(32, dtype=torch.int32)
    user_launch.prepare(device().driver, small_kernels.shifted, 1, (x,), {"N": 32})
    monkeypatch.setattr(small_kernels, "OFFSET", triton.language.constexpr(4))
    with pytest.raises(InvalidArgument, match="shifted: global OFFSET has changed"):
        user_launch.prepare(device().driver, small_kernels.shifted, 1, (x,), {"N": 32})


def launched(driver, function, threads=(256, 1, 1), shared=0, stream=0, grid=(1, 1, 1)):
    words = (ctypes.c_uint64 * 64)()
    table = (ctypes.c_void_p * 64)(*range(ctypes.addressof(words), ctypes.addressof(words) + 512, 8))
    stream = driver.CUstream(stream)
    return driver.cuLaunchKernel(function, *grid, *threads, shared, stream, ctypes.addressof(table), 0)[0]


def test_cudas_rules_are_enforced():
    simulated = device()
    driver = simulated.driver
    bound(simulated)
    function = next(iter(driver._table.functions))
    assert launched(driver, function) is CudaResult.CUDA_SUCCESS
    assert launched(driver, function + 1) is CudaResult.CUDA_ERROR_INVALID_HANDLE
    assert launched(driver, function, stream=77) is CudaResult.CUDA_ERROR_INVALID_HANDLE
    for wrong, said in (
        ({"threads": (128, 1, 1)}, "reqntid"),
        ({"grid": (1, 65536, 1)}, "grid of"),
        ({"shared": 228 * 1024}, "bytes of shared memory"),
    ):
        with pytest.raises(InvalidArgument, match=f"all_reduce_one_shot: .*{said}"):
            launched(driver, function, **wrong)
    assert launched(driver, function, shared=60_000) is CudaResult.CUDA_ERROR_INVALID_VALUE
    most = FunctionAttribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.cuFuncSetAttribute(function, most, 228 * 1024) == (CudaResult.CUDA_ERROR_INVALID_VALUE,)
    assert driver.cuFuncSetAttribute(function, most, 60_000) == (CudaResult.CUDA_SUCCESS,)
    assert launched(driver, function, shared=60_000) is CudaResult.CUDA_SUCCESS
    driver.cuCtxPopCurrent()
    assert launched(driver, function) is CudaResult.CUDA_ERROR_INVALID_CONTEXT
    driver.cuCtxPushCurrent(driver.context + 1)
    assert launched(driver, function) is CudaResult.CUDA_ERROR_INVALID_HANDLE


def test_a_launch_outside_of_the_devices_context_is_made_in_it():
    simulated = device()
    run = bound(simulated)
    simulated.driver.cuCtxPushCurrent(1)
    run(GROUP, GROUP, 1, 1)
    assert len(simulated.streams.executor.started) == 1 and simulated.driver.cuCtxGetCurrent()[1] == 1


def test_a_cubin_without_ptx_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(compiler, "_by_cubin", {})
    with pytest.raises(InvalidArgument, match="all_reduce_one_shot: .* its PTX is not known"):
        made = compiler.compile_kernel(KERNEL.function, CONSTEXPRS, 32, True, 90)
        driver = device().driver
        driver._table.load(image := made.asm["cubin"])
        monkeypatch.setattr(compiler, "_by_cubin", {})
        assert image[:4] == b"\x7fELF"
        driver.cuModuleGetFunction(0, made.metadata.name.encode())


def test_an_arena_too_small_for_a_gpus_tiles_is_refused_with_the_bytes_that_are_needed():
    enough = checked_options(3, None)
    assert checked_options(3, enough) is enough
    with pytest.raises(InvalidArgument, match=f"Options\\(arena_bytes={enough.arena_bytes}\\)"):
        checked_options(3, Options(arena_bytes=64 * 1024))


def test_a_refused_launch_is_named():
    simulated = device()
    run = bound(simulated)
    simulated.driver._table.functions.clear()
    with pytest.raises(ResourceError, match="cuLaunchKernel on simulated sm_90 of rank .* CUDA_ERROR_INVALID_HANDLE"):
        run(GROUP, GROUP, 1, 1)


def test_the_cache_of_kernels_is_shared_by_all_ranks_and_bounded(monkeypatch):
    """Compiled kernels are kept, once an architecture and without the parts that are not read. The machine's code for
    them is bounded, and the same check again keeps nothing more."""
    monkeypatch.setattr(cuda_launcher, "_compiled", {})
    monkeypatch.setattr(cuda_launcher, "_loaded", {})
    monkeypatch.setattr(module_table, "_contexts", {})
    monkeypatch.setattr(module_table, "_parsed", functools.lru_cache(2)(module_table._parsed.__wrapped__))
    monkeypatch.setattr(loaded_kernel, "_codes", {})
    monkeypatch.setattr(loaded_kernel, "_MOST_KEPT", 2)
    monkeypatch.setattr(events, "_MOST_SITES", 40)
    monkeypatch.setattr(events, "_sites", {})

    def kept(run):
        run()
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects())

    def one():
        assert check(lambda comm: comm.barrier(), 2, 1, compiled="sm_90").ok

    def others():
        def body(comm):
            for collective in (comm.all_gather, comm.all_to_all, comm.reduce_scatter):
                collective(torch.arange(4))

        assert check(body, 2, 1, compiled="sm_90").ok

    first = kept(one)
    again = kept(one)
    assert sum(again.values()) - sum(first.values()) < 50, again - first
    more = kept(others)
    made = [compiled for _, compiled in cuda_launcher._loaded.values()]
    assert len(made) == 8 and len(set(map(id, made))) == len(cuda_launcher._compiled) == 4
    assert all(set(compiled.asm) == {"ttgir", "ptx", "cubin"} for compiled in made)
    assert len(loaded_kernel._codes) <= 2 and len(events._sites) <= 40
    assert more["KernelCode"] - first["KernelCode"] <= 1 and more["PtxKernel"] - first["PtxKernel"] <= 3
