"""The origin of a result: date, commit, versions, hardware."""

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
from tricomm.perf import provenance
from tricomm.perf.evidence.stage import EvidenceSettings

_SOURCES = (".py", ".json")
_PACKAGES = ("cuda-bindings", "cuda-core", "nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")


def facts(settings: EvidenceSettings) -> dict[str, Any]:
    """As JSON. A run continues another one only if all of this but date and commit is the same."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": provenance.commit() or f"not a checkout; tricomm {tricomm.__version__}",
        "sources": sources(),
        "device": "cpu, simulated" if settings.dry_run else device(),
        "processor": provenance.guarded(provenance.processor),
        "versions": {**provenance.versions(), **{name: _version(name) for name in _PACKAGES}},
        "nccl": provenance.guarded(_nccl),
    }


def device() -> list[dict[str, Any]] | str:
    """The GPUs as torch sees them, and their driver."""
    if not torch.cuda.is_available():
        return "none"
    driver = provenance.guarded(partial(_query, "driver_version"))
    devices = []
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": it.name,
                "architecture": f"sm_{it.major}{it.minor}",
                "processors": it.multi_processor_count,
                "memory_bytes": it.total_memory,
                "l2_bytes": it.L2_cache_size,
                "driver": driver,
            }
        )
    return devices


def sources() -> str:
    """SHA-256 of the code and tables of tricomm with kernels, store and perf, as they are on the disk."""
    folder, digest = Path(tricomm.__file__).resolve().parent, hashlib.sha256()
    names = [Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names]
    for path in sorted(path for path in names if path.suffix in _SOURCES):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
