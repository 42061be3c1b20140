"""`tricomm check FILE:FUNCTION --args` for a function of a package that needs what this machine lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from click.testing import CliRunner

import tricomm
from tests.explorer.standins import all_reduces
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.explorer import subjects
from tricomm.explorer.report.report import Report

ARGUMENTS = "float(rank + 1), count=70"
LAST = "    barrier(pads, RANK, WORLD_SIZE, True, False)  # 2\n"
HEAD = "from gpu_only import registered\nfrom . import names\n\n\n@registered(names.NAME)\ndef one_shot("


@triton.autotune([triton.Config({"BLOCK": 128}, num_warps=2), triton.Config({"BLOCK": 64}, num_warps=1)], key=[])
@triton.jit
def block_size(out, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)


def of_a_communicator(comm):
    raise AssertionError("never called")


def chosen():
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    block_size[(1,)](out)
    return out.tolist()


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


def test_arguments_that_do_not_fit_are_named(package):
    name = f"{package}:one_shot"
    for arguments, said in (
        ((name, "--args", "1.0"), "--stub gpu_only replaces it"),
        ((name, "--args", "1.0 +", "--stub", "gpu_only"), "--args '1.0 +'"),
        ((name, "--args", "1.0", "--stub", "gpu_only", "--ignore", "bug"), "ignore=('bug',)"),
        (("--args", "1.0"), "--args, --config and --stub are for FILE.py:FUNCTION"),
        (("--config", 1), "--args, --config and --stub are for FILE.py:FUNCTION"),
        (
            (name, "--config", 1, "--stub", "gpu_only", "--args", "1.0", "--config", 2),
            "has no configuration 2; it has 0 to 1",
        ),
        ((f"{__file__}:of_a_communicator", "--config", 1), "--config chooses for autotuned kernels"),
        ((f"{__file__}:chosen", "--args", "1.0"), "--args '1.0': too many positional arguments; chosen ("),
        ((f"{__file__}:of_a_communicator", "--args", "1.0, more=2"), "got an unexpected keyword argument 'more'"),
        ((f"{__file__}:of_a_communicator", "--args", "unknown"), "--args 'unknown': NameError"),
        (
            (f"{__file__}:of_a_communicator", "--args", "symm_mem.empty('x')"),
            """--args "symm_mem.empty('x')": TypeError""",
        ),
        ((f"{__file__}:block_size", "--args", "1.0"), "block_size is a kernel: name a function that allocates"),
        ((f"{__file__}:block_size",), "block_size is a kernel: name a function that allocates"),
    ):
        assert said in run(*arguments, code=2)
    with pytest.raises(InvalidArgument, match="no function 'none'; it has .*one_shot"):
        subjects.from_file(f"{package}:none", ("gpu_only",))


def of_a_tensor(t):
    symm_mem.rendezvous(t, dist.group.WORLD)


def of_communicators(comm):
    raise ValueError("of its own")


def test_a_function_of_tensors_without_args_is_told_what_it_was_given():
    asked = f"{__file__}:of_a_tensor"
    assert "t was a tricomm.Communicator, as the first argument is without --args" in run(asked, code=1)
    assert "not made by symmetric memory's `empty`" in run(asked, "--args", "torch.ones(1, device='cuda')", code=1)
    assert "was a tricomm.Communicator" not in run(f"{__file__}:of_communicators", code=1)


@pytest.mark.parametrize("option", ["--report", "--timeline"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, option, monkeypatch):
    monkeypatch.setattr(subjects, "from_file", lambda *asked: pytest.fail("imported"))
    there, name = tmp_path / "there.html", f"{__file__}:of_a_communicator"
    there.write_text("before")
    with pytest.raises(pytest.fail.Exception, match="imported"):
        CliRunner().invoke(cli, ["check", name, option, str(there)], catch_exceptions=False)
    assert there.read_text() == "before"
    for file in ("x" * 300 + ".html", "none/x.html"):
        assert f"{option} {tmp_path / file}: " in run(name, option, tmp_path / file, code=2)
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(("config", "block"), [(0, 128), (1, 64)])
def test_an_autotuned_kernel_takes_the_configuration_that_is_chosen(config, block):
    program = subjects.with_arguments(chosen, "", 1, f"{__file__}:chosen", config=config)
    assert tricomm.simulate(program, 2) == [[[block]], [[block]]]


def test_a_report_keeps_configuration_and_stubs(package, tmp_path):
    report = tmp_path / "report.json"
    asked = (f"{package}:one_shot", "--args", ARGUMENTS, "--stub", "gpu_only", "--config", 1, "--schedules", 8)
    run(*asked, "--report", report, code=1)
    subject = json.loads(report.read_text())["subject"]
    assert (subject["config"], subject["stubs"]) == (1, ["gpu_only"])
    again = subjects.of_report(Report.load(report))
    assert again.subject == subject and again.config == 1


def test_a_copy_of_a_kernel_in_another_file_is_named_by_its_own_path(tmp_path):
    text = Path(all_reduces.__file__).read_text().replace(LAST, "")
    for name in ("first/one.py", "second/one.py", "third/renamed.py"):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text)
        asked = f"{file}:one_shot"
        program = subjects.with_arguments(subjects.from_file(asked), ARGUMENTS, 2, asked)
        report = tricomm.check(program, 2, schedules=8)
        assert report.findings and {where.rpartition(":")[0] for where in report.findings[0].where} == {str(file)}
