"""A checkout, PYTHONPATH, torch and Triton run tricomm and the GPU evidence kit: other packages are for other commands.

Processes here have a `sitecustomize` that refuses those packages, which the processes that they start have, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel_gate import ROOT
from tricomm.kernels import layout
from tricomm.policy import selection, user_tables
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

REFUSED = ("click", "greenlet", "msgspec", "platformdirs", "hypothesis", "plotly", "prometheus_client", "rich")
HOOK = f"""
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""
_GROUP = """
import tempfile, torch, tricomm
with tempfile.TemporaryDirectory() as folder:
    with tricomm.init(f"file://{folder}/m", rank=0, world_size=1, device="cpu") as comm:
        assert torch.equal(comm.all_reduce(torch.arange(100.0)), torch.arange(100.0))
        print(comm.explain("all_reduce", nbytes=400).table, comm.fingerprint.digest)
"""


@pytest.fixture
def plain(tmp_path):
    """Runs Python as such a machine would, from elsewhere than the checkout."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        known = {k: v for k, v in os.environ.items() if k != "TRICOMM_TUNING_DIR"}
        found = {**known, "PYTHONPATH": f"{tmp_path / 'hook'}{os.pathsep}{ROOT}", **variables}
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=found, capture_output=True, text=True, timeout=250
        )

    return run


def _good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("package", REFUSED)
def test_the_hook_does_refuse(plain, package):
    done = plain("-c", f"import {package}")
    assert done.returncode == 1 and f"No module named '{package}'" in done.stderr


def test_every_module_of_the_evidence_kit_imports(plain):
    walk = "import importlib, pkgutil, tricomm.perf.evidence as kit\n"
    walk += "for module in pkgutil.walk_packages(kit.__path__, kit.__name__ + '.'):\n"
    walk += "    importlib.import_module(module.name); print(module.name)"
    names = _good(plain("-c", walk)).split()
    wanted = {p.relative_to(ROOT).with_suffix("") for p in (ROOT / "perf" / "evidence").rglob("*.py")}
    wanted = {p.parent if p.name == "__init__" else p for p in wanted} - {Path("perf/evidence")}
    assert set(names) == {".".join(("tricomm", *p.parts)) for p in wanted}


def test_the_evidence_kit_lists_its_stages_and_runs_one_with_ranks_in_processes(plain):
    both = "from tricomm.perf.evidence.__main__ import main\n"
    both += "raise SystemExit(main(['--list']) or main(['--dry-run', '--stage', 'first', '--out', 'out']))"
    said = _good(plain("-c", both))
    assert "many_gpus" in said and "first: ok" in said


def test_a_group_finds_no_table_of_the_users_and_says_nothing(plain):
    done = plain("-c", _GROUP)
    assert _good(done).split() == ["cpu", Fingerprint("cpu", "", 1).digest]  # as where everything is installed
    assert "table" not in done.stderr


def test_a_users_table_that_cannot_be_read_is_named_and_ignored(plain, tmp_path, monkeypatch):
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "tables"))
    row = TableRow("all_reduce", 1, None, "two_shot", "simple")
    file = user_tables.save(TunedTable(Fingerprint("cpu", "", 1), (row,)))
    done = plain("-c", _GROUP, TRICOMM_TUNING_DIR=str(tmp_path / "tables"))
    assert _good(done).split()[0] == "cpu"
    assert f"tuning table {file}: No module named 'msgspec'; pip install msgspec; it is ignored" in done.stderr


def test_selection_and_digests_are_those_of_an_install(plain):
    """Ranks must agree, whatever each of their machines has installed."""
    row = TableRow("all_reduce", 4, 4096, "one_shot", "ll", bits=16)
    table = TunedTable(Fingerprint("sm_90", "GPU \u00fc", 4), (row,))
    site = selection.SelectionFacts("sm_90", 8, layout.plan(8, 64 << 20), 64, topology="nvswitch")
    choices = [selection.choose(site, "all_reduce", 1 << bits) for bits in range(28)]
    ask = "from tricomm.policy import selection\nfrom tricomm.kernels import layout\n"
    ask += "from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable\n"
    ask += f"print({table!r}.digest.hex())\n"
    ask += "site = selection.SelectionFacts('sm_90', 8, layout.plan(8, 64 << 20), 64, topology='nvswitch')\n"
    ask += "print([selection.choose(site, 'all_reduce', 1 << bits) for bits in range(28)])"
    assert _good(plain("-c", ask)).splitlines() == [table.digest.hex(), str(choices)]


_USES = """
import tricomm
assert "check" in dir(tricomm)
for use in ("tricomm.check", "tricomm.simulate", "from tricomm import Report", "import tricomm.explorer",
            "tricomm.chekc"):
    try:
        exec(use)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_the_explorer_says_what_it_needs_and_what_does_not_exist_is_no_matter_of_it(plain):
    *needing, unknown = _good(plain("-c", _USES)).splitlines()
    assert len(needing) == 4
    for said in needing:
        assert said.startswith("ImportError tricomm.check, tricomm.simulate and all of tricomm.explorer need greenlet")
        assert "pip install greenlet" in said
    assert "AttributeError" in unknown and "has no attribute 'chekc'" in unknown and "greenlet" not in unknown
