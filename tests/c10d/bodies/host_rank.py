"""Two ranks on one of two hosts: `python -m tests.c10d.bodies.host_rank RANK WORLD_SIZE ADDRESS FOLDER...`.

Runs RANK and RANK + 1, once for each FOLDER, as soon as that folder has a file `begin`; each rank writes a report and
a log. In the folder named `ids` the ranks have node ids, in the others each host has its own directory of sockets.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tricomm.c10d

LIMIT = 6.0


def main(rank: int, world_size: int, url: str, folder: Path) -> None:
    dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    mine, _ = dist.new_subgroups(2)
    x, y = torch.ones(3), torch.ones(3)
    dist.all_reduce(x)
    between = tricomm.stats()
    dist.all_reduce(y, group=mine)
    inside = tricomm.stats()
    facts = dist.group.WORLD._dispatcher.router(torch.device("cpu")).facts
    seen = {
        "whole": x[0].item(),
        "part": y[0].item(),
        "kernels": inside["kernels"],
        "gloo": between["gloo"],
        "why": facts.no_kernels,
        "nodes": facts.nodes,
    }
    last = dist.new_group(timeout=timedelta(seconds=LIMIT))
    dist.all_reduce(x, group=last)
    (folder / f"ready{rank}").touch()
    wait_for(folder / "cut")
    began = time.monotonic()
    try:
        dist.all_reduce(x, group=last)
        seen["error"] = "none"
    except tricomm.TricommError as error:
        seen["error"], seen["text"] = type(error).__name__, str(error)
    seen["seconds"] = time.monotonic() - began
    z = torch.ones(2)
    dist.all_reduce(z, group=mine)  # a group within one node still works
    seen["after"] = z[0].item()
    (folder / f"writing{rank}").write_text(json.dumps(seen))
    (folder / f"writing{rank}").rename(folder / f"found{rank}")  # never seen in part
    os._exit(0)  # no destroy_process_group: rank 0 hosts the store, and the link to it is cut


def logged(rank: int, world_size: int, url: str, folder: Path) -> None:
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        main(rank, world_size, url, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    _first, _size, _address, *_folders = sys.argv[1:]
    for _turn, _folder in enumerate(map(Path, _folders)):
        wait_for(_folder / "begin")
        if _folder.name == "ids":
            os.environ["TRICOMM_NODE_ID"] = f"host {_first}"
        else:
            os.environ.pop("TRICOMM_NODE_ID", None)
            sockets = _folder / f"sockets{_first}"
            sockets.mkdir()
            os.environ["TRICOMM_SOCKET_DIR"] = str(sockets)  # of the host's own
        _pids = []
        for _rank in (int(_first), int(_first) + 1):
            _pids.append(os.fork())  # both have what this process has imported
            if _pids[-1] == 0:
                logged(_rank, int(_size), f"tcp://{_address}:{29511 + _turn}", _folder)
        for _pid in _pids:
            os.waitpid(_pid, 0)
