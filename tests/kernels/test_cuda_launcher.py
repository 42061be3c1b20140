"""The launch path: the driver gets the arguments that the compiled kernel declares, and decisions are cached."""

import itertools
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.fake_launch import CONSTEXPRS, FakeGpu, Result
from tests.marks import compiles
from tricomm.errors import ResourceError
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import cuda_launcher as launching
from tricomm.kernels.launch.compiler import extras, ptx_of, takes_counts
from tricomm.kernels.launch.cuda_launcher import make_launcher

COMPILED = [k for k in registry.KERNELS if compiles(k)]
KERNELS = pytest.mark.parametrize("kernel", COMPILED, ids=lambda k: k.name)
GROUP = torch.arange(1 << 40, (1 << 40) + 512)
GROUP[layout.RANK] = GROUP[layout.POSITION] = 1
GROUP[layout.QUAD : layout.QUAD + 4] = torch.arange(4)
GROUP[layout.PEER_QUAD : layout.PEER_QUAD + 4] = torch.arange(4, 8)
_numbers = itertools.count()


def gpu(**more) -> FakeGpu:
    return FakeGpu(f"fake {next(_numbers)}", **more)


def forget(monkeypatch):
    """Compile and load everything again."""
    for known in ("_compiled", "_loaded"):
        monkeypatch.setattr(launching, known, {})


def further(kernel):
    return [3 for _ in extras(kernel.function)]


def rows_of(kernel, count):
    """Uneven rows of two ranks, in every call others."""
    return ((count, 0), (count, 1 << 33)) if takes_counts(kernel.function) else ()


def bind(kernel, device, blocks=8, aligned=True, **more):
    if kernel.needs_cube:
        more["WORLD_SIZE"] = 8
    constexprs = {**CONSTEXPRS, "ALIGNED": aligned, **kernel.fixed, **more}
    group = layout.group_argument(GROUP, GROUP, constexprs["WORLD_SIZE"])
    return make_launcher(kernel.function, blocks, constexprs, 32, aligned, further(kernel), group, device)


def group_parameters(world_size):
    """Rank 1's constants: what is in the table below the epoch, the peers from itself on, and from rank 0 on; of eight
    ranks also its partners in a cube mesh: itself, those one and two steps away, the relay."""
    peers = GROUP[layout.PEERS :][:world_size].tolist()
    partners = [1, 0, 3, 2, 5] if world_size == 8 else []
    partners += [peers[partner] for partner in partners]
    return [GROUP.data_ptr(), *GROUP[: layout.CONSTANTS].tolist(), *peers[1:], peers[0], *peers, *partners]


@KERNELS
def test_every_parameter_of_the_cubin_is_passed_with_its_value(kernel):
    device = gpu()
    run = bind(kernel, device, blocks=13)
    x, y = torch.zeros(64), torch.zeros(64)
    for count, call in ((64, 5 << 32 | 0xFFFFFFFF), (1 << 40, 0x7FFFFFFF << 32 | 1), (1, 0)):
        rows = rows_of(kernel, count)
        run(x, y, count, call, rows)
        last = device.launches[-1]
        group = group_parameters(8 if kernel.needs_cube else 2)
        mine = [x.data_ptr(), y.data_ptr(), *group, count, call]
        mine = mine if kernel.collective != "barrier" else [*group, call]
        mine += [*itertools.chain(*rows), *further(kernel)]
        assert last.words == [*mine, 0, 0], "after ours Triton's two pointers to scratch memory"
        assert {len(p) for p in last.parameters} == {8}
        signature = device.functions[min(device.functions)][1]
        assert [offset for offset, _ in signature] == list(range(0, 8 * len(signature), 8))
        assert last.function == kernel.function.fn.__name__
        assert last.grid == (13, 1, 1) and last.threads == (256, 1, 1) and last.stream == 0


def test_a_launch_follows_the_current_stream():
    device = gpu()
    run = bind(COMPILED[0], device)
    for raw in (7, 7, 9, 0, 7):
        device.raw = raw
        run(GROUP, GROUP, 1, 1)
    assert [launch.stream for launch in device.launches] == [7, 7, 9, 0, 7]


@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_is_prepared_once_a_stream(dependent, monkeypatch):
    """The bindings' objects for it: a configuration with an attribute, or a stream's handle."""
    device, made = gpu(), []
    for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUstream"):
        make = getattr(device, name)
        monkeypatch.setattr(
            device, name, lambda *args, name=name, make=make: made.append(name) or make(*args), raising=False
        )
    run = bind(COMPILED[0], device, DEPENDENT=dependent)
    again = run.repeat(1, 9)
    for _ in range(3):
        for device.raw in (0, 7, 9):
            run(GROUP, GROUP, 1, 1)
            again((GROUP.data_ptr(), GROUP.data_ptr()), 2, device.raw)
    streams = [launch.stream for launch in device.launches]
    assert streams == 3 * [0, 0, 7, 7, 9, 9] and {launch.dependent for launch in device.launches} == {dependent}
    assert sorted(made) == sorted(
        3 * (["CUlaunchConfig", "CUlaunchAttribute", "CUstream"] if dependent else ["CUstream"])
    )


@KERNELS
def test_a_dependent_launch_passes_the_same_and_its_kernel_waits(kernel):
    device, plain = gpu(), gpu()
    runs = [bind(kernel, device, DEPENDENT=True), bind(kernel, plain)]
    x = torch.zeros(64)
    for device.raw, plain.raw in ((7, 7), (0, 0), (7, 7)):
        for run in runs:
            run(x, x, 64, 5 << 32 | 9, rows_of(kernel, 64))
    for one, other in zip(device.launches, plain.launches, strict=True):
        assert one == replace(other, dependent=True) and not other.dependent
    wait, signal = (f"griddepcontrol.{name}" for name in ("wait", "launch_dependents"))
    texts = [ptx_of(each.modules[0]) for each in (device, plain)]
    assert texts[0].count(wait) == texts[0].count(signal) == 1 and "griddepcontrol" not in texts[1]


SHIPPED = (
    *registry.KERNELS,
    *registry.MULTICAST,
    *registry.ZERO_COPY,
    *registry.MULTICAST_ZERO_COPY,
    *registry.MESSAGES,
)


@pytest.mark.parametrize("kernel", [k for k in SHIPPED if compiles(k)], ids=lambda k: k.name)
def test_before_its_wait_a_kernel_reads_at_most_constants_of_the_group_table(kernel):
    """Its place in a cube mesh, or the multicast address: no kernel writes these."""
    bind(kernel, device := gpu(), DEPENDENT=True)
    text = re.sub("//.*", "", ptx_of(device.modules[0]))
    before = text[text.index("{") : text.index("griddepcontrol.wait")]
    assert not re.search(r"\b(bra|ret|call|st|atom|red|multimem)\b", before), "a thread may not wait, or writes before"
    constants = 2 if kernel.needs_cube else kernel.algorithm == "multicast" and not kernel.zero_copy
    assert len(re.findall(r"\bld\.(?!param)", before)) <= constants


def test_a_dependent_launch_that_the_driver_refuses_is_named():
    device = gpu(failures={("cuLaunchKernelEx", 1): Result.CUDA_ERROR_NOT_SUPPORTED})
    run = bind(registry.find("barrier", "one_shot", "simple"), device, DEPENDENT=True)
    with pytest.raises(ResourceError, match="cuLaunchKernelEx .*CUDA_ERROR_NOT_SUPPORTED"):
        run(torch.zeros(1), torch.zeros(1), 0, 1 << 32)


def test_one_compile_and_one_load_serve_all_calls_groups_and_grids(monkeypatch):
    forget(monkeypatch)
    device, compiles = gpu(), []
    compile_kernel = launching.compile_kernel
    monkeypatch.setattr(launching, "compile_kernel", lambda *args: compiles.append(args) or compile_kernel(*args))
    for blocks in (1, 8, 8):
        bind(COMPILED[0], device, blocks)(GROUP, GROUP, 1, 1)
    assert len(compiles) == device.calls.count("cuModuleLoadData") == device.calls.count("cuFuncLoad") == 1
    assert [launch.grid[0] for launch in device.launches] == [1, 8, 8]
    bind(COMPILED[0], device, aligned=False)
    assert len(compiles) == device.calls.count("cuModuleLoadData") == 2, "a misaligned tensor has other code"
    bind(COMPILED[0], other := gpu())
    assert (len(compiles), other.calls.count("cuModuleLoadData")) == (2, 1), "another device loads the same code"


def test_two_launchers_do_not_share_their_arguments():
    device = gpu()
    one, two = bind(COMPILED[0], device), bind(COMPILED[0], device)
    x = torch.zeros(8)
    one(x, x, 1, 11)
    two(GROUP, GROUP, 2, 22)
    assert [launch.words[:-2] for launch in device.launches] == [
        [x.data_ptr(), x.data_ptr(), *group_parameters(2), 1, 11],
        [GROUP.data_ptr()] * 2 + [*group_parameters(2), 2, 22],
    ]


def test_a_launch_in_a_thread_without_a_context_uses_the_devices_primary_one():
    device = gpu()
    run = bind(COMPILED[0], device)
    device.current = False
    run(GROUP, GROUP, 1, 1)
    assert len(device.launches) == 1 and device.calls.count("cuLaunchKernel") == 2
    assert not device.current, "the thread's current context is restored"


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuLaunchKernel"])
def test_a_refusal_does_not_change_the_threads_context(call):
    device = gpu(current=False)
    device.failures = {(call, nth): Result.CUDA_ERROR_OUT_OF_MEMORY for nth in (1, 2)}
    with pytest.raises(ResourceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        bind(COMPILED[0], device)(GROUP, GROUP, 1, 1)
    assert not device.current


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"])
def test_a_load_that_fails_is_named_and_tried_again_by_the_next(call):
    device = gpu(failures={(call, 1): Result.CUDA_ERROR_OUT_OF_MEMORY})
    with pytest.raises(ResourceError, match=f"{call} on {device.name} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        bind(COMPILED[0], device)
    bind(COMPILED[0], device)(GROUP, GROUP, 1, 1)
    assert len(device.launches) == 1


def test_a_driver_without_a_call_that_loads_kernels_loads_them_anyway():
    """Before CUDA 12.4 the bindings have the name, but the driver lacks the function."""
    device = gpu(missing=frozenset({"cuFuncLoad"}))
    run = bind(COMPILED[0], device)
    device.idle.clear()  # a peer's kernel runs: nothing may be loaded now
    run(GROUP, GROUP, 1, 1)
    assert len(device.launches) == 1


def test_a_load_that_waits_for_a_device_keeps_no_other_kernel_waiting():
    """Ranks are threads: the kernel that one device waits for ends only after the others have launched theirs."""
    one, other = gpu(), gpu()
    first, second = COMPILED[:2]
    bind(second, one), bind(first, other)
    one.idle.clear()
    threads = [threading.Thread(target=bind, args=(first, one)) for _ in range(2)]
    for thread in threads:
        thread.start()
    done = threading.Event()

    def launches():
        for kernel, device in ((second, one), (first, other), (second, other)):
            bind(kernel, device)(GROUP, GROUP, 1, 1)
        done.set()

    while one.calls.count("cuModuleLoadData") < 2:
        time.sleep(1e-3)
    threads.append(threading.Thread(target=launches))
    threads[-1].start()
    ended = done.wait(10)
    one.idle.set()
    for thread in threads:
        thread.join(20)
    assert ended and one.calls.count("cuModuleLoadData") == 2, "two threads load a kernel once"


def test_a_kernel_is_loaded_before_a_capture_or_refused_in_it():
    device = gpu()
    run = bind(COMPILED[0], device)
    device.capturing = True
    run(GROUP, GROUP, 1, 1)
    with pytest.raises(ResourceError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        bind(COMPILED[1], device)


def test_an_error_of_an_earlier_kernel_stays_and_is_named_by_every_call():
    device = gpu(failures={("cuLaunchKernel", 1): Result.CUDA_ERROR_ILLEGAL_ADDRESS})
    run = bind(COMPILED[0], device)
    for call in (lambda: run(GROUP, GROUP, 1, 1), lambda: run(GROUP, GROUP, 1, 1), lambda: bind(COMPILED[1], device)):
        with pytest.raises(ResourceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    assert not device.launches


def test_a_launch_that_fails_is_named():
    device = gpu(failures={("cuLaunchKernel", 1): Result.CUDA_ERROR_OUT_OF_MEMORY})
    run = bind(COMPILED[0], device)
    with pytest.raises(ResourceError, match="cuLaunchKernel on fake .* failed: CUDA_ERROR_OUT_OF_MEMORY"):
        run(GROUP, GROUP, 1, 1)


def test_a_kernel_that_does_not_compile_is_named():
    with pytest.raises(ResourceError, match="Triton cannot compile all_reduce_one_shot for sm_90"):
        bind(next(k for k in registry.KERNELS if k.name == "all_reduce_one_shot_ll"), gpu(), LANES=3)


def test_scratch_memory_that_a_profiler_wants_is_refused(monkeypatch):
    forget(monkeypatch)
    metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=64)
    monkeypatch.setattr(launching, "compile_kernel", lambda *args: SimpleNamespace(metadata=metadata))
    with pytest.raises(ResourceError, match="scratch memory"):
        bind(COMPILED[0], gpu())


def test_large_shared_memory_is_requested(monkeypatch):
    compile_kernel = launching.compile_kernel

    def hungry(*args):
        result = compile_kernel(*args)
        return SimpleNamespace(asm=result.asm, metadata=result.metadata._replace(shared=100_000))

    forget(monkeypatch)
    monkeypatch.setattr(launching, "compile_kernel", hungry)
    device = gpu()
    bind(COMPILED[0], device)(GROUP, GROUP, 1, 1)
    assert list(device.attributes.values()) == [100_000] and device.launches[0].shared == 100_000


def test_a_repeated_launch_writes_what_changes_and_nothing_else():
    device = gpu()
    run = bind(COMPILED[0], device)
    x, y = torch.zeros(8), torch.zeros(16)
    again = run.repeat(8, 0xFEDCBA98)
    for number, (at, into, stream) in enumerate([(x, x, 7), (y, x, 7), (x, y, 0)], start=(1 << 31) - 3):
        again((at.data_ptr(), into.data_ptr()), number, stream)
        last = device.launches[-1]
        want = [at.data_ptr(), into.data_ptr(), *group_parameters(2), 8, number << 32 | 0xFEDCBA98, 0, 0]
        assert last.words == want and last.stream == stream
    device.raw = 0
    run(x, y, 8, 5 << 32 | 0xFEDCBA98)
    again((y.data_ptr(), y.data_ptr()), 6, 0)
    assert [launch.words[:2] for launch in device.launches[-2:]] == [[x.data_ptr(), y.data_ptr()], [y.data_ptr()] * 2]
    assert device.launches[-1].words[-3] == 6 << 32 | 0xFEDCBA98


def test_a_repeated_launch_is_refused_and_made_again_as_any_other():
    device = gpu(failures={("cuLaunchKernel", 1): Result.CUDA_ERROR_OUT_OF_MEMORY})
    again = bind(COMPILED[0], device).repeat(1, 1)
    with pytest.raises(ResourceError, match="cuLaunchKernel on fake .* failed: CUDA_ERROR_OUT_OF_MEMORY"):
        again((GROUP.data_ptr(), GROUP.data_ptr()), 1, 0)
    device.current = False
    again((GROUP.data_ptr(), GROUP.data_ptr()), 2, 0)
    assert len(device.launches) == 1 and not device.current
