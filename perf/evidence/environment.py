"""Where a result comes from: date, commit, versions, hardware, and what else is on the machine."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm.perf import provenance as known
from tricomm.perf.evidence.stage import Settings

_SOURCES = (".py", ".json")
_PACKAGES = ("cuda-bindings", "cuda-core", "nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")


def facts(settings: Settings) -> dict[str, Any]:
    """JSON. A run goes on with another one's cases only if all of this but date and commit is the same."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "sources": sources(),
        "device": "cpu, simulated" if settings.dry_run else device(),
        "processor": known.guarded(known.processor),
        "versions": {**known.versions(), **{name: _version(name) for name in _PACKAGES}},
        "nccl": known.guarded(_nccl),
    }


def device() -> list[dict[str, Any]] | str:
    """The GPUs as torch sees them, and their driver."""
    if not torch.cuda.is_available():
        return "none"
    driver = known.guarded(partial(_query, "driver_version"))
    found = []
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        found.append(
            {"name": it.name, "architecture": f"sm_{it.major}{it.minor}", "processors": it.multi_processor_count,
             "memory_bytes": it.total_memory, "l2_bytes": it.L2_cache_size, "driver": driver}
        )  # fmt: skip
    return found


def sources() -> str:
    """The SHA-256 of what runs, as it lies on the disk: code and tables of tricomm with kernels, store and perf."""
    folder, found = Path(tricomm.__file__).resolve().parent, hashlib.sha256()
    names = [Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names]
    for path in sorted(path for path in names if path.suffix in _SOURCES):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def commit() -> str:
    """The commit of the checkout that this runs from, with + where files differ from it."""
    root = Path(tricomm.__file__).resolve().parent.parent
    try:
        git = partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10, check=True)
        name = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"not a checkout; tricomm {tricomm.__version__}"
    return f"{name}+" if changed else str(name)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "not in this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _query(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
