"""Two hosts on one machine: network, PID and mount namespaces, joined by a virtual cable; two ranks on each."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.c10d.bodies.host_rank import LIMIT

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two network namespaces joined by a cable; skips where the machine does not permit them."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip and unshare")
    names = [f"tricomm{os.getpid()}{side}" for side in "ab"]
    cables = [f"tc{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        subprocess.run(["unshare", "-p", "-m", "-f", "true"], check=True, capture_output=True, timeout=20)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, PermissionError) as error:
        remove(names)
        pytest.skip(f"namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield list(zip(names, cables, strict=True))
    remove(names)


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def start(host: tuple[str, str], rank: int, folders: list[Path]) -> subprocess.Popen[str]:
    name, cable = host
    # Both ranks of a host in one PID namespace: one process starts them.
    command = ["ip", "netns", "exec", name, "unshare", "-p", "-m", "-f", "--mount-proc", "--kill-child"]
    command += [sys.executable, "-m", "tests.c10d.bodies.host_rank"]
    more = {"PYTHONPATH": forked.python_path(), "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1"}
    more |= {"TRICOMM_CPU": "kernels", "TRICOMM_ARENA_BYTES": str(256 * 1024)}
    command += [str(rank), "4", ADDRESSES[0], *map(str, folders)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more})


def wait_for(folder: Path, what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not all((folder / f"{what}{rank}").exists() for rank in range(4)):
        logs = "\n".join((folder / f"log{r}").read_text()[-1500:] for r in range(4) if (folder / f"log{r}").exists())
        assert time.monotonic() < end, f"no {what}: {logs}"
        time.sleep(0.1)


def seen(hosts, folder: Path) -> list[dict]:
    """The reports of the ranks of `folder`, between which the cable is cut."""
    (folder / "begin").touch()
    wait_for(folder, "ready", 120)
    cable = ("-n", hosts[1][0], "link", "set", hosts[1][1])
    ip(*cable, "down")
    (folder / "cut").touch()
    wait_for(folder, "found", 120)
    ip(*cable, "up")
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(4)]


def test_two_hosts(hosts, tmp_path):
    """With ids of the nodes; then without: a boot id that they share stands for one node, and the shared-memory
    handshake finds that it is not."""
    folders = [tmp_path / "ids", tmp_path / "boot"]
    started = []
    for folder in folders:
        folder.mkdir()
    try:
        for side, host in enumerate(hosts):
            started.append(start(host, 2 * side, folders))
        for folder in folders:
            for rank_seen in seen(hosts, folder):
                ids = folder.name == "ids"
                assert (rank_seen["whole"], rank_seen["part"], rank_seen["after"]) == (4.0, 2.0, 2.0)
                assert rank_seen["gloo"] == rank_seen["kernels"] == {"all_reduce": 1}
                assert rank_seen["nodes"] == (2 if ids else 1)
                assert ids or "cannot share memory" in rank_seen["why"] and "TRICOMM_SOCKET_DIR" in rank_seen["why"]
                assert rank_seen["error"] in ("CollectiveTimeout", "GroupAborted", "PeerStalled"), rank_seen
                assert "all_reduce" in rank_seen["text"] and rank_seen["seconds"] < LIMIT + 10
    finally:
        for process in started:
            process.kill()
            process.wait(20)
