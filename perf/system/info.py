"""The facts of `tricomm info`: this machine, the installed software, and the choices that tricomm makes here.

Every probe is guarded: an unknown fact is `not available: reason`, and the command never fails.
"""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm import env
from tricomm.errors import ResourceError
from tricomm.kernels import layout
from tricomm.kernels.launch import interpreter
from tricomm.metrics import publish
from tricomm.options import Options
from tricomm.perf import provenance
from tricomm.perf.history import database
from tricomm.perf.units import DATA_COLLECTIVES
from tricomm.policy import selection, user_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.store import descriptors
from tricomm.store.arenas.open_arena import expected_kind, no_multicast_expected
from tricomm.topology import discovery
from tricomm.topology.nvml import Nvml, load_nvml

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 26)
_WORLDS = (2, 4, 8)
_LIBRARIES = ("libcuda", "libcudart", "libnccl", "libnvidia-ml", "libtorch_cuda")
_FOREIGN = (
    "NCCL_P2P_DISABLE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_NVLS_ENABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "GLOO_SOCKET_IFNAME",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_INCLUDE_STACK_TRACE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_STATS = ("TRICOMM_STATS", "TRICOMM_STATS_EVERY", "TRICOMM_STATS_DIR")
VARIABLES = (
    "TRICOMM_P2P_DISABLE",
    "TRICOMM_TOKEN",
    "TRICOMM_CPU",
    "TRICOMM_LOG",
    "TRICOMM_TUNING_DIR",
    "TRICOMM_DUMP_SIGNAL",
    "TRICOMM_NVTX",
    "TRICOMM_SHARE_DEVICE",
    "TRICOMM_BATCH_INVARIANT",
    "TRICOMM_WIRE",
    "TRICOMM_CUBINS",
    "TRICOMM_COMPILE_AFTER_SET_UP",
    *_STATS,
    "TRICOMM_SOCKET_DIR",
    "TRICOMM_CHECK",
    "TRICOMM_NODE_ID",
    "TRICOMM_BLOCKING_WAIT",
    "TRICOMM_ARENA_BYTES",
    "VLLM_TRICOMM",
    "SGLANG_TRICOMM",
    "TRICOMM_ENGINE_MAX_BYTES",
    "TRICOMM_MULTICAST",
    "TRICOMM_CUDA_VMM",
    "TRICOMM_DEPENDENT_LAUNCH",
)


def collect() -> dict[str, Any]:
    """All facts, as plain JSON values."""
    guarded = provenance.guarded
    return {
        "versions": {"loaded": guarded(provenance.versions), "installed": guarded(provenance.installed)},
        "libraries": guarded(_loaded_libraries),
        "processor": guarded(provenance.processor),
        "devices": guarded(_devices),
        "links": guarded(_links),
        "peer_access": guarded(_peer_access),
        "topology": guarded(_topology),
        "memory": guarded(_memory),
        "interpreter": guarded(lambda: interpreter.supported() or "available: this Triton is one that was tested"),
        "simulated": guarded(lambda: not torch.cuda.is_available()),
        "batch_invariant": guarded(_batch_invariant),
        "paths": guarded(_paths),
        "environment": guarded(_environment),
        "limits": guarded(_limits),
        "selection": guarded(_selection),
        "ranges": guarded(_ranges),
    }


def _memory() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, reason = expected_kind(gpus)
    text = f"{kind}, passed over sockets in {descriptors.base()}" if not reason else f"{kind}: {reason}"
    if not gpus:
        return text
    refusal = no_multicast_expected(gpus)
    return f"{text}; " + (f"no multicast: {refusal}" if refusal else "multicast, if the ranks' probe agrees")


def _batch_invariant() -> str:
    if env.batch_invariant():
        return "in every group: TRICOMM_BATCH_INVARIANT is set"
    return "in groups made with Options(batch_invariant=True); TRICOMM_BATCH_INVARIANT=1 makes all groups so"


def _loaded_libraries() -> dict[str, str]:
    """Paths of this process's shared libraries, because several versions may be installed."""
    libraries = {}
    for text in Path("/proc/self/maps").read_text().splitlines():
        path = text.split(maxsplit=5)[5] if text.count("/") else ""
        name = Path(path).name.split(".so")[0]
        if name in _LIBRARIES:
            libraries[name] = path
    return libraries


def _devices() -> list[dict[str, Any]] | str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "not available: this process sees no CUDA device"
    devices = []
    for index in range(count):
        p = torch.cuda.get_device_properties(index)
        architecture, gib = f"sm_{p.major}{p.minor}", round(p.total_memory / (1 << 30), 1)
        devices.append(
            {
                "index": index,
                "name": p.name,
                "architecture": architecture,
                "memory_gib": gib,
                "processors": p.multi_processor_count,
                "uuid": str(getattr(p, "uuid", "not available")),
            }
        )
    return devices


def _peer_access() -> list[list[bool | None]] | str:
    """True if the device of the row reaches the device of the column."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "not available: this process sees no CUDA device"
    reach = torch.cuda.can_device_access_peer
    return [[None if a == b else bool(reach(a, b)) for b in range(count)] for a in range(count)]


def _links() -> list[dict[str, Any]] | str:
    """Active NVLinks per device and the PCI address at their far ends."""
    try:
        nvml = load_nvml()
        with nvml.session():
            devices = enumerate(nvml.handles())
            return [provenance.guarded(partial(_device_links, nvml, index, device)) for index, device in devices]
    except ResourceError as error:
        return f"not available: {error}"


def _device_links(nvml: Nvml, index: int, device: int) -> dict[str, Any]:
    ends = nvml.links(device)
    remote = sorted({end.address or end.kind for end in ends})
    return {"index": index, "nvlinks": len(ends), "remote": remote, "source": nvml.source}


def _topology() -> str:
    read = discovery.read()
    return f"not available: {read.reason}" if read.topology is None else read.topology.kind


def _paths() -> dict[str, str]:
    from triton import knobs

    return {
        "tuning tables": str(user_tables.folder()),
        "history": str(database.default_path()),
        "live statistics": str(publish.folder()),
        "triton cache": str(provenance.guarded(lambda: knobs.cache.dir)),
        "package": str(Path(tricomm.__file__).resolve().parent),
    }


def _environment() -> dict[str, str]:
    """The variables that tricomm reads, if they are set. A token's value is secret and not shown."""
    values = {name: env.text(name) for name in (*VARIABLES, *_FOREIGN)}
    return {n: "(set)" if n == "TRICOMM_TOKEN" else v for n, v in values.items() if v is not None}


def _limits() -> dict[str, Any]:
    def shared_memory() -> dict[str, int]:
        space = os.statvfs("/dev/shm")
        return {"bytes": space.f_blocks * space.f_frsize, "free_bytes": space.f_bavail * space.f_frsize}

    def locked() -> dict[str, Any]:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return {"soft": _limit(soft), "hard": _limit(hard)}

    def files() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    return {
        "dev_shm": provenance.guarded(shared_memory),
        "memlock_bytes": provenance.guarded(locked),
        "open_files": provenance.guarded(files),
        "arena_bytes_per_rank": Options().arena_bytes,
    }


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _selection() -> list[dict[str, Any]]:
    """The choices for some sizes (input bytes per rank) and world sizes, with the row of the table that decides."""
    sites = [_site(world_size) for world_size in _WORLDS]
    choices = []
    for collective in DATA_COLLECTIVES:
        for site in sites:
            for nbytes in SIZES:
                choice = selection.choose(site, collective, nbytes)
                facts = {"device": site.device, "collective": collective, "ranks": site.world_size, "nbytes": nbytes}
                choices.append(facts | {name: getattr(choice, name) for name in ("algorithm", "protocol", "reason")})
    return choices


def _ranges() -> list[dict[str, Any]]:
    """The same for all sizes: the kernel from least to most bytes (None: no limit), with the row that decides."""
    sites = [_site(world_size) for world_size in _WORLDS]
    return [row for collective in DATA_COLLECTIVES for site in sites for row in _ranges_of(collective, site)]


def _ranges_of(collective: str, site: SelectionFacts) -> list[dict[str, Any]]:
    ranges: list[dict[str, Any]] = []
    least = 1
    for most in (*selection.limits(site, collective), None):
        choice = selection.choose(site, collective, least)
        kernel = {"device": site.device, "collective": collective, "ranks": site.world_size}
        kernel |= {name: getattr(choice, name) for name in ("algorithm", "protocol", "table", "row")}
        if ranges and all(ranges[-1][name] == value for name, value in kernel.items()):
            ranges[-1]["to"] = most
        else:
            ranges.append({**kernel, "from": least, "to": most})
        least = 0 if most is None else most + 1
    return ranges


def _site(world_size: int) -> SelectionFacts:
    """The facts that selection would have in a communicator of the first `world_size` devices."""
    kind, device, topology, no_multicast = "cpu", torch.device("cpu"), None, ""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        kind, device, topology = f"sm_{major}{minor}", torch.device("cuda"), discovery.read().topology
        refusal = no_multicast_expected(min(world_size, torch.cuda.device_count()))
        no_multicast = selection.why_not_multicast(kind, refusal)
    if topology is not None:
        topology = topology.of(range(world_size)) if world_size <= len(topology) else None
    mine = user_tables.load(user_tables.fingerprint(kind, device, world_size, topology))
    return SelectionFacts(
        kind,
        world_size,
        layout.plan(world_size, Options().arena_bytes),
        layout.MAX_BLOCKS,
        topology=topology.kind if topology is not None else "",
        tuned=mine.rows if mine is not None else (),
        tuned_name=mine.name if mine is not None else "",
        batch_invariant=env.batch_invariant(),
        no_multicast=no_multicast,
    )
