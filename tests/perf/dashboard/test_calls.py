"""The page "one call": what dumps of all ranks say about a call, and files that are no dumps, or not of one job."""

from __future__ import annotations

import os
import pickle
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import tricomm
from tests import ranks as started
from tests.c10d.bodies.groups import default_group
from tests.perf.dashboard.conftest import serving
from tricomm.cli import cli
from tricomm.errors import InvalidArgument
from tricomm.metrics import flight_document
from tricomm.metrics.flight_document import CREATED, ENDED, STARTED, Entry, Made, begun
from tricomm.perf.dashboard import call_page, dumps, plain_pickle, serve

BEGAN = 1_700_000_000_000_000_000
MADE = Made("all_reduce", "sum", torch.float32, 8, -1)


class Recorder:
    """A rank's recorder of given calls; each is made 1 ms after the one before it and takes 100 us."""

    def __init__(self, rank: int, calls: dict[int, Made], ranks: tuple[int, ...] = (0, 1, 2), name: str = "g") -> None:
        self.name, self.ranks, self.rank, self.timeout = name, ranks, rank, 60.0
        self.late, self.running, self.calls, self.origin = 0, False, calls, ""

    def entries(self) -> list[Entry]:
        entries = [begun(number, made) for number, made in self.calls.items()]
        for entry in entries:
            start = BEGAN + 1_000_000 * entry[0] + self.late
            entry[CREATED], entry[STARTED], entry[ENDED] = start, start + 1000, 0 if self.running else start + 100_000
        return entries

    def first(self, numbers: list[int]) -> int:
        return 0

    def dumped(self, **changed: Any) -> dict[str, Any]:
        return flight_document.document([self]) | {"written_ns": BEGAN + 10**12} | changed


def written(folder: Path, documents: dict[int, Any], prefix: str = "rank_") -> Path:
    for rank, document in documents.items():
        (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(document))
    return folder


def three(folder: Path, change: Callable[[list[Recorder]], None], **changed: Any) -> dumps.GroupCalls:
    """The group of three ranks that have made four calls, changed by `change`."""
    recorders = [Recorder(rank, dict.fromkeys(range(1, 5), MADE)) for rank in range(3)]
    change(recorders)
    written(folder, {recorder.rank: recorder.dumped(**changed) for recorder in recorders})
    (group,), notes = dumps.read(str(folder))
    assert notes == []
    return group


def problems(group: dumps.GroupCalls) -> dict[int, str]:
    return {number: problem for number in group.calls if (problem := group.problem(number))}


def summary(page: str, number: int) -> str:
    """The line of a call, as a reader sees it."""
    (text,) = {t for t in re.findall(r"<summary>(.*?)</summary>", page) if t.startswith(f"{number} ")}
    return re.sub("<.*?>", "", text)


# What a call says


def test_the_last_rank_to_arrive_is_named_with_the_wait_of_each_other(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        recorders[1].late, recorders[2].late = 250_000, 30_000

    group = three(tmp_path, change)
    page = call_page.html([group], [])
    assert problems(group) == {} and group.arrivals(3) == [(BEGAN + 3_000_000 + late, r) for late, r in _LATE]
    assert summary(page, 3) == "3 all_reduce 8 Float sum: waited 250.0 us for rank 1"
    (row,) = {row for row in re.findall(r"<tr>(.*?)</tr>", page) if row.startswith('<th scope="row">2<')}
    cells = re.findall(r"<td.*?>(.*?)</td>", row)
    assert cells[:5] == ["all_reduce 8 Float sum", "30.0 us", "220.0 us", "31.0 us", "130.0 us"]
    assert 'style="margin-left:8.6%;width:28.6%"' in cells[5]
    assert "CLOCK_REALTIME" in page and "4 of 4 calls, 0 with a problem." in page


_LATE = ((0, 0), (30_000, 2), (250_000, 1))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (MADE._replace(elements=16), "rank 1 made all_reduce 16 Float sum"),
        (MADE._replace(dtype=torch.bfloat16), "rank 1 made all_reduce 8 BFloat16 sum"),
        (MADE._replace(op="max"), "rank 1 made all_reduce 8 Float max"),
        (Made("broadcast", "none", torch.float32, 8, 2), "rank 1 made broadcast 8 Float root 2"),
    ],
)
def test_a_call_that_differs_is_named(made: Made, said: str, tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        recorders[1].calls[4] = made

    assert problems(three(tmp_path, change)) == {4: f"ranks 0, 2 made all_reduce 8 Float sum; {said}"}


def test_sizes_of_an_all_to_all_and_halves_of_a_message_differ_without_a_problem(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        for recorder in recorders:
            splits = [recorder.rank] * 3, [0, 1, 2]
            recorder.calls[4] = Made("all_to_all", "none", torch.float32, 9, -1, (), splits)

    assert problems(three(tmp_path, change)) == {}
    halves = {0: Made("send", "tag 0", torch.float32, 8, 1), 1: Made("recv", "tag 0", torch.float32, 8, 0)}
    written(tmp_path, {rank: Recorder(rank, {1: made}).dumped() for rank, made in halves.items()}, "message_")
    groups, _ = dumps.read(f"{tmp_path}/message_")
    (messages,) = [group for group in groups if group.calls]
    assert problems(messages) == {} and messages.ranks == (0, 1)


def test_a_rank_that_has_not_made_a_call_and_one_that_has_not_ended_it_are_named(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        del recorders[2].calls[4], recorders[1].calls[4]
        recorders[0].running = True

    group = three(tmp_path, change)
    unended = dict.fromkeys((1, 2, 3), "rank 0 had not ended this call")
    assert problems(group) == unended | {4: "ranks 1, 2 had not made this call"}
    page = call_page.html([group], [])
    assert page.count("no record of this call") == 2 * 3 and "made by rank 0 alone" in summary(page, 4)
    assert page.index("<h3>Problems") < page.index("<h3>Longest waits") < page.index("<h3>All calls")


def test_a_dump_that_is_older_than_the_call_blames_no_rank(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        del recorders[2].calls[4]

    assert problems(three(tmp_path, change, written_ns=BEGAN + 3_500_000)) == {}
    assert problems(three(tmp_path, change, written_ns=BEGAN + 4_500_000)) == {4: "rank 2 had not made this call"}


def test_calls_that_a_full_ring_has_lost_blame_no_rank(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        del recorders[2].calls[1], recorders[2].calls[2]

    assert problems(three(tmp_path, change)) == {}


def test_arrivals_further_apart_than_the_timeout_are_of_two_jobs(tmp_path: Path) -> None:
    def change(recorders: list[Recorder]) -> None:
        recorders[1].late = 3600 * 10**9

    assert set(problems(three(tmp_path, change)).values()) == {
        "arrivals are further apart than the timeout of 60 s: are these dumps of one job?"
    }


def late_rank(rank: int, world_size: int, tell: Any, url: str, folder: Path) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    with default_group(rank, world_size, url):
        dist.all_reduce(torch.ones(8))
        started.together(url, rank, range(world_size))
        time.sleep(0.4 * (rank == 1))
        dist.all_reduce(torch.ones(8))
        tricomm.dump()


def test_the_ranks_of_a_job_name_the_late_one(url: str, tmp_path: Path) -> None:
    started.run(3, late_rank, url, tmp_path)
    groups, notes = dumps.read(f"{tmp_path}/rank_")
    (group,) = [group for group in groups if group.calls]
    (first, _), (last, latest) = group.arrivals(2)[0], group.arrivals(2)[-1]
    assert notes == [] and problems(group) == {} and latest == 1 and 0.3e9 < last - first < 60e9


# Files


def test_ranks_without_a_dump_are_named(tmp_path: Path) -> None:
    written(tmp_path, {1: Recorder(1, {1: MADE}).dumped()})
    page = call_page.html(*dumps.read(str(tmp_path)))
    assert "1 of 1 calls, 0 with a problem; nothing recorded by ranks 0, 2." in page


def test_groups_of_other_jobs_are_apart_and_other_hosts_are_noted(tmp_path: Path) -> None:
    documents = {0: Recorder(0, {1: MADE}).dumped(), 1: Recorder(1, {1: MADE}, (0, 1)).dumped(boot="another")}
    groups, notes = dumps.read(str(written(tmp_path, documents)))
    assert [(group.ranks, sorted(group.calls[1])) for group in groups] == [((0, 1, 2), [0]), ((0, 1), [1])]
    assert notes == ["The dumps are of several hosts, whose clocks may differ."]


def test_a_file_under_the_number_of_another_rank_is_noted(tmp_path: Path) -> None:
    groups, notes = dumps.read(str(written(tmp_path, {7: Recorder(0, {1: MADE, 2: MADE}).dumped()})))
    assert groups == [] and notes == [f"{tmp_path}/rank_7 has 2 calls of groups without rank 7, which are ignored."]
    assert "The dumps have no calls." in call_page.html(groups, notes)


def test_two_dumps_of_a_rank_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no dumps at .*tricomm.dump"):
        dumps.read(str(tmp_path))
    with pytest.raises(InvalidArgument, match="no dumps"):
        dumps.read(str(tmp_path / "missing" / "rank_"))
    document = {0: Recorder(0, {}).dumped()}
    written(written(tmp_path, document), document, "old_")
    with pytest.raises(InvalidArgument, match=r"old_0 and .*rank_0 are of one rank: name the prefix"):
        dumps.read(str(tmp_path))
    assert dumps.read(f"{tmp_path}/old_")[1] == []


class Stranger:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_strangers_pickle_is_never_loaded(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    good = Recorder(0, {1: MADE}).dumped()
    hostile = Recorder(1, {1: MADE}).dumped(pg_status=Stranger(mark))
    (written(tmp_path, {0: good}) / "rank_1").write_bytes(pickle.dumps(hostile, protocol))
    (group, *_), (note,) = dumps.read(str(tmp_path))
    assert "rank_1 is no dump of this tricomm and is ignored: it holds more than plain data" in note
    assert sorted(group.calls[1]) == [0] and not mark.exists()
    pickle.loads((tmp_path / "rank_1").read_bytes())
    assert mark.exists()  # it would have run


def test_half_a_dump_another_version_and_other_data_are_noted(tmp_path: Path) -> None:
    good = Recorder(0, {1: MADE}).dumped()
    call = good["entries"][0]
    group = {"name": "g", "desc": "", "ranks": "0 and 1"}
    wrong = [
        (good | {"version": "3.0"}, "version '3.0', not 2.10"),
        (good | {"version": ["x" * 99]}, "not 2.10"),
        ([1], "an object is needed, found an array"),
        (good | {"entries": {}}, "entries: an array is needed"),
        (good | {"entries": [call | {"time_created_ns": -1}]}, "a time is negative"),
        (good | {"entries": [call | {"timeout_ms": 10**400}]}, "an integer of 64 bits is needed"),
        (good | {"entries": [call | {"time_created_ns": 1.5}]}, "time_created_ns: an integer is needed"),
        ({key: good[key] for key in good if key != "boot"}, "boot is missing"),  # a dump of torch's
        (good | {"pg_config": {"g": group}}, "pg_config['g']"),
    ]
    for rank, (document, _) in enumerate(wrong):
        written(tmp_path, {rank: document}, "wrong_")
    (tmp_path / "half_0").write_bytes(pickle.dumps(good)[:-500])
    written(tmp_path, {20: Recorder(20, {}, (20,)).dumped()})
    half, *notes = dumps.read(str(tmp_path))[1]
    assert "half_0 is no dump of this tricomm and is ignored: " in half
    for note, (_, text) in zip(notes, wrong, strict=True):
        assert text in note


def test_no_change_of_a_files_bytes_is_an_error_of_ours(tmp_path: Path) -> None:
    whole = pickle.dumps(Recorder(0, {1: MADE, 2: MADE}).dumped())
    draw, read = random.Random(5), 0
    for _ in range(1500):
        data = bytearray(whole[: draw.randrange(1, len(whole) + 1)] if draw.random() < 0.3 else whole)
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            call_page.html(dumps._groups({0: (tmp_path, dumps._decoded(bytes(data)))}, []), [])
            read += 1
        except ValueError:
            pass
    assert 50 < read < 1450


def test_what_a_pickle_of_plain_data_holds_is_read() -> None:
    data = {"a": [1, -5, 2**40, 2**70, 1.5, None, True, False], "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))}
    data |= {"long" * 100: ["x", "x", {}, [], list(range(3000))]}
    for protocol in range(2, 6):
        assert plain_pickle.decode(pickle.dumps(data, protocol)) == data


def test_containers_that_are_shared_are_refused() -> None:
    """A file of some KB could hold a tree that is walked for ever."""
    tree: list[Any] = ["x"]
    for _ in range(100):
        tree = [tree, tree]
    with pytest.raises(ValueError, match="a container in two places"):
        plain_pickle.decode(pickle.dumps(tree))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="a container in two places"):
        plain_pickle.decode(pickle.dumps(endless))


def test_calls_of_eight_ranks_are_read_and_shown_in_seconds(tmp_path: Path) -> None:
    calls = dict.fromkeys(range(1, 2501), MADE)
    written(tmp_path, {rank: Recorder(rank, calls, tuple(range(8))).dumped() for rank in range(8)})
    began = time.process_time()
    page = call_page.html(*dumps.read(str(tmp_path)))
    assert time.process_time() - began < 30  # 2 s on a quiet machine
    assert "2000 of 2500 calls" in page and page.count("<details>") == 2005 and len(page) < 8_000_000


def test_markup_in_a_dump_is_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\"'&"
    recorder = Recorder(0, {1: MADE._replace(op=hostile), 2: MADE._replace(collective=hostile)}, (0,), hostile)
    groups, notes = dumps.read(str(written(tmp_path, {0: recorder.dumped()})))
    page = call_page.html(groups, [hostile, *notes])
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") > 5


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["dashboard", *arguments])


@pytest.mark.usefixtures("folders")
def test_the_command_writes_the_page_and_names_mistakes(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    written(tmp_path / "dumps", {0: Recorder(0, {1: MADE}, (0,)).dumped()})
    done = run("--calls", f"{tmp_path}/dumps", "--html", f"{tmp_path}/calls.html")
    assert done.exit_code == 0 and "1 all_reduce 8 Float sum" in (tmp_path / "calls.html").read_text()
    nbytes = (tmp_path / "calls.html").stat().st_size
    assert f"{nbytes / 1e3:.1f} kB written to" in done.output and nbytes > 1000
    for arguments, text in [
        (("--calls", "/nowhere/rank_", "--html", f"{tmp_path}/x.html"), "no dumps at /nowhere/rank_"),
        (("--calls", "/nowhere", "--changes"), "--calls is for --html and --serve"),
    ]:
        done = run(*arguments)
        assert done.exit_code == 2 and text in done.output and not (tmp_path / "x.html").exists()


def test_the_page_is_served_from_the_place_of_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tricomm.commands import dashboard

    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/rank_")

    def calls() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(server.url + "calls", timeout=20) as answer:
                assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    with serving(serve.Server(0, bytes, bytes, bytes, lambda: dashboard._calls(None).encode())) as server:
        assert calls()[0] == 503 and "no dumps at" in calls()[1]
        written(tmp_path, {0: Recorder(0, {1: MADE}, (0,)).dumped()})
        assert calls()[0] == 200 and "1 all_reduce 8 Float sum" in calls()[1]
