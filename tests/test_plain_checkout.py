"""torch, Triton and NumPy run tricomm from a checkout; commands and the explorer name the extra that they need.

A `sitecustomize` hides all other packages from these processes and from their children.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.gpu_evidence.steps import all_steps
from tests.wheel_gate import ROOT
from tricomm.kernels import layout
from tricomm.policy import selection, user_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

REFUSED = ("click", "greenlet", "hypothesis", "msgspec", "platformdirs", "plotly", "prometheus_client", "rich")
HOOK = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in REFUSED else found(name, path, target)

PathFinder.find_spec = find_spec
"""
_PARTS = {
    "a group": """
import os, tempfile, torch, tricomm
def group():
    with tempfile.TemporaryDirectory() as folder:
        with tricomm.init(f"file://{folder}/m", rank=0, world_size=1, device="cpu") as comm:
            assert torch.equal(comm.all_reduce(torch.arange(100.0)), torch.arange(100.0))
            print(comm.explain("all_reduce", nbytes=400).table, comm._internal.group.fingerprint.digest)
group()
sys.stderr.write("before the table\\n")
""",
    "a table": """
os.environ["TRICOMM_TUNING_DIR"] = os.environ["TABLES"]
group()
""",
    "selection": """
from tricomm.policy import selection
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.kernels import layout
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable
print({table}.digest.hex())
site = SelectionFacts('sm_90', 8, layout.plan(8, 64 << 20), 64, topology='nvswitch')
print([selection.choose(site, 'all_reduce', 1 << bits) for bits in range(28)])
""",
    "uses": """
assert "check" in dir(tricomm)
for use in ("tricomm.check", "tricomm.simulate", "from tricomm import Report", "import tricomm.explorer",
            "tricomm.chekc"):
    try:
        exec(use)
    except Exception as error:
        print(type(error).__name__, error)
""",
    "torch": """
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
dist.init_process_group("tricomm", store=HashStore(), rank=0, world_size=1)
def step(x):
    dist.all_reduce(x)
    return torch.ops.tricomm.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
print(torch.compile(step, backend="aot_eager")(torch.ones(4)).tolist())
import tricomm.flashinfer, tricomm.fsdp2
from tricomm.engines import engine_group, sglang_all_reduce, sglang_plugin, vllm_plugin
vllm_plugin.register(), sglang_plugin.register()
dist.destroy_process_group()
""",
    "steps": """
from devtools.gpu_evidence.__main__ import main
assert main(["--list"]) == 0
""",
    "facts": """
from devtools.gpu_evidence import children
assert children.main("facts") == 0
""",
}
_CPU = Fingerprint("cpu", "", 1)
_TABLE = TunedTable(
    Fingerprint("sm_90", "GPU \u00fc", 4), (TableRow("all_reduce", 4, 4096, "one_shot", "ll", bits=16),)
)


def _run(
    folder: Path, *arguments: str, refused: tuple[str, ...] = REFUSED, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python without other packages, outside of the checkout."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(f"REFUSED = {refused}{HOOK}")
    known = {k: v for k, v in os.environ.items() if k != "TRICOMM_TUNING_DIR"}
    results = {**known, "PYTHONPATH": f"{folder / 'hook'}{os.pathsep}{ROOT}", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=results, capture_output=True, text=True, timeout=250
    )


def _good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """The file of a user's table for one rank on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRICOMM_TUNING_DIR", str(tmp_path_factory.mktemp("tables")))
        row = TableRow("all_reduce", 1, None, "two_shot", "simple")
        return user_tables.save(TunedTable(_CPU, (row,)))


@pytest.fixture(scope="module")
def said(tmp_path_factory, table) -> dict[str, list[str]]:
    """The lines of each of `_PARTS` and the errors; one process runs all parts, because its imports take long."""
    script = "import sys\n" + "".join(f"print('=== {name}')\n{part}" for name, part in _PARTS.items())
    script = script.replace("{table}", repr(_TABLE))
    done = _run(tmp_path_factory.mktemp("plain"), "-c", script, TABLES=str(table.parent))
    lines = {name: text.splitlines() for name, text in (p.split("\n", 1) for p in _good(done).split("=== ")[1:])}
    return {**lines, "errors": done.stderr.splitlines()}


@pytest.mark.parametrize("package", REFUSED)
def test_the_hook_refuses_other_packages(tmp_path, package):
    done = _run(tmp_path, "-c", f"import {package}")
    assert done.returncode == 1 and f"No module named '{package}'" in done.stderr


def test_the_evidence_lists_its_steps_and_knows_the_machine(said):
    assert said["steps"] == [step.name for step in all_steps(2)]
    assert json.loads(said["facts"][0])["versions"]["torch"]


def test_the_evidence_measures_with_ranks_in_processes(tmp_path):
    asked = {"ranks": 2, "collectives": "all_reduce", "sizes": "1K", "against": "gloo", "modes": "eager"}
    told = json.dumps({"folder": str(tmp_path), "step": "bench", "end": 0.0})
    done = _run(tmp_path, "-m", "devtools.gpu_evidence.children", "bench", json.dumps(asked), GPU_EVIDENCE=told)
    assert "2 rows, 0 wrong elements" in _good(done)


def test_a_group_without_a_users_table_logs_nothing(said):
    assert said["a group"] == [f"cpu {_CPU.digest}"]  # as where everything is installed
    assert not any("table" in line for line in said["errors"][: said["errors"].index("before the table")])


def test_a_users_table_is_used(said):
    assert said["a table"] == [f"tuned {_CPU.digest} (simulated) {_CPU.digest}"]


def test_a_process_group_compiles(said):
    assert said["torch"] == [str([2.0] * 4)]


@pytest.mark.parametrize("command", [("tune",), ("check", "--help"), ()])
def test_a_command_without_its_extra_names_the_extra(tmp_path, command):
    done = _run(tmp_path, "-m", "tricomm", *command)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr == "tricomm: the command line needs click and rich: pip install 'tricomm[cli]'\n"


@pytest.mark.parametrize("command", [("check", "--schedules", "1"), ("predict", "--from-code")])
def test_commands_of_the_explorer_name_its_extra(tmp_path, command):
    done = _run(tmp_path, "-m", "tricomm", *command, refused=("greenlet",))
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "need greenlet, which is not installed: pip install 'tricomm[explorer]'" in done.stderr


def test_the_model_that_counts_bytes_needs_no_explorer(tmp_path):
    done = _run(tmp_path, "-m", "tricomm", "predict", "--sizes", "64K", refused=("greenlet",))
    assert "all_reduce_one_shot_ll" in _good(done) or "one_shot" in done.stdout


def test_selection_and_digests_are_those_of_an_install(said):
    """Ranks must agree although their machines have different packages installed."""
    site = SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), 64, topology="nvswitch")
    choices = [selection.choose(site, "all_reduce", 1 << bits) for bits in range(28)]
    assert said["selection"] == [_TABLE.digest.hex(), str(choices)]


def test_the_explorer_names_its_missing_package_and_unknown_names_are_attribute_errors(said):
    *needing, unknown = said["uses"]
    assert len(needing) == 4
    for text in needing:
        assert text.startswith("ImportError tricomm.check, tricomm.simulate and all of tricomm.explorer need greenlet")
        assert "pip install 'tricomm[explorer]'" in text
    assert "AttributeError" in unknown and "has no attribute 'chekc'" in unknown and "greenlet" not in unknown
