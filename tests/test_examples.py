"""Every example runs and prints the expected text, the first one both under spawn and under torchrun."""

import os
import socket
import subprocess
import sys

import pytest

from tests import forked
from tests.wheel_gate import ROOT

SAYS = {
    "hello": ["2 ranks: sum [3.0, 3.0, 3.0, 3.0]"],
    "every_collective": [
        "broadcast       [0.0, 1.0] -> [0.0, 1.0]",
        "all_gather      [0.0] -> [0.0, 10.0]",
        "reduce_scatter  [0.0, 1.0] -> [10.0]",
        "all_to_all      [0.0, 1.0] -> [0.0, 10.0]",
        "scatter         [0.0, 1.0] -> [0.0]",
        "gather          [0.0] -> [0.0, 10.0]",
        "all_reduce max  [0.0, 1.0] -> [10.0, 11.0]",
        "reduce          [0.0, 1.0] -> [10.0, 12.0]",
    ],
    "overlap": ["sum 1.0, twice that 2.0"],
    "sub_groups": ["rank 0 of 4: over its column 2.0, over its row 1.0"],
    "cross_job": [f"job {j} rank {r}: weights [0.0, 1.0, 2.0, 3.0], ranks in my job 2" for j in (0, 1) for r in (0, 1)],
    "ddp": ["the reference's bits: True"],
    "fsdp2": ["this rank holds 512 of 1024 elements"],
    "fsdp2_in_place": ["AllGather: 2584 bytes of symmetric memory", "to the bit: True"],
    "tensor_parallel": ["close to the whole model: True"],
    "fused_norm": ["the same bits by either name: True, FP8 within its precision: True"],
    "racy_kernel": ["race at racy_kernel.py", "make it sem='release', after a tl.debug_barrier()"],
    "own_kernel": ["no finding in 20 schedules"],
    "elastic": [f"rank {r}, life {r}: the bits of a run without faults: True" for r in (0, 1)],
    "serving": ["rank 1 is lost", "request 8: as the whole model: True", "served to the end: True"],
    "meeting_points": ["file: [2.0, 2.0]", "tcp: [2.0, 2.0]", "communicator: [2.0, 2.0]"],
}
EXAMPLES = ROOT / "examples"
ALONE = ("cross_job", "meeting_points", "serving")
TORCHRUN = [
    ("hello", False, 2),
    pytest.param("hello", True, 2, marks=pytest.mark.exhaustive),
    *(
        pytest.param(name, False, 4 if name == "sub_groups" else 2, marks=pytest.mark.exhaustive)
        for name in sorted({*SAYS} - {*ALONE, "hello", "own_kernel"})  # tests/documents runs own_kernel
    ),
    pytest.param("tensor_parallel", False, 3, marks=pytest.mark.exhaustive),
    pytest.param("ddp", True, 2, marks=pytest.mark.soak),
]


def run(command: list[str], real: bool = False, **more: str) -> str:
    """`real`: in a new Python process, as a user starts it."""
    env = {**os.environ, "PYTHONPATH": forked.python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    if real:
        command = [sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, cwd=ROOT)
    else:
        done = forked.script(*command, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


REFUSED = {
    "sub_groups": "needs 4 ranks and has 2; torchrun --nproc-per-node 4 works",
    **dict.fromkeys(ALONE, "starts its own ranks, without torchrun: python examples/"),
}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_example_that_does_not_support_torchrun_exits_at_once_on_each_rank(name, rank):
    """In torchrun's environment, at an address where no store listens: a rank that tried to join would time out."""
    told = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env = {**os.environ, "PYTHONPATH": forked.python_path(), **told}
    done = forked.script(f"examples/{name}.py", env=env, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"examples/{name}.py {REFUSED[name]}") and done.stderr.count("\n") == 1


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"common"} == set(SAYS)


@pytest.mark.parametrize(
    ("name", "real"), [*((name, False) for name in SAYS), pytest.param("hello", True, marks=pytest.mark.exhaustive)]
)
def test_example(name, real):
    said = run([f"examples/{name}.py"], real)
    for line in SAYS[name]:
        assert line in said


@pytest.mark.parametrize(("name", "real", "ranks"), TORCHRUN)
def test_example_under_torchrun(name, real, ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
    said = run([*command, f"examples/{name}.py"], real)
    for line in SAYS[name]:
        assert line in said


def test_an_example_over_the_kernels():
    said = run(["examples/ddp.py"], TRICOMM_CPU="kernels", TRICOMM_ARENA_BYTES="1048576")
    assert SAYS["ddp"][0] in said
