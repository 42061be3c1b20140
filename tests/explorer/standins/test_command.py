"""`tricomm check FILE:FUNCTION --args` for a function of a package that needs what this machine lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.explorer.standins import all_reduces
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.explorer import subjects

ARGUMENTS = "float(rank + 1), count=70"
LAST = "    barrier(pads, RANK, WORLD_SIZE, True, False)  # 2\n"
HEAD = "from gpu_only import registered\nfrom . import names\n\n\n@registered(names.NAME)\ndef one_shot("


@pytest.fixture
def package(tmp_path, request, monkeypatch):
    """A package `NAME` whose `__init__` does not load here; its kernel lacks the last barrier."""
    monkeypatch.delitem(sys.modules, "gpu_only", raising=False)
    name = f"package_of_{request.node.name.partition('[')[0]}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("import gpu_only_too\n")
    (folder / "names.py").write_text("NAME = 'one_shot'\n")
    text = Path(all_reduces.__file__).read_text().replace(LAST, "")
    (folder / "kernels.py").write_text(text.replace("def one_shot(", HEAD))
    return folder / "kernels.py"


def run(*arguments, code):
    done = CliRunner().invoke(cli, ["check", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_a_mistake_is_named_ignored_and_repeated(package, tmp_path):
    asked = (f"{package}:one_shot", "--args", ARGUMENTS, "--stub", "gpu_only", "--schedules", 8)
    report = tmp_path / "report.json"
    assert "race at kernels.py" in run(*asked, "--report", report, code=1)
    assert json.loads(report.read_text())["subject"]["arguments"] == ARGUMENTS
    assert "repeated: race at kernels.py" in run("--replay", report, code=1)
    run(*asked, "--ignore", "race", code=0)


def test_what_does_not_fit_is_said(package):
    name = f"{package}:one_shot"
    for arguments, said in (
        ((name, "--args", "1.0"), "--stub gpu_only replaces it"),
        ((name, "--args", "1.0 +", "--stub", "gpu_only"), "--args '1.0 +'"),
        ((name, "--args", "1.0", "--stub", "gpu_only", "--ignore", "bug"), "ignore=('bug',)"),
        (("--args", "1.0"), "--args and --stub are for FILE.py:FUNCTION"),
    ):
        assert said in run(*arguments, code=2)
    with pytest.raises(InvalidArgument, match="no function 'none'; it has .*one_shot"):
        subjects.from_file(f"{package}:none", ("gpu_only",))
