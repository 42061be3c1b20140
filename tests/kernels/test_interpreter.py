"""The adapter around Triton's interpreter: the same kernels, corrected arithmetic, no change left in Triton."""

import os
import signal
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as _triton

from tests import ranks
from tricomm.errors import CollectiveTimeout, InvalidArgument
from tricomm.kernels.launch import interpreter, kernel_launch, triton_adapter
from tricomm.kernels.launch.numpy_rounding import round_to_bf16
from tricomm.kernels.primitives import pause

CPU = torch.device("cpu")


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def _cast(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, _double(value).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _assembly(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1))


@triton.jit
def _broken(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).no_such_thing)


def run(kernel, *args, grid=(1,), **constexprs):
    interpreter.interpret(kernel_launch.programs(kernel, grid, args, constexprs))  # its import lets `pause` give way


def test_runs_a_grid_and_a_device_function_without_any_environment_variable():
    x = torch.arange(100, dtype=torch.int32)
    y = torch.full((100,), -1, dtype=torch.int32)
    run(_copy, x, y, 100, grid=(7,), BLOCK=16)
    assert torch.equal(y, 2 * x)


def patched_names() -> list[str]:
    """Everything in Triton that has changed."""
    assert len(triton_adapter.patches) > 100
    return [name for owner, name, old, new in triton_adapter.patches if vars(owner).get(name, None) is new]


def test_leaves_triton_as_it_was():
    run(_copy, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 4, BLOCK=4)
    assert patched_names() == []
    assert not {"TensorHandle", "interpreter_semantic", "_InterpreterComparison"} & set(globals())
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        _double(1)


def test_leaves_triton_as_it_was_after_an_interrupt_inside_a_kernel():
    def interrupt(kind, addresses, itemsize):
        signal.default_int_handler(signal.SIGINT, None)

    with interpreter.observe(interrupt), pytest.raises(KeyboardInterrupt):
        run(_copy, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 4, BLOCK=4)
    assert patched_names() == []
    run(_copy, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 4, BLOCK=4)


def interrupted_at_random(rank, world_size, tell):
    """Ctrl-C at many moments of a launch, in a separate process; returns the number of interrupts and leftovers."""
    x, caught, left = torch.zeros(4, dtype=torch.int32), 0, []
    run(_copy, x, x, 4, BLOCK=4)
    for turn in range(100):
        try:
            signal.signal(signal.SIGALRM, lambda *args: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + turn * 2e-5)
            for _ in range(50):
                run(_copy, x, x, 4, BLOCK=4)
        except (KeyboardInterrupt, TypeError):  # numpy turns an interrupt in the middle of a shape into the latter
            caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        left += patched_names()
        free = interpreter._lock.acquire(timeout=0)
        if not free:
            left.append("lock")
        else:
            interpreter._lock.release()
    return caught, left


def test_interrupts_at_any_moment_leave_triton_and_the_lock_as_they_were():
    ((caught, left),) = ranks.run(1, interrupted_at_random)
    assert caught > 50 and left == []


def test_closures_and_keyword_defaults_are_found():
    factor = tl.constexpr(3)

    @triton.jit
    def scaled(x, *, more=1):
        return x * factor + more

    @triton.jit
    def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y_ptr + at, scaled(tl.load(x_ptr + at)))

    x, y = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    run(kernel, x, y, BLOCK=8)
    assert torch.equal(y, 3 * x + 1)


@pytest.mark.parametrize(
    ("args", "constexprs"),
    [((1,), {"BLOCK": 4}), ((1, 2, 3), {}), ((1, 2, 3), {"BLOCK": 4, "NO": 1}), ((object(), 2, 3), {"BLOCK": 4})],
)
def test_arguments_that_do_not_fit_are_refused_before_a_block_runs(args, constexprs):
    with pytest.raises(InvalidArgument, match="_copy"):
        interpreter.check(_copy, args, constexprs)


def test_leaves_triton_as_it_was_after_an_error():
    before = tl.load
    with pytest.raises(AttributeError):
        run(_broken, torch.zeros(1, dtype=torch.int32))
    assert tl.load is before


def special_floats() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31 - 1, (4096 - 16,), generator=generator, dtype=torch.int64)
    halfway = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x00008000, 0x007FFFFF]
    odd = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000, 0x00000000, 0x80008000]
    bits = torch.cat([random, torch.tensor(halfway + odd)]).to(torch.int32)
    return bits.view(torch.float32)


def same_bits_or_both_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = a.isnan() & b.isnan()
    width = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return bool(((a.view(width) == b.view(width)) | nan).all())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_is_rounded_as_torch_rounds_it(target):
    x = special_floats()
    y = torch.full((4096,), 7, dtype=target)
    run(_cast, x, y, BLOCK=4096)
    assert same_bits_or_both_nan(y, x.to(target))


def test_every_bf16_pattern_widens_exactly():
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    y = torch.full((65536,), 7.0)
    run(_cast, x, y, BLOCK=65536)
    assert same_bits_or_both_nan(y, x.float())


def test_without_the_adapters_rounding_the_results_differ():
    """Triton's own cast, outside a launch, truncates: the test above could fail."""
    halfway = np.array([0x3F80FFFF], dtype=np.uint32).view(np.float32)
    builder = _triton.interpreter_builder
    unmended = builder.cast_impl(_triton.TensorHandle(halfway, tl.float32), tl.bfloat16).data
    assert round_to_bf16(halfway) != unmended


def test_inline_assembly_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="_assembly.*inline_asm"):
        run(_assembly, torch.zeros(1, dtype=torch.int32))


def test_an_unknown_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with pytest.raises(InvalidArgument, match="4.0.0 is not among the tested versions"):
        run(_copy, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1, BLOCK=1)


def test_one_kernel_runs_at_a_time_and_waiting_for_it_is_bounded():
    held, release = threading.Event(), threading.Event()

    def hold():
        with interpreter._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        with pytest.raises(CollectiveTimeout, match="one at a time"):
            x = torch.zeros(1, dtype=torch.int32)
            interpreter.interpret(interpreter.programs(_copy, (1,), (x, x, 1), {"BLOCK": 1}), timeout=0.2)
    finally:
        release.set()
        thread.join()


def test_an_observer_sees_every_access_that_is_not_masked():
    seen = []
    x, y = torch.arange(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with interpreter.observe(lambda kind, addresses, itemsize: seen.append((kind, len(addresses), itemsize))):
        run(_copy, x, y, 10, BLOCK=16)
    assert seen == [("load", 10, 4), ("store", 10, 4)]
    run(_copy, x, y, 10, BLOCK=16)
    assert len(seen) == 2, "an observer that was taken out still sees"


@triton.jit
def _alternate(mine_ptr, theirs_ptr, AHEAD: tl.constexpr):
    """Block b sets its word once the other kernel has set its word b, or b - 1 if this one is ahead."""
    block = tl.program_id(0)
    spins = 0
    if block >= AHEAD:
        while tl.load(theirs_ptr + block - AHEAD, volatile=True) == 0:
            spins += 1
            pause(spins)
    tl.store(mine_ptr + block, block + 1)


def alternate(mine, theirs, ahead):
    run(_alternate, mine, theirs, grid=(len(mine),), AHEAD=ahead)


def test_a_polling_kernel_lets_another_threads_kernel_run_and_resumes_its_block():
    first, second = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    thread = threading.Thread(target=alternate, args=(second, first, 0))
    thread.start()
    alternate(first, second, 1)
    thread.join(30)
    assert first.tolist() == second.tolist() == [1, 2, 3, 4]
    assert patched_names() == [] and interpreter._current is None


class WithoutStores:
    """A director; the first load runs another kernel, as a signal handler may."""

    def __init__(self, x, y):
        self.x, self.y, self.stores = x, y, 0

    def access(self, access):
        if access.kind == "load":
            if not self.y.any():
                run(_copy, self.x, self.y, len(self.x), BLOCK=4)
            access.perform(None)
        else:
            self.stores += 1

    def compared(self, *values):
        pass


def test_a_director_is_for_its_launch_alone():
    x, y, z = torch.ones(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    director = WithoutStores(x, y)
    blocks = interpreter.programs(_copy, (2,), (x, z, 4), {"BLOCK": 2})
    interpreter.interpret(blocks, director=director)
    assert y.tolist() == [2] * 4 and z.tolist() == [0] * 4 and director.stores == 2
    assert patched_names() == [] and triton_adapter.director is None
    run(_copy, x, z, 4, BLOCK=4)
    assert z.tolist() == [2] * 4


def interrupted_in_turns(rank, world_size, tell):
    """Ctrl-C at many moments while two threads' kernels poll; returns what was left after each."""
    left = []
    for turn in range(6):
        words = torch.zeros(2, dtype=torch.int32)
        thread = threading.Thread(target=alternate, args=(torch.zeros(1, dtype=torch.int32), words, 0))
        thread.start()
        signal.signal(signal.SIGALRM, lambda *args: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.05 + turn * 1.1e-3)
        try:
            alternate(torch.zeros(1, dtype=torch.int32), words, 0)
        except KeyboardInterrupt:
            words[0] = 1  # the other one may end
        thread.join(30)
        left += [*patched_names(), *interpreter._launched, *interpreter._waiting]
        left += ["lock"] if interpreter._held() or thread.is_alive() else []
    return left


def test_an_interrupt_while_another_threads_kernel_runs_leaves_triton_and_the_lock_as_they_were():
    assert ranks.run(1, interrupted_in_turns) == [[]]
