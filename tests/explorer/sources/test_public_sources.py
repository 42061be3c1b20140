"""Public kernels as they are, from checkouts in the folder that TRICOMM_PUBLIC_KERNELS names."""

import os
import shutil
import sys
from pathlib import Path

import pytest

import tricomm
from tests.explorer.sources.cases import CASES, KRAKEN, MUTANTS
from tricomm.explorer import subjects

FOLDER = os.environ.get("TRICOMM_PUBLIC_KERNELS") or None
pytestmark = [
    pytest.mark.usefixtures("unshrunk", "own_modules"),
    pytest.mark.skipif(FOLDER is None, reason="TRICOMM_PUBLIC_KERNELS=DIR names no folder with checkouts"),
]


@pytest.fixture
def own_modules():
    """A test's modules of public packages, and the stubs of them, are not there for the next one."""
    before = set(sys.modules)
    yield
    packages = {Path(case.file).parts[1] for case in CASES}
    for name in [n for n in sys.modules if n not in before and n.partition(".")[0] in packages]:
        del sys.modules[name]


def program(folder, case):
    name = f"{folder / case.file}:{case.function}"
    if not (folder / case.file).is_file():
        pytest.skip(f"{folder} has no {case.file}")
    function = subjects.from_file(name, case.stubs)
    return subjects.with_arguments(function, case.arguments, 2, name, case.stubs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_kernel_as_it_is(case):
    report = tricomm.check(program(Path(FOLDER), case), 2, case.schedules, compiled=case.compiled)
    assert [finding.kind for finding in report.findings[:1]] == [case.kind][: bool(case.kind)], report
    if case.kind == "race":
        assert report.findings[0].effect.startswith("formal") is not case.real, report
    named = [line(where) for finding in report.findings[:1] for where in finding.where]
    assert all(any(text in one for one in named) for text in case.lines), (named, report)


def line(where):
    """The text of file:line; "" for what is in no file."""
    file, _, number = where.rpartition(":")
    return Path(file).read_text().splitlines()[int(number) - 1] if Path(file).is_file() else ""


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.name}".replace(" ", "-")
)
def test_a_mistake_in_it_is_named(tmp_path, mutant):
    case = next(case for case in KRAKEN if case.file.endswith(mutant.of))
    source = Path(FOLDER) / "kraken" / "kraken"
    if not source.is_dir():
        pytest.skip(f"{FOLDER} has no kraken")
    shutil.copytree(source, tmp_path / "kraken" / "kraken")
    mutant.put(tmp_path / "kraken" / "kraken")
    report = tricomm.check(program(tmp_path, case), 2, 200)
    assert not report.ok, "passed"
    assert report.findings[0].kind in mutant.kinds.split(), report
