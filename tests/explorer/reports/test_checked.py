"""`@tricomm.checked`: tests of pytest and unittest that are checked under many schedules."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import tricomm
from tests.explorer.small_kernels import two_writers
from tests.explorer.test_check import words
from tests.forked import python_path
from tricomm.errors import InvalidArgument
from tricomm.explorer import subjects

TESTS = '''
import unittest

import pytest
import torch

import tricomm
from tests.explorer import test_check

checked = tricomm.checked(world_size=2, schedules=2)


@pytest.fixture
def three():
    return 3.0


@checked
def test_racy(comm):
    test_check.two_writers(comm)


@pytest.mark.parametrize("count", [1, 3, 5])
@checked
def test_counts(comm, three, count):
    """Sums."""
    x = torch.full((count,), three)
    comm.all_reduce(x)
    if count == 5:
        pytest.skip("no five")
    assert x.tolist() == [6.0] * count, "wrong sum"


class TestOfClass:
    @checked
    def test_method(self, comm, three):
        assert isinstance(self, TestOfClass)
        assert comm.world_size == three, "not three"


class Case(unittest.TestCase):
    @checked
    def test_case(self, comm):
        comm.barrier()
        self.assertEqual(comm.world_size, 2)
'''


def test_pytest_shows_the_report_and_fixtures_and_parameters_work(tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(tmp_path)]
    environment = {"PYTHONPATH": python_path(), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path)
    out = done.stdout
    assert "2 failed, 3 passed, 1 skipped" in out, out + done.stderr
    for line in ("FAILED test_mine.py::test_racy", "PASSED test_mine.py::test_counts[3]", "PASSED test_mine.py::Case"):
        assert line in out, out
    assert "E   AssertionError: 1 finding(s) in 1 schedules" in out and "race at small_kernels.py:" in out
    assert "not three" in out and "no five" in out
    assert "explorer/decorator.py" not in out, "a frame of ours is shown"


def test_without_pytest(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nsys.modules['pytest'] = sys.modules['_pytest'] = None\nimport tricomm\n"
        "@tricomm.checked(world_size=2, schedules=1)\ndef fine(comm):\n    comm.barrier()\n    print('ran')\nfine()\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env={"PYTHONPATH": python_path(), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.stdout == "ran\n" * 2, done.stderr


def test_settings_are_those_of_check_and_the_body_keeps_its_name():
    @tricomm.checked(world_size=2, schedules=1, ignore=["race"])
    def racy(comm):
        """Two writers."""
        comm.launch(two_writers, 1, words(comm).peers, comm.rank, WORLD_SIZE=comm.world_size)

    racy()
    assert (racy.__name__, racy.__doc__) == ("racy", "Two writers.") and not inspect.signature(racy).parameters


def test_a_program_takes_its_arguments_by_name():
    @tricomm.checked(world_size=2, schedules=1)
    def program(*, count):
        x = torch.ones(count, device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * count
        symm_mem.rendezvous(symm_mem.empty(1, device="cuda"), dist.group.WORLD).barrier()

    assert list(inspect.signature(program).parameters) == ["count"]
    program(count=3)


def test_the_command_checks_a_checked_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import tricomm\n@tricomm.checked(world_size=2)\ndef fine(comm):\n    comm.barrier()\n    return comm.rank\n"
    )
    function = subjects.from_file(f"{tmp_path}/mine.py:fine")
    assert tricomm.simulate(function, 3) == [0, 1, 2]


def test_a_mistaken_use_is_refused():
    with pytest.raises(InvalidArgument, match="world_size=0"):
        tricomm.checked(world_size=0)(lambda comm: None)()
    with pytest.raises(TypeError, match="schedule"):
        tricomm.checked(world_size=2, schedule=1)(lambda comm: None)()
    with pytest.raises(TypeError):
        tricomm.checked(lambda comm: None)


def test_a_fixture_in_the_place_of_the_communicator_is_told_what_it_was_given():
    @tricomm.checked(world_size=2, schedules=1)
    def test(tmp_path):
        return tmp_path / "x"

    with pytest.raises(AssertionError, match="tmp_path was a tricomm.Communicator, as the first argument is"):
        test()


def test_a_test_that_examines_nothing_does_not_pass():
    async def later(comm):
        raise AssertionError("never seen")

    def each(comm):
        yield

    for body in (later, each):
        with pytest.raises(InvalidArgument, match=f"{body.__name__} is a generator or a coroutine"):
            tricomm.checked(world_size=2)(body)
    with pytest.raises(AssertionError, match="nothing was examined: in 2 schedules of 2 rank"):
        tricomm.checked(world_size=2, schedules=2)(lambda comm: None)()


def test_a_class_method():
    class Owner:
        number = 3

        @classmethod
        @tricomm.checked(world_size=2, schedules=1)
        def test_method(cls, comm, more):
            comm.barrier()
            assert (cls.number, more) == (3, 4)

    Owner.test_method(more=4)
