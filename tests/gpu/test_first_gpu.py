"""The first minute on a GPU: on these, most other tests depend. Run with `-m gpu`. Not yet run on hardware."""

import sys
import threading
import time
from functools import partial

import pytest
import torch

from tests.gpu import streams
from tests.gpu.exact import checks
from tests.gpu.gpu_limits import meeting_seconds
from tricomm import Options
from tricomm.cuda_bindings import load_bindings
from tricomm.kernels.collectives import registry
from tricomm.perf.bench import collective_calls

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OPTIONS = Options(timeout=15.0, arena_bytes=1 << 20, nccl=False)
KERNEL = registry.find("all_reduce", "one_shot", "ll")
COUNT = 1000
CYCLES = 200_000_000  # of the GPU's clock: about a tenth of a second
TICK = 0.002  # seconds


def ticks_during(blocks):
    """Seconds that `blocks` takes, and the ticks of another thread meanwhile."""
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.wait(TICK):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before, began = ticks[0], time.perf_counter()
        blocks()
        return time.perf_counter() - began, ticks[0] - before
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
@on_gpu
def test_a_driver_call_that_blocks_releases_the_gil(record_property):
    driver = load_bindings("driver")
    torch.cuda._sleep(1000)  # loads the kernel and makes the context current
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    seconds, ticks = ticks_during(driver.cuCtxSynchronize)
    record_property("blocked_s", round(seconds, 4))
    assert seconds > 5 * TICK and ticks >= 2, "cuda-bindings 12.9.1 or newer release the GIL"


@pytest.mark.gpu
@on_gpu
def test_two_processes_meet(record_property):
    record_property("longest_meeting_us", round(meeting_seconds() * 1e6, 1))
    assert meeting_seconds() < 1.0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("world_size", [2, 8], ids=lambda n: f"{n}ranks")
def test_streams_of_one_process_run_an_all_reduce(world_size):
    call = [checks.CheckedCall(COUNT, "sum", 0)]
    check = partial(checks.wrong, kernel=KERNEL, dtype=torch.float32, wanted=call)
    assert streams.together(world_size, check, OPTIONS) == [[]] * world_size


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("world_size", [2], ids=lambda n: f"{n}ranks")
def test_streams_of_one_process_replay_graphs_together(world_size, record_property):
    def make(comm):
        x, y = collective_calls.tensors(comm, "all_reduce", COUNT, torch.float32)
        return lambda: collective_calls.call(comm, "all_reduce", 0, x, y, KERNEL)

    record_property("median_us", streams.spread(streams.resident(world_size, make, 2, 3, OPTIONS))["median_us"])


def test_a_call_that_holds_the_gil_stops_the_ticks():
    def holding():  # this switch interval is longer than the call
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass

    assert ticks_during(lambda: time.sleep(0.1))[1] > 1
    before = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        assert ticks_during(holding)[1] < 2
    finally:
        sys.setswitchinterval(before)
