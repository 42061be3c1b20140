"""Whether a process's resources grow with the number of groups that it has made."""

from __future__ import annotations

import ctypes
import gc
import os
from statistics import median

MEBIBYTE = 1 << 20
FEWEST = 6  # samples of a process needed to judge its growth
COUNTS = ("descriptors", "threads", "mappings")


def sample() -> dict[str, int]:
    """This process's bytes of memory and numbers of descriptors, threads and mappings of shared memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    with open("/proc/self/maps") as file:
        mappings = sum("memfd:" in line or "/dev/shm" in line for line in file)
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
    }


def grown(samples: list[dict[str, int]], memory_limit: int) -> dict[str, int]:
    """The growth from the first third of `samples` to the last; memory only if it is more than `memory_limit` bytes.

    The lowest count of the last third is compared with the highest of the first, so that a resource that is being
    freed when a sample is taken is no growth.
    """
    if len(samples) < FEWEST:
        return dict.fromkeys((*COUNTS, "memory"), 0)
    third = len(samples) // 3
    first, last = samples[:third], samples[-third:]
    results = {name: max(0, min(s[name] for s in last) - max(s[name] for s in first)) for name in COUNTS}
    more = int(median(s["memory"] for s in last) - median(s["memory"] for s in first))
    return {**results, "memory": more if more > memory_limit else 0}


def orphans(before: set[str]) -> list[str]:
    """Names in /dev/shm that were not there `before` and that no living process has open or mapped."""
    new = {name for name in os.listdir("/dev/shm") if name not in before}
    if not new:
        return []
    held = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps") as file:
                held |= {line.rsplit("/dev/shm/")[-1].strip() for line in file if "/dev/shm/" in line}
            fds = os.listdir(f"/proc/{process}/fd")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        held |= {name.removeprefix("/dev/shm/") for name in map(_target, (f"/proc/{process}/fd/{fd}" for fd in fds))}
    return sorted(new - held)


def _target(link: str) -> str:
    """The target of a descriptor; empty if it was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
