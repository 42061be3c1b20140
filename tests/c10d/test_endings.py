"""Processes that exit without destroying their group, and groups that are destroyed with calls in flight."""

import socket

import pytest

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
    # The peer exits while this interpreter shuts down: a thread that returns from Gloo at that time would abort it.
    "a call that no peer joins": """
class Slow:
    def __del__(self):
        time.sleep(2)

rank or dist.all_reduce(x, async_op=True)
slow = None if rank else Slow()
time.sleep(0.5 * rank)
""",
    "a call joined late": "time.sleep(0.7 * rank); work = dist.all_reduce(x, async_op=True); rank and work.wait()",
    "callbacks in C++": """
big, done = torch.ones(500, 500), dist.all_reduce(x, async_op=True).get_future()
for _ in range(3):
    done.add_done_callback(lambda f: [big @ big for _ in range(30)])
""",
    "a long callback in C++": """
dist.all_reduce(x, async_op=True).get_future().add_done_callback(lambda f: time.sleep(4))
""",
    "destroyed in a callback": """
done = dist.all_reduce(x, async_op=True).get_future().then(lambda f: dist.destroy_process_group())
rank or done.wait()
""",
    "an exception": "dist.barrier(); raise SystemExit(0)",
}

# The endings that the quick run covers: each on one route, one of them on both.
QUICK = {
    ("handles dropped", "kernels"),
    ("destroyed under way", "gloo"),
    ("a call that no peer joins", "gloo"),
    ("destroyed in a callback", "kernels"),
    ("callbacks in C++", "gloo"),
    ("a long callback in C++", "gloo"),
}


@pytest.mark.parametrize(
    ("how", "route"),
    [
        pytest.param(how, route, marks=[] if (how, route) in QUICK else [pytest.mark.exhaustive])
        for how in ENDS
        for route in ("gloo", "kernels")
    ],
)
def test_a_process_ends_with_its_own_exit_code(how, route, fresh, tmp_path):
    for code, _, said in fresh.run(tmp_path, BEGIN + ENDS[how], f"file://{tmp_path}/store", route):
        assert code == 0, said
        assert "Traceback" not in said and "terminate" not in said, said


def test_a_rank_that_exits_after_the_store_server_prints_no_stack_trace(fresh, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = BEGIN + "time.sleep(1.5 * rank); dist.destroy_process_group()"
    for code, _, said in fresh.run(tmp_path, script, f"tcp://127.0.0.1:{port}", "gloo"):
        assert code == 0 and "TCPStore" not in said, said


def test_an_open_communicator_is_closed_at_exit_and_one_line_says_so(fresh, tmp_path):
    script = """
import sys, torch, tricomm
options = tricomm.Options(arena_bytes=262144)
comm = tricomm.init(sys.argv[2], int(sys.argv[1]), 2, "cpu", options=options)
comm.all_reduce(torch.ones(3))
comm.barrier()
sys.exit(5)
"""
    for code, _, said in fresh.run(tmp_path, script, f"file://{tmp_path}/store"):
        assert code == 5 and said.count("was not closed; closing it at exit") == 1 and "Traceback" not in said, said


def test_a_process_that_fails_is_noticed(fresh, tmp_path):
    script = "import sys\nif sys.argv[1] == '1':\n    sys.exit(7)\nprint('begins'); raise ValueError(sys.argv[2])"
    (code, out, said), (other, *_) = fresh.run(tmp_path, script, "bad")
    assert (code, out, other) == (1, "begins\n", 7) and "ValueError: bad" in said
