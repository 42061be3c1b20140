"""The steps of a run, most valuable first."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

PLUGIN = "devtools.gpu_evidence.children"
MOST_RANKS = 8
_TESTS = "tests/gpu"
_EXACT = f"{_TESTS}/exact"
_STREAMS = f"{_EXACT}/test_streams_gpu.py"
_PROCESSES = f"{_EXACT}/test_processes_gpu.py"
_TIMES = f"{_TESTS}/test_times_gpu.py"


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


def pytest(name: str, *selection: str, keyword: str = "", **more: Any) -> Step:
    """The GPU tests of a selection of files and names, those that `keyword` matches."""
    options = ("-m", "gpu", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", *(("-k", keyword) if keyword else ()))
    return Step(name, (sys.executable, "-m", "pytest", *options, *selection), **more)


def bench(name: str, ranks: int, collectives: str, sizes: str, against: str, **more: Any) -> Step:
    """Rows of tricomm's choice and of the libraries `against`, checked, eager and as a CUDA graph."""
    asked = {"ranks": ranks, "collectives": collectives, "sizes": sizes, "against": against, "modes": "eager,graph"}
    return Step(name, (sys.executable, "-m", PLUGIN, "bench", json.dumps(asked)), tests=False, **more)


def all_steps(gpus: int) -> tuple[Step, ...]:
    """All steps for a machine with `gpus` GPUs; checks precede measurements of the same value.

    Ranks are processes, or streams of one process. Processes on one GPU take turns, so only streams show a kernel's
    time.
    """
    ranks, at_once = (min(gpus, MOST_RANKS), ("first",)) if gpus > 1 else (2, ("first",))
    streams, eight = ("two streams",), ("two streams", "eight streams")
    first = f"{_TESTS}/test_first_gpu.py"
    steps = [
        pytest(
            "first",
            first,
            f"{_TESTS}/test_gpu.py::test_a_killed_rank_is_named_within_two_seconds",
            keyword="not streams",
            share=None,
        ),
        pytest("two streams", first, keyword="streams and 2ranks", share=None),
        pytest("eight streams", first, keyword="streams and 8ranks", share=None, needs=streams),
        pytest("streams, one size", _STREAMS, keyword="one_size and 2ranks", share=3.0, needs=streams),
        pytest(
            "processes, one size", _PROCESSES, keyword="not sweep and not rare and 2ranks", share=2.0, needs=at_once
        ),
        pytest(
            "c10d and DDP", f"{_TESTS}/test_c10d_gpu.py", f"{_TESTS}/test_training_gpu.py", share=2.0, needs=at_once
        ),
    ]
    if gpus > 1:
        steps += [
            pytest("several GPUs", f"{_TESTS}/test_many_gpus.py", share=4.0, needs=at_once),
            bench("all collectives, NCCL", ranks, "all", "1K:64M:4", "nccl", share=3.0, needs=at_once, limit=1200.0),
        ]
    for library in ("nccl", "symm_mem"):  # apart, because one that crashes ends the command
        steps.append(
            bench(f"all_reduce, {library}", ranks, "all_reduce", "64K,4M", library, needs=at_once, limit=200.0)
        )
    steps += [
        pytest("times, one size", _TIMES, keyword="limit or host or (one_size and 2ranks)", share=3.0, needs=streams),
        pytest(
            "faults, graphs, threads",
            f"{_TESTS}/test_gpu.py",
            f"{_TESTS}/test_gpu_contact.py",
            f"{_TESTS}/test_message_gpu.py",
            f"{_TESTS}/test_uneven_gpu.py",
            f"{_TESTS}/test_cuda_gpu.py",
            share=4.0,
            needs=at_once,
        ),
        pytest("memcheck", f"{_TESTS}/test_sanitizer_gpu.py", keyword="memcheck and all_reduce", needs=at_once),
        pytest("streams, every size", _STREAMS, keyword="every_size and 2ranks", share=2.0, needs=streams),
        pytest("processes, graphs and epochs", _PROCESSES, keyword="rare and 2ranks", share=2.0, needs=at_once),
        pytest("times, all sizes", _TIMES, keyword="2ranks", share=2.0, needs=streams),
        pytest("streams, one size, 4 and 8 ranks", _STREAMS, keyword="one_size", share=2.0, needs=eight),
        pytest("times, 4 and 8 ranks", _TIMES, share=2.0, needs=eight),
        bench("all_reduce, all sizes", ranks, "all_reduce", "1K:64M:4", "nccl,symm_mem", needs=at_once, limit=600.0),
        bench("all_reduce with RMSNorm", ranks, "all_reduce_rms_norm", "64K,1M", "nccl", needs=at_once, limit=300.0),
        pytest("streams, every type", _STREAMS, keyword="2ranks", share=2.0, needs=streams),
        pytest("processes, every type", _PROCESSES, keyword="2ranks", share=2.0, needs=at_once),
        pytest("compute-sanitizer", f"{_TESTS}/test_sanitizer_gpu.py", share=2.0, needs=at_once),
        pytest("streams, all", _STREAMS, share=2.0, needs=eight),
        pytest(
            "all other tests",
            _TESTS,
            "--ignore",
            _STREAMS,
            "--ignore",
            _TIMES,
            "--ignore",
            first,
            share=2.0,
            needs=at_once,
        ),
    ]
    return tuple(steps)
