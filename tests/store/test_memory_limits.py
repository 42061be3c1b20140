"""The memory that a process may still allocate: limited by the machine and by control groups of both versions."""

import errno
import os

import pytest

from tricomm.errors import ResourceError
from tricomm.store import segments
from tricomm.store.segments import Segment

MACHINE = {"/proc/meminfo": b"MemTotal: 9 kB\nMemAvailable: 8 kB\n"}
V2 = {"/proc/self/cgroup": b"0::/job/../step/task\n"}
V1 = {"/proc/self/cgroup": b"5:cpu:/\n4:cpuset,memory:/slurm/job\n1:name=systemd:/x\n"}


def v2(group: str, limit: bytes, used: int, cached: int = 0) -> dict[str, bytes]:
    root = f"/sys/fs/cgroup{group}"
    stat = b"anon 5\ninactive_file %d\nslab 7\n" % cached
    return {f"{root}/memory.max": limit, f"{root}/memory.current": b"%d\n" % used, f"{root}/memory.stat": stat}


def v1(group: str, limit: int, used: int, cached: int = 0) -> dict[str, bytes]:
    root = f"/sys/fs/cgroup/memory{group}"
    return {
        f"{root}/memory.limit_in_bytes": b"%d\n" % limit,
        f"{root}/memory.usage_in_bytes": b"%d\n" % used,
        f"{root}/memory.stat": b"cache 1\ntotal_inactive_file %d\n" % cached,
    }


@pytest.mark.parametrize(
    "files, free",
    [
        ({"/proc/self/cgroup": b""}, 8192),
        (V2, 8192),  # its group is not visible
        (V2 | v2("", b"5000\n", 1000), 4000),
        (V2 | v2("", b"max\n", 9000) | v2("/job", b"5000\n", 100) | v2("/job/step/task", b"3000\n", 700), 2300),
        (V2 | v2("/job", b"5000\n", 4990, cached=1500) | v2("/job/step", b"max\n", 1), 1510),
        (V2 | v2("/job/step", b"600\n", 700), 0),
        (V1 | v1("", 1 << 62, 5) | v1("/slurm/job", 7000, 6500, cached=200), 700),
        (V1 | v1("/slurm", 3000, 500), 2500),
        (V1 | v2("", b"10\n", 1), 8192),  # of the other cgroup version
    ],
)
def test_the_least_limit_of_the_control_groups_around_a_process_counts(files, free, monkeypatch):
    monkeypatch.setattr(segments.process, "read", reader(MACHINE | files))
    assert segments.available_memory() == free


def reader(files: dict[str, bytes]):
    def read(path: str) -> bytes:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return files[path]

    return read


@pytest.mark.parametrize("files", [{}, MACHINE])
def test_without_proc_it_is_named(files, monkeypatch):
    monkeypatch.setattr(segments.process, "read", reader(files))
    with pytest.raises(ResourceError, match="/proc/.* cannot be read: mount /proc"):
        Segment.create("tricomm-test", 4096)
