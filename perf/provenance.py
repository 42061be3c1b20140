"""Facts about this machine and this installation. A fact that cannot be read is given as not available."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

import tricomm
from tricomm import Communicator
from tricomm.perf import box


def guarded(probe: Callable[[], Any]) -> Any:
    """The probe's result, or `not available: reason` if it raises anything."""
    try:
        return probe()
    except Exception as error:
        return f"not available: {type(error).__name__}: {error}".rstrip(": ")


def versions() -> dict[str, str]:
    """Versions as loaded; `cuda` is the version that torch was built for."""
    return {
        "tricomm": tricomm.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "not available: torch was built without CUDA",
    }


def installed() -> dict[str, str]:
    """Versions in the packages' metadata; they differ from the loaded ones if there are two copies."""
    names = ("tricomm", "torch", "triton", "numpy", "cuda-bindings", "nvidia-ml-py", "nccl4py")
    return {name: guarded(partial(_installed, name)) for name in names}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit of the checkout that tricomm was loaded from, `+` if files differ; empty for an installed copy."""

    def git(*arguments: str) -> str:
        folder = Path(tricomm.__file__).resolve().parent
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    def read() -> str:
        if not (Path(tricomm.__file__).resolve().parent.parent / ".git").exists():
            return ""
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")

    text: str = guarded(read)
    return "" if text.startswith("not available") else text


def processor() -> str:
    """The CPU's name and the number of cores that this process may use."""

    def name() -> str:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))

    return f"{guarded(name)}, {len(os.sched_getaffinity(0))} cores"


def topology(comm: Communicator) -> str:
    """How the ranks of `comm` reach each other, in words."""
    if comm.simulated:
        return f"{comm.world_size} processes of one host over shared memory"
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return f"{comm.world_size} ranks share one GPU"
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    open_pairs = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    return f"{gpus} GPUs, {open_pairs} of {len(pairs)} ordered pairs have peer access"


def header(comm: Communicator) -> dict[str, Any]:
    """The facts at the head of every table and every JSON file of measurements."""
    return {
        "device": processor() if comm.simulated else torch.cuda.get_device_name(comm.device),
        "topology": guarded(lambda: topology(comm)),
        "ranks": comm.world_size,
        "kind": comm.kind,
        "simulated": comm.simulated,
        "box": box.dumps(comm),
        "versions": versions(),
    }
