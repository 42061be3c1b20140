"""The steps of a run, most valuable first."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

PLUGIN = "devtools.gpu_evidence.children"
MOST_RANKS = 8
_STREAMS, _PROCESSES, _TIMES = "exact/test_streams_gpu.py", "exact/test_processes_gpu.py", "test_times_gpu.py"
_FAULTS = "test_gpu.py test_gpu_contact.py test_message_gpu.py test_uneven_gpu.py test_cuda_gpu.py"
_KILLED = "test_gpu.py::test_a_killed_rank_is_named_within_two_seconds"


@dataclass(frozen=True)
class Step:
    """A command. A pytest command (`tests`) continues after the tests that have ended; others run as a whole.

    `share` is the step's part of the remaining budget, relative to the steps after it; None: all of it. `needs` names
    steps without which this one is left out. `limit` is in seconds, for each test or for a whole command.
    """

    name: str
    command: tuple[str, ...]
    tests: bool = True
    share: float | None = 1.0
    needs: tuple[str, ...] = ()
    limit: float = 300.0


def pytest(name: str, where: str, keyword: str = "", **more: Any) -> Step:
    """The GPU tests of files (and names) in tests/gpu, if `keyword` selects them."""
    options = ("-m", "gpu", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", *(("-k", keyword) if keyword else ()))
    places = (f"tests/gpu/{place}" for place in where.split(" "))
    return Step(name, (sys.executable, "-m", "pytest", *options, *places), **more)


def bench(
    name: str, ranks: int, collectives: str, sizes: str, against: str, dependent: bool = True, **more: Any
) -> Step:
    """Benchmark rows of the kernel that tricomm chooses and of the libraries `against`: checked, eager and in a CUDA
    graph. `dependent`: with dependent launches, where these are possible."""
    asked = {"ranks": ranks, "collectives": collectives, "sizes": sizes, "against": against, "modes": "eager,graph"}
    asked["dependent"] = dependent
    return Step(name, (sys.executable, "-m", PLUGIN, "bench", json.dumps(asked)), tests=False, **more)


def all_steps(gpus: int) -> tuple[Step, ...]:
    """All steps for a machine with `gpus` GPUs; checks precede measurements of the same value.

    Ranks are processes, or streams of one process. Processes on one GPU take turns, so only streams show a kernel's
    time.
    """
    ranks = min(gpus, MOST_RANKS) if gpus > 1 else 2
    first, two, eight = ("first",), ("two streams",), ("two streams", "eight streams")
    steps = [
        pytest("first", f"test_first_gpu.py {_KILLED}", "not streams", share=None),
        pytest("two streams", "test_first_gpu.py", "streams and 2ranks", share=None),
        pytest("eight streams", "test_first_gpu.py", "streams and 8ranks", share=None, needs=two),
        pytest("streams, one size", _STREAMS, "one_size and 2ranks", share=3.0, needs=two),
        pytest("processes, one size", _PROCESSES, "not sweep and not rare and 2ranks", share=2.0, needs=first),
        pytest("dependent launches", "exact/test_dependent_gpu.py", share=2.0, needs=first),
        pytest("c10d and DDP", "test_c10d_gpu.py test_training_gpu.py", share=2.0, needs=first),
    ]
    if gpus > 1:
        steps += [
            pytest("several GPUs", "test_many_gpus.py", share=4.0, needs=first),
            bench("all_reduce, short", ranks, "all_reduce", "1K:256K:4", "nccl", needs=first),
            bench("all_reduce, no dependent launch", ranks, "all_reduce", "1K:256K:4", "nccl", False, needs=first),
            bench("all collectives, NCCL", ranks, "all", "1K:64M:4", "nccl", share=3.0, needs=first, limit=1200.0),
        ]
    for library in ("nccl", "symm_mem"):  # separate, because a library that crashes ends the command
        steps += [bench(f"all_reduce, {library}", ranks, "all_reduce", "64K,4M", library, needs=first)]
    steps += [
        pytest("times, one size", _TIMES, "limit or host or (one_size and 2ranks)", share=3.0, needs=two),
        pytest("faults, graphs, threads", _FAULTS, share=4.0, needs=first),
        pytest("memcheck", "test_sanitizer_gpu.py", "memcheck and all_reduce", needs=first),
        pytest("streams, every size", _STREAMS, "every_size and 2ranks", share=2.0, needs=two),
        pytest("processes, graphs and epochs", _PROCESSES, "rare and 2ranks", share=2.0, needs=first),
        pytest("times, all sizes", _TIMES, "2ranks", share=2.0, needs=two),
        pytest("streams, one size, 4 and 8 ranks", _STREAMS, "one_size", share=2.0, needs=eight),
        pytest("times, 4 and 8 ranks", _TIMES, share=2.0, needs=eight),
        bench("all_reduce, all sizes", ranks, "all_reduce", "1K:64M:4", "nccl,symm_mem", needs=first, limit=600.0),
        bench("all_reduce with RMSNorm", ranks, "all_reduce_rms_norm", "64K,1M", "nccl", needs=first),
        pytest("streams, every type", _STREAMS, "2ranks", share=2.0, needs=two),
        pytest("processes, every type", _PROCESSES, "2ranks", share=2.0, needs=first),
        pytest("compute-sanitizer", "test_sanitizer_gpu.py", share=2.0, needs=first),
        pytest("streams, all", _STREAMS, share=2.0, needs=eight),
        pytest("all other tests", "", "not (first_gpu or streams_gpu or times_gpu)", share=2.0, needs=first),
    ]
    return tuple(steps)
