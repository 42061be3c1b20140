"""One rank of the stage `faults`, a process of its own: rank 1 goes wrong, rank 0 notes what it gets and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tricomm
from tricomm.errors import TricommError
from tricomm.perf.workers import speak


def main(say: Callable[..., None], rank: int, world_size: int, url: str, data: Any) -> None:
    """Call on and on, until rank 1 goes wrong after a second; the clock is the same for all processes."""
    torch.set_num_threads(1)
    device = "cpu" if data["dry_run"] else "cuda:0"
    options = tricomm.Options(timeout=30.0, stall_timeout=data["stall"], arena_bytes=1 << 20, share_device=True)
    mark, end = Path(data["folder"]) / "began", time.monotonic() + 40.0
    with tricomm.init(url, rank, world_size, device, options=options) as comm:
        x = torch.zeros(100, device=device)
        comm.all_reduce(x)
        comm.barrier()
        wrong_at = time.monotonic() + 1.0
        try:
            while time.monotonic() < end:
                if rank == 1 and time.monotonic() > wrong_at:
                    mark.write_text(str(time.monotonic()))
                    _go_wrong(data["fault"], comm, data["stall"] * 2.5)
                comm.all_reduce(x)
                comm.synchronize()
            found = {"error": "nothing", "text": "no error within 40 s"}
        except TricommError as error:
            found = {"error": type(error).__name__, "text": str(error)}
        if rank == 0:
            after = time.monotonic() - float(mark.read_text()) if mark.exists() else -1.0
            partial = Path(data["folder"]) / "rank0.part"
            partial.write_text(json.dumps({**found, "after_s": after}))
            partial.rename(partial.with_suffix(".json"))


def _go_wrong(fault: str, comm: tricomm.Communicator, stopped_s: float) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        again = f"import os, time, signal; time.sleep({stopped_s}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-c", again])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        comm.all_reduce(torch.zeros(101, device=comm.device))


if __name__ == "__main__":
    sys.exit(speak(main))
