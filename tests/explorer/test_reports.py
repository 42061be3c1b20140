"""Reports: written to files, replayed exactly, shrunk; and the command for it."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
import triton
from click.testing import CliRunner

import tricomm
from tests.explorer import small_kernels as k
from tests.explorer.test_check import two_writers, words
from tests.marks import some
from tricomm import explorer
from tricomm.cli import cli
from tricomm.errors import InvalidArgument, ResourceError
from tricomm.explorer import campaign, selftest, shipped, subjects
from tricomm.explorer.report.findings import Execution
from tricomm.explorer.report.report import Report, digest
from tricomm.explorer.schedule import shrinking
from tricomm.explorer.schedule.strategies import Given, RandomWalk
from tricomm.kernels.collectives import registry
from tricomm.kernels.launch import interpreter, triton_adapter

USERS_FILE = '''
import torch
import triton
import triton.language as tl


@triton.jit
def swap(peers, out_ptr, rank, FLAG: tl.constexpr):
    """Each rank writes to the other."""
    for r in tl.static_range(2):
        if r != rank:
            tl.store(peers[r] + 8, rank + 10)
            tl.debug_barrier()
            if FLAG:
                tl.atomic_xchg(peers[r], 1, sem="release", scope="sys")
    for r in tl.static_range(2):
        if r == rank:
            if FLAG:
                while tl.atomic_add(peers[r], 0, sem="acquire", scope="sys") != 1:
                    pass
            tl.debug_barrier()
            tl.store(out_ptr, tl.load(peers[r] + 8))


def call(comm, flag):
    memory, out = comm.symmetric((16,), torch.int64), torch.zeros(1, dtype=torch.int64)
    memory.local.zero_()
    comm.barrier()
    comm.launch(swap, 1, memory.peers, out, comm.rank, FLAG=flag)
    comm.barrier()
    return out


def racy(comm):
    return call(comm, False)


def right(comm):
    return call(comm, True)
'''


@pytest.fixture
def users_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    return path


def ordered_race(comm):
    """Wrong only under schedules in which rank 1 runs after some, but not all of rank 0's four turns."""
    memory, out = words(comm), torch.full((4,), -1)
    comm.launch(k.tickets, 1, memory.peers, out, WORLD_SIZE=comm.world_size, TIMES=4)
    comm.barrier()
    if comm.rank == 1 and 0 < int(out[0]) < 4:
        raise AssertionError("in the middle")


def summary(report: Report):
    return [(f.kind, f.ranks, f.where, f.text, f.execution) for f in report.findings], report.steps, report.ran


@functools.cache
def shrunk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinking, "STEPS", 1000)
        return tricomm.check(ordered_race, 2, schedules=200, seed=3)


@functools.cache
def as_found(seed, turn=0):
    """The report without a search for a simpler execution, which takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinking, "shrink", lambda again, finding, execution, most: execution)
        return tricomm.check(ordered_race, 2, schedules=200, seed=seed)


def test_a_campaign_repeats_itself_and_its_seed_matters():
    assert not as_found(3).ok
    assert summary(as_found(3)) == summary(as_found(3, turn=1)) != summary(as_found(4))


@pytest.mark.soak
def test_a_search_for_a_simpler_execution_repeats_itself():
    first = summary(shrunk())
    shrunk.cache_clear()
    assert summary(shrunk()) == first


def test_shrunk_choices_still_show_the_finding():
    unshrunk = len(as_found(3).findings[0].execution.choices)
    report = shrunk()
    (finding,) = report.findings
    assert 1 <= len(finding.execution.choices) < unshrunk
    assert [f.key for f in explorer.replay(report, ordered_race)[0]] == [finding.key]


def test_a_report_survives_its_file_and_repeats_exactly(tmp_path):
    report = tricomm.check(two_writers, 2, schedules=3)
    report.save(tmp_path / "report.json")
    stored = Report.load(tmp_path / "report.json")
    assert summary(stored) == summary(report) and stored.findings == report.findings
    ((result,),) = explorer.replay(stored, two_writers)
    assert (result.kind, result.where, result.text) == (
        report.findings[0].kind,
        report.findings[0].where,
        report.findings[0].text,
    )
    assert explorer.replay(stored, lambda comm: words(comm) and None) == [[]], "the corrected kernel repeats it"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"schema": 9, "tool": "tricomm check"}', '{"schema": 1, "tool": "x"}', "[" * 100_000],
    ids=["empty", "object", "list", "newer", "another tool", "nested"],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "no.json").write_text(text)
    with pytest.raises(InvalidArgument, match="no report of tricomm check"):
        Report.load(tmp_path / "no.json")


def changed(report, path, value):
    """`report` as JSON, with `value` at `path`; without it if that is ...."""
    *within, last = path
    target = report
    for key in within:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(report)


EXECUTION = ("findings", 0, "execution")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*EXECUTION, "patience"), 2**70),
        ((*EXECUTION, "patience"), 10**400),
        ((*EXECUTION, "seed"), 10**400),
        ((*EXECUTION, "choices"), [[10**400, "r0b0"]]),
        ((*EXECUTION, "choices"), [[1, None]]),
        ((*EXECUTION, "fault"), ["drop", 7, 3]),
        ((*EXECUTION, "fault"), ["burn", 0, 3]),
        ((*EXECUTION, "fault"), ["stop", "x", "y"]),
        ((*EXECUTION, "seed"), ...),
        (("findings", 0, "where"), [None]),
        (("findings", 0, "where"), None),
        (("findings", 0, "text"), "\0"),
        (("findings", 0, "events", 0, "chain"), 3),
        (("findings", 0, "events", 0, "rank"), ...),
        (("subject", "file"), "\0"),
        (("subject", "function"), ["x"]),
        (("subject", "function"), ...),
        (("subject",), {"kernel": "barrier", "sizes": [10**400]}),
        (("subject",), {"kernel": "barrier"}),
        (("seconds",), 10**400),
        (("seed",), None),
        (("world_size",), 10**400),
        (("options", "timeout"), 10**400),
        (("options", "bogus"), 1),
        (("options",), None),
        (("subject",), None),
        (("schema",), 99),
    ],
    ids=lambda v: f"{v!r:.20}",
)
def test_a_changed_report_is_refused_by_name(users_file, tmp_path, path, value):
    report = tricomm.check(subjects.from_file(f"{users_file}:racy"), 2, schedules=5).as_json()
    (tmp_path / "changed.json").write_text(changed(report, path, value))
    done = command("--replay", tmp_path / "changed.json", "--timeline", tmp_path / "picture.svg")
    assert done.exit_code == 2 and "Error: " in done.output, done.exception


def test_a_report_with_odd_accesses_is_still_drawn(users_file, tmp_path):
    report = tricomm.check(subjects.from_file(f"{users_file}:racy"), 2, schedules=5).as_json()
    (tmp_path / "changed.json").write_text(changed(report, ("findings", 0, "accesses"), [{}, {"step": None}]))
    done = command("--replay", tmp_path / "changed.json", "--timeline", tmp_path / "picture.svg")
    assert done.exit_code == 1 and "<svg" in (tmp_path / "picture.svg").read_text()


def command(*arguments):
    return CliRunner().invoke(cli, ["check", *map(str, arguments)])


def test_the_command_checks_a_users_function_and_repeats_its_report(users_file, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "race.html"
    done = command(f"{users_file}:racy", "--world-size", 2, "--schedules", 5, "--report", report, "--timeline", picture)
    assert done.exit_code == 1 and "race" in done.output and "mine.py:" in done.output and "simulated" in done.output
    assert "<svg" in picture.read_text()
    again = command("--replay", report)
    assert again.exit_code == 1 and "1. repeated: race" in again.output and "has changed" not in again.output
    users_file.write_text(USERS_FILE.replace("@triton.jit", "# one more line\n@triton.jit"))
    moved = command("--replay", report)
    assert moved.exit_code == 1 and "mine.py has changed since" in moved.output
    assert "NOT repeated: race" in moved.output and "found instead: race" in moved.output
    users_file.write_text(USERS_FILE.replace("return call(comm, False)", "return call(comm, True)"))
    mended = command("--replay", report)
    assert mended.exit_code == 0 and "NOT repeated" in mended.output


def test_the_command_on_a_right_function_and_as_json(users_file):
    done = command(f"{users_file}:right", "--world-size", 2, "--schedules", 12, "--json")
    (result,) = json.loads(done.output)
    assert done.exit_code == 0 and result["ok"] and result["ran"] == 12 and result["simulated"] is True
    assert result["subject"] == {"file": str(users_file), "function": "right", "sha256": digest(str(users_file))}


def test_the_command_checks_shipped_kernels():
    done = command("--collective", "barrier", "--world-size", 2, "--schedules", 2)
    assert done.exit_code == 0 and done.output.startswith("barrier: no finding in 2 schedules")
    report = Path("report-of-nothing.json")
    assert not report.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.py:fn"], "file that exists"),
        (["--algorithm", "three_shot"], "no shipped kernel has algorithm three_shot; there is one_shot/ll"),
        (["--fault", "fire"], "fault 'fire' is unknown; there is delay, stop, drop\n"),
        (["--world-size", "17"], "17"),
        (["--replay", "nowhere.json"], "does not exist"),
        (["--report", "/no/such/folder/r.json"], "the folder /no/such/folder does not exist"),
        (["--timeline", "/no/such/folder/t.svg"], "the folder /no/such/folder does not exist"),
        (["--timeline", "t.png"], "as .html or as .svg"),
    ],
    ids=str,
)
def test_arguments_that_the_command_refuses(monkeypatch, arguments, text):
    if arguments[0] in ("--report", "--timeline"):  # before the campaign
        monkeypatch.setattr(campaign, "check", lambda *a, **k: pytest.fail("it has begun"))
    done = command(*arguments)
    assert done.exit_code == 2 and text in done.output


@pytest.mark.parametrize("name", ["nothing", "1st", "os.path"])
def test_functions_that_a_file_does_not_have(users_file, name):
    done = command(f"{users_file}:{name}", "--world-size", 2)
    assert done.exit_code == 2 and ("has no function" in done.output or "file.py:function" in done.output)


def test_functions_and_partials_are_offered_and_kernels_are_not(tmp_path):
    """Checks a copy of the example, which needs no other file."""
    example = shutil.copy(Path(__file__).parents[2] / "examples" / "own_kernel.py", tmp_path)
    done = command(f"{example}:rong")
    assert done.exit_code == 2 and "it has ring, racy\n" in done.output
    done = command(f"{example}:shift")
    assert done.exit_code == 2 and "shift is a kernel: name a function that allocates its memory" in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [("import no_such_module_at_all\n", "ModuleNotFoundError"), ("raise SystemExit(0)\n", "does not load: SystemExit")],
)
def test_a_file_that_does_not_load(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    done = command(f"{tmp_path / 'bad.py'}:fn")
    assert done.exit_code == 2 and said in " ".join(done.output.split())


# Self-tests of the hooks into Triton


def test_a_hook_that_triton_no_longer_calls_is_noticed(monkeypatch):
    selftest.require()
    selftest.require.cache_clear()
    monkeypatch.setattr(
        triton_adapter, "_accessed", lambda kind, pointer, mask, sem, scope, original, *rest, **more: original(mask)
    )
    with pytest.raises(ResourceError, match="self-test failed"):
        tricomm.check(two_writers, 2, schedules=1)
    monkeypatch.undo()
    selftest.require()


def test_a_hook_that_triton_no_longer_has_is_named(monkeypatch):
    monkeypatch.setattr(triton_adapter, "_HOOKED", (*triton_adapter._HOOKED, "create_something_else"))
    with pytest.raises(InvalidArgument, match="lacks what tricomm hooks into: create_something_else"):
        tricomm.simulate(lambda comm: None, 2)


def test_an_unknown_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    for run in (tricomm.simulate, tricomm.check):
        with pytest.raises(InvalidArgument, match=r"4\.0\.0 is not among the tested versions"):
            run(lambda comm: None, 2)


def test_private_names_of_triton_are_in_the_modules_that_adapt_it():
    root = Path(interpreter.__file__).resolve().parents[2]
    users = {
        path.name
        for folder in ("kernels", "store", "perf", "tricomm")
        for path in (root / folder).rglob("*.py")
        if "triton.runtime" in path.read_text()
    }
    assert users == {"triton_adapter.py", "triton_shortcuts.py", "interpreted_wide.py", "jit_dispatch.py"}


_REPEATED = [registry.find("send", "one_shot", "ll"), registry.find("all_reduce", "two_shot", "simple")]


@pytest.mark.parametrize("kernel", some(_REPEATED, 2), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("keep", [0.0, 0.8])
def test_the_choices_of_an_execution_repeat_it(kernel, keep):
    """Also if a block is parked between two steps, which asks the strategy twice at one step."""
    options = shipped.options(3, kernel=kernel)
    body = shipped.body(kernel, shipped.sizes(kernel, 3, options))
    subject = campaign.prepared(body, 3, options, None, 100_000, None)
    for seed in range(2):
        execution = Execution(seed, delays=seed if seed % 2 else None)
        first = campaign.run_one(subject, execution, RandomWalk(seed, keep))
        again = campaign.run_one(subject, execution, Given(first.choices))
        assert (again.steps, again.choices) == (first.steps, first.choices)
        assert len({step for step, _ in first.choices}) < len(first.choices)
