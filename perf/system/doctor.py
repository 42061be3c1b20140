"""The probes of `tricomm doctor`: possible problems of this machine, and remedies.

PASS: all is well. WARN: tricomm works, but slower or with fewer features. FAIL: something does not work. Each probe is
guarded: one that raises is a FAIL, and the others still run.
"""

from __future__ import annotations

import difflib
import importlib
import os
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import triton

import tricomm
from tricomm import cuda_bindings, env
from tricomm.c10d import capabilities
from tricomm.core import cubins
from tricomm.engines import engine_group
from tricomm.errors import TricommError
from tricomm.kernels.launch import compiler, interpreter
from tricomm.metrics import publish
from tricomm.metrics.counters import Activity
from tricomm.options import Options, with_environment
from tricomm.perf.history import database
from tricomm.perf.system import info
from tricomm.policy import user_tables
from tricomm.store import descriptors
from tricomm.store.arenas.open_arena import expected_kind, no_multicast_expected
from tricomm.store.descriptors import DescriptorSocket
from tricomm.store.segments import Segment
from tricomm.topology import discovery, nvml

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
_FILES = 1024  # descriptors: 8 ranks of one process, with memory and a watch on each peer, take some hundreds


class ProbeResult(NamedTuple):
    """A verdict on one subject; `remedy` is empty if it is PASS."""

    name: str
    verdict: str
    text: str
    remedy: str = ""


def examine() -> list[ProbeResult]:
    """All results, in the order of the probes. Starts no other process; makes a history if there is none."""
    return [result for name, probe in PROBES.items() for result in _guarded(name, probe)]


def _guarded(name: str, probe: Callable[[], Iterator[ProbeResult]]) -> list[ProbeResult]:
    try:
        return list(probe())
    except Exception as error:  # whatever a driver or a file system may raise
        text = f"the probe itself failed: {type(error).__name__}: {error}"
        return [ProbeResult(name, FAIL, text, "tell us, with the output of `tricomm info`")]


def _versions() -> Iterator[ProbeResult]:
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"tricomm {tricomm.__version__}, Python {python}, torch {torch.__version__}, triton {triton.__version__}"
    lacking = interpreter.supported()
    if lacking is None:
        yield ProbeResult("versions", PASS, text)
    else:
        verdict = WARN if torch.cuda.is_available() else FAIL  # on a GPU nothing is interpreted
        yield ProbeResult("versions", verdict, f"{text}: {lacking}", "install a Triton from 3.6 to 3.9")
    if torch.cuda.is_available() and (reason := compiler.refused()) is not None:
        yield ProbeResult("versions", FAIL, reason, "unset TRITON_INTERPRET; tricomm interprets on a CPU without it")


def _devices() -> Iterator[ProbeResult]:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        yield ProbeResult("devices", PASS, f"{count} CUDA devices, {torch.cuda.get_device_name(0)}")
        yield from _bindings()
        yield from _gpu_memory(count)
        yield from _peers(count)
        yield from _links()
    elif Path("/dev/nvidiactl").exists():
        built = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no device"
        yield ProbeResult(
            "devices",
            FAIL,
            f"there is an NVIDIA driver here, but {built}",
            "install torch with CUDA; in a container pass the devices (--gpus all); look at CUDA_VISIBLE_DEVICES",
        )
    else:
        yield ProbeResult(
            "devices",
            WARN,
            "no CUDA device: kernels run under Triton's interpreter, and times are simulated",
            "use a machine with NVIDIA GPUs for anything about speed",
        )


def _bindings() -> Iterator[ProbeResult]:
    if _missing("cuda.bindings.driver"):
        yield ProbeResult("driver", FAIL, "cuda-bindings is not installed", "pip install 'tricomm[cuda]'")
        return
    version = cuda_bindings.bindings_version()
    reason = cuda_bindings.refusal(version)
    if reason is not None:
        yield ProbeResult("driver", FAIL, reason, cuda_bindings.REMEDY)
    else:
        yield ProbeResult("driver", PASS, f"cuda-bindings {version} is installed; {cuda_bindings.NEEDED} is needed")


def _gpu_memory(count: int) -> Iterator[ProbeResult]:
    kind, reason = expected_kind(count)
    if kind == "cuda_vmm":
        yield ProbeResult("GPU memory", PASS, f"{kind}: shared by {reason or 'descriptors'}")
    else:
        remedy = "containers need --ipc=host and one PID namespace for it; a newer driver shares by descriptors"
        yield ProbeResult("GPU memory", WARN, f"{kind}: {reason}", remedy)
    refusal = no_multicast_expected(count)
    switch = f"no reductions in the switch: {refusal}" if refusal else "multicast addresses, if the ranks' probe agrees"
    yield ProbeResult("multicast", PASS, switch)


def _peers(count: int) -> Iterator[ProbeResult]:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    shut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if env.peer_access_disabled():
        yield ProbeResult(
            "peer access",
            WARN,
            "TRICOMM_P2P_DISABLE or NCCL_P2P_DISABLE refuses it: everything goes to NCCL",
            "unset both, unless that is what you want",
        )
    elif shut:
        yield ProbeResult(
            "peer access",
            WARN,
            f"{len(shut)} of {len(pairs)} ordered pairs have none, such as {shut[0]}",
            "links to peers need NVLink or one PCIe root, and no IOMMU or ACS between them; NCCL serves other groups",
        )
    else:
        yield ProbeResult("peer access", PASS, f"all {len(pairs)} ordered pairs")


def _links() -> Iterator[ProbeResult]:
    read = discovery.read()
    if read.topology is None:
        remedy = "pip install 'tricomm[cuda]', or give Options(topology=FILE)"
        yield ProbeResult("topology", WARN, f"unknown: {read.reason}; tables for any topology decide", remedy)
    else:
        yield ProbeResult("topology", PASS, read.topology.kind)
    try:
        yield ProbeResult("NVML", PASS, f"read through {nvml.load_nvml().source}")
    except TricommError as error:
        yield ProbeResult("NVML", WARN, str(error), nvml.REMEDY)


def _memory() -> Iterator[ProbeResult]:
    passing = DescriptorSocket()
    try:
        segment = Segment.create("tricomm-doctor", 1 << 20)
        segment.close()
    except TricommError as error:
        yield ProbeResult("shared memory", FAIL, str(error), "raise the memory limit of the container")
        return
    try:
        passing.bind()
        yield ProbeResult("shared memory", PASS, f"sealed memory is passed over sockets in {descriptors.base()}")
    except TricommError as error:
        yield ProbeResult("shared memory", FAIL, str(error), f"{descriptors.VARIABLE} names another directory")
    finally:
        passing.close()


def _limits() -> Iterator[ProbeResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        yield ProbeResult("open files", WARN, f"at most {soft}", f"ulimit -n {_FILES} (the hard limit is {hard})")
    else:
        yield ProbeResult("open files", PASS, f"at most {soft}")
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield ProbeResult("pidfd", PASS, "a dead peer is seen at once")
    except OSError as error:
        remedy = "a kernel from 5.3 on, and a seccomp profile that allows pidfd_open"
        text = "a dead peer is looked for in /proc instead, and ranks must share a PID namespace"
        yield ProbeResult("pidfd", WARN, f"{error}: {text}", remedy)


def _tables() -> Iterator[ProbeResult]:
    folder = user_tables.folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        yield ProbeResult("tuning tables", PASS, f"{folder} can be written")
    else:
        remedy = "TRICOMM_TUNING_DIR names another directory"
        yield ProbeResult("tuning tables", WARN, f"{folder} cannot be written, so tune cannot keep a table", remedy)
    try:
        found = user_tables.found()
    except TricommError as error:
        yield ProbeResult("tuning tables", WARN, f"{error}; they are ignored", "TRICOMM_TUNING_DIR names another one")
        return
    for file in found:
        try:
            user_tables.read(file)
        except TricommError as error:
            yield ProbeResult("tuning tables", WARN, f"{error}; it is ignored", f"tune again, and remove {file}")


def _history() -> Iterator[ProbeResult]:
    notes: list[str] = []
    history = database.open_history(say=notes.append)
    if history is not None:
        with history:
            rows = len(history)
        if not notes:
            yield ProbeResult("history", PASS, f"{history.path}, {rows} rows")
    if notes:
        yield ProbeResult("history", WARN, "; ".join(notes), "XDG_DATA_HOME names another directory for it")


def _variables() -> Iterator[ProbeResult]:
    probes: dict[str, Callable[[], object]] = {
        "TRICOMM_STATS": publish.interval,
        "TRICOMM_STATS_DIR": publish.check_folder,
        "TRICOMM_STATS_EVERY": lambda: Activity("", 0, 1, torch.device("cpu"), {}),
        "TRICOMM_ARENA_BYTES": lambda: capabilities.options_for(None, timedelta(minutes=10), "cpu"),
        "TRICOMM_CPU": capabilities.cpu_through_kernels,
        "TRICOMM_CHECK": capabilities.calls_are_compared,
        "TRICOMM_BLOCKING_WAIT": lambda: env.flag("TRICOMM_BLOCKING_WAIT"),
        "VLLM_TRICOMM": lambda: env.flag("VLLM_TRICOMM"),
        "SGLANG_TRICOMM": lambda: env.flag("SGLANG_TRICOMM"),
        "TRICOMM_ENGINE_MAX_BYTES": engine_group.max_bytes,
        "TRICOMM_P2P_DISABLE": env.peer_access_disabled,
        "TRICOMM_SHARE_DEVICE": env.share_device,
        "TRICOMM_BATCH_INVARIANT": env.batch_invariant,
        "TRICOMM_WIRE": lambda: with_environment(None),
        "TRICOMM_COMPILE_AFTER_SET_UP": env.compile_after_set_up,
        cubins.VARIABLE: cubins.check,
        "TRICOMM_CUDA_VMM": env.gpu_memory,
        "TRICOMM_MULTICAST": env.multicast,
        "TRICOMM_DEPENDENT_LAUNCH": env.dependent_launch,
        descriptors.VARIABLE: descriptors.base,
    }
    bad = False
    for name, probe in probes.items():
        try:
            probe()
        except TricommError as error:
            bad = True
            yield ProbeResult("environment", FAIL, str(error), f"unset {name}, or set it to what it takes")
    for name in env.unknown(info.VARIABLES):
        bad = True
        near = difflib.get_close_matches(name, info.VARIABLES, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        yield ProbeResult("environment", WARN, f"{name}: tricomm has no such variable{meant}", f"unset {name}")
    if not bad:
        yield ProbeResult("environment", PASS, "variables are what tricomm takes")


def _extras() -> Iterator[ProbeResult]:
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if torch.cuda.is_available() and not nccl:
        text = "torch has none: what the kernels do not cover is refused"
        yield ProbeResult("NCCL", WARN, text, "install torch with NCCL")
    uses = ("greenlet", "explorer", "check"), ("plotly", "report", "dashboard --html")
    for module, extra, what in (*uses, ("prometheus_client", "metrics", "metrics")):
        if _missing(module):
            text = f"{module} is not installed: no {what}"
            yield ProbeResult(module, WARN, text, f"pip install 'tricomm[{extra}]'")
        else:
            yield ProbeResult(module, PASS, f"installed: {what} works")


def _call() -> Iterator[ProbeResult]:
    if interpreter.supported() is not None:  # reported under versions
        return

    def body(comm: tricomm.Communicator) -> bool:
        x = torch.arange(1000.0) * (comm.rank + 1)
        return torch.equal(comm.all_reduce(x), torch.arange(1000.0) * 3)

    results = tricomm.simulate(body, 2, options=Options(arena_bytes=1 << 20))
    if all(results):
        yield ProbeResult("a call", PASS, "all_reduce of 2 simulated ranks is exact")
    else:
        remedy = "report it, with the output of `tricomm info`; `tricomm check` finds out more"
        yield ProbeResult("a call", FAIL, "all_reduce of 2 simulated ranks is wrong", remedy)


def _missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False


PROBES: dict[str, Callable[[], Iterator[ProbeResult]]] = {
    "versions": _versions,
    "devices": _devices,
    "shared memory": _memory,
    "limits": _limits,
    "tuning tables": _tables,
    "history": _history,
    "environment": _variables,
    "extras": _extras,
    "a call": _call,
}
