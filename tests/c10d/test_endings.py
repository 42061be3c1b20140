"""Processes that end without saying goodbye, and groups that are destroyed with calls under way."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, sys, time, torch, torch.distributed as dist, tricomm
from datetime import timedelta
rank, url = int(sys.argv[1]), sys.argv[2]
os.environ["TRICOMM_CPU"] = sys.argv[3]
os.environ["TRICOMM_ARENA_BYTES"] = "262144"
dist.init_process_group("tricomm", init_method=url, rank=rank, world_size=2, timeout=timedelta(seconds=60))
x = torch.ones(3)
dist.all_reduce(x)
assert x[0] == 2
"""
ENDS = {
    "nothing destroyed": "dist.all_reduce(x, async_op=True).wait()",
    "handles dropped": "[dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]; dist.barrier()",
    "destroyed under way": "[dist.all_reduce(x, async_op=True) for _ in range(20)]; dist.destroy_process_group()",
    # The other rank ends while the interpreter of this one does: a thread that comes back from Gloo then aborts it.
    "a call nobody joins": """
class Slow:
    def __del__(self):
        time.sleep(2)

rank or dist.all_reduce(x, async_op=True)
slow = None if rank else Slow()
time.sleep(0.5 * rank)
""",
    "a call joined late": "time.sleep(0.7 * rank); work = dist.all_reduce(x, async_op=True); rank and work.wait()",
    "an exception": "dist.barrier(); raise SystemExit(0)",
}

# Each process imports torch: in CI what may end in a way of its own, one of it on both routes.
QUICK = {
    ("handles dropped", "kernels"), ("destroyed under way", "gloo"), ("destroyed under way", "kernels"),
    ("a call nobody joins", "gloo"), ("a call joined late", "gloo"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("how", "route"),
    [
        pytest.param(how, route, marks=[] if (how, route) in QUICK else [pytest.mark.soak])
        for how in ENDS
        for route in ("gloo", "kernels")
    ],
)
def test_a_process_ends_with_its_own_exit_code(how, route, tmp_path):
    tmp_path.chmod(0o700)
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", BEGIN + ENDS[how], str(rank), f"file://{tmp_path}/store", route],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in started:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
            assert "Traceback" not in said and "terminate" not in said, said
    finally:
        for process in started:
            process.kill()
