"""Tuning tables: written and read, named and ignored if broken or foreign, and agreed on by all ranks."""

import json
import logging
import tempfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tricomm
from tests.store.store_ranks import pages, succeed
from tests.topology.shapes import nvswitch
from tricomm import typed_json
from tricomm.errors import CollectiveMismatch, InvalidArgument, ResourceError
from tricomm.kernels import layout
from tricomm.kernels.collectives import registry
from tricomm.policy import selection, tuning_tables, user_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable

_H100 = Fingerprint("sm_90", "NVIDIA H100 80GB HBM3", 4, "nvswitch", "0123456789abcdef")
_CPU = Fingerprint("cpu", "", 2)
_ROW = TableRow("all_reduce", 4, 4096, "one_shot", "ll", mode="graph", bits=16, blocks=3, warps=4, tile=512)

_kernels = st.sampled_from([k for k in registry.KERNELS if not k.needs_cube])
_maybe = st.none()


@st.composite
def _tables(draw: st.DrawFn) -> TunedTable:
    world_size = draw(st.integers(1, 16))
    text = st.text(max_size=30)
    where = Fingerprint(draw(st.sampled_from(["cpu", "sm_90", "cuda"])), draw(text), world_size, draw(text), draw(text))

    def row() -> TableRow:
        kernel = draw(_kernels)
        return TableRow(
            kernel.collective,
            world_size,
            draw(_maybe | st.integers(0, 1 << 60)),
            kernel.algorithm,
            kernel.protocol,
            mode=draw(_maybe | st.sampled_from(["eager", "graph"])),
            bits=draw(_maybe | st.sampled_from([8, 16, 32, 64])),
            blocks=draw(_maybe | st.integers(1, 64)),
            warps=draw(_maybe | st.sampled_from([1, 2, 4, 8, 16, 32])),
            tile=draw(_maybe | st.integers(1, 20).map(lambda n: 1 << n)),
        )

    rows = tuple(row() for _ in range(draw(st.integers(0, 5))))
    return TunedTable(where, rows, draw(text), draw(st.dictionaries(text, text, max_size=3)))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "tables"))
    return tmp_path / "tables"


@given(_tables())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine the first draw is slow
def test_written_values_are_read_unchanged(table: TunedTable) -> None:
    text = tuning_tables.dumps(table)
    assert tuning_tables.loads(text, "here") == table and tuning_tables.dumps(tuning_tables.loads(text, "here")) == text
    assert len(json.loads(text)["rows"]) == len(table.rows)


@given(_tables(), st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_table_is_refused_by_name_or_still_a_table(table: TunedTable, data: st.DataObject) -> None:
    damaged = bytearray(tuning_tables.dumps(table))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for text in (bytes(damaged), cut):
        try:
            assert isinstance(tuning_tables.loads(text, "that file"), TunedTable)
        except InvalidArgument as error:
            assert str(error).startswith("that file: ")


_WRONG: list[tuple[str, Any, str]] = [
    ("schema", 3, "schema"),
    ("kernels", 1, f"measured with kernels 1, these are {tuning_tables.KERNELS}; tune again"),
    ("simulated", True, "simulated times for device 'sm_90'"),
    ("surprise", 1, "there is no field surprise"),
    ("rows", [{"collective": "all_reduce"}], r"rows\[0\]: world_size is missing"),
]
_WRONG_ROWS: list[tuple[str, Any, str]] = [
    ("algorithm", "ring", "there is no ring/ll kernel; there is one_shot/ll"),
    ("collective", "all_to_nobody", "there is no one_shot/ll kernel"),
    ("world_size", 8, "a row for 8 ranks, a table for 4"),
    ("world_size", 99, "world_size 99 is not one of 1 to 16"),
    ("max_bytes", -1, "min_bytes 0 is over max_bytes -1"),
    ("tile", 768, "tile 768 is no power of two"),
    ("blocks", 65, "blocks 65 is not one of 1 to 64"),
    ("warps", 3, "warps 3 is not one of 1, 2, 4, 8, 16, 32"),
    ("mode", "fast", "mode 'fast' is not one of eager, graph"),
    ("epilogue", "norm@8192", "all_reduce has no epilogue norm@8192"),
    ("epilogue", "norm@0", "epilogue"),
    ("blocks", "4", r"rows\[0\].blocks: an integer is needed, found text"),
    ("blocks", True, r"rows\[0\].blocks: an integer is needed, found true or false"),
]


@pytest.mark.parametrize(("name", "value", "said"), _WRONG)
def test_a_table_that_is_wrong_says_where(name: str, value: Any, said: str) -> None:
    data = json.loads(tuning_tables.dumps(TunedTable(_H100, (_ROW,)))) | {name: value}
    with pytest.raises(InvalidArgument, match="that file: .*" + said):
        tuning_tables.loads(json.dumps(data).encode(), "that file")


@pytest.mark.parametrize(("name", "value", "said"), _WRONG_ROWS)
def test_a_row_that_is_wrong_says_where(name: str, value: Any, said: str) -> None:
    data = json.loads(tuning_tables.dumps(TunedTable(_H100, (_ROW,))))
    data["rows"][0][name] = value
    with pytest.raises(InvalidArgument, match="that file: .*" + said):
        tuning_tables.loads(json.dumps(data).encode(), "that file")


def test_the_shipped_tables_pass_the_checks_of_users_files() -> None:
    file = files("tricomm").joinpath("tables/default.json")
    raw = json.loads(file.read_bytes())
    assert set(raw) == {"schema", "version", "source", "tables"} and raw["schema"] == 2
    for read, written in zip(selection.shipped_tables(), raw["tables"], strict=True):
        assert read.rows and all(isinstance(name, str) for name in (read.name, read.device, read.topology or ""))
        for row, said in zip(read.rows, written["rows"], strict=True):
            assert typed_json.convert(said, TableRow, strict=True) == row
            tuning_tables.check_row(row, "here")


def test_no_table_is_so_long(_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no tuning table is so long"):
        tuning_tables.loads(b" " * (tuning_tables.MAX_BYTES + 1), "that file")


# The user's folder


def test_a_saved_table_is_loaded_for_its_box_only(_folder: Path) -> None:
    result = TunedTable(_H100, (_ROW,))
    file = user_tables.save(result)
    assert file.parent == _folder and file.name.startswith("nvidia-h100-80gb-hbm3-w4-")
    assert user_tables.load(_H100) == result
    assert user_tables.load(Fingerprint("sm_90", _H100.gpu, 8, "nvswitch", _H100.links)) is None
    assert [p.suffix for p in _folder.iterdir() if p.suffix != ".lock"] == [".json"]  # no partly written file


def test_a_broken_or_foreign_table_is_named_and_ignored(_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = user_tables.save(TunedTable(_H100, (_ROW,)))
    with caplog.at_level(logging.WARNING, "tricomm"):
        file.write_bytes(b"{")
        assert user_tables.load(_H100) is None and str(file) in caplog.text and "it is ignored" in caplog.text
        caplog.clear()
        file.write_bytes(tuning_tables.dumps(TunedTable(_CPU, ())))  # a CPU's table in a GPU's file
        assert user_tables.load(_H100) is None and "is of 2 ranks on cpu" in caplog.text and str(file) in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="cannot be written.*TRICOMM_TUNING_DIR"):
        user_tables.save(TunedTable(_H100, ()))
    assert user_tables.load(_H100) is None


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRICOMM_TUNING_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_tables.folder() == Path("/somewhere/tricomm/tables")


def test_boxes_with_different_links_have_different_tables() -> None:
    boxes = [
        user_tables.fingerprint("cpu", torch.device("cpu"), 4, links) for links in (None, nvswitch(4), nvswitch(4, 12))
    ]
    assert len({box.digest for box in boxes}) == 3 and boxes[1].topology == "nvswitch"


def test_ranks_use_one_table_or_none(caplog: pytest.LogCaptureFixture) -> None:
    table = TunedTable(_CPU, (TableRow("all_reduce", 2, None, "two_shot", "ll"),))
    user_tables.save(table)
    with pages(2) as group:
        assert succeed(2, lambda rank: user_tables.agree(group[rank], _CPU, 10.0)) == [table, table]
        for other in ("none", "01" * 32):

            def agree(rank: int, other: str = other) -> TunedTable | None:
                if rank == 0:
                    return user_tables.agree(group[0], _CPU, 10.0)
                with pytest.raises(InvalidArgument):
                    group[1].require_equal(other, "tuning table", 10.0)
                return None

            caplog.clear()
            assert succeed(2, agree) == [None, None]
            assert "ranks find different tuning tables" in caplog.text and f"rank 1 has {other}" in caplog.text


# A communicator


def test_a_communicator_chooses_by_the_users_table() -> None:
    user_tables.save(
        TunedTable(
            Fingerprint("cpu", "", 1), (TableRow("all_reduce", 1, 4096, "two_shot", "simple", blocks=2, tile=32),)
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        with tricomm.init(f"file://{folder}/m", rank=0, world_size=1, device="cpu") as comm:
            choice = comm.explain("all_reduce", nbytes=1024)
            assert (choice.algorithm, choice.blocks, choice.block) == ("two_shot", 2, 32)
            assert "tuned" in choice.table and "(simulated)" in choice.table and choice.row == 0
            assert comm.explain("all_reduce", nbytes=8192).table == "cpu"
            x = torch.arange(100.0)
            assert torch.equal(comm.all_reduce(x.clone()), x)


def test_a_table_that_is_used_changes_the_next_call_and_is_the_same_on_all_ranks() -> None:
    def body(comm: tricomm.Communicator) -> list[Any]:
        x = torch.arange(64.0)
        before = comm.explain("all_reduce", nbytes=256).table
        comm.all_reduce(x)
        comm.use_table((TableRow("all_reduce", 2, None, "two_shot", "simple", blocks=2, tile=16),), "mine")
        assert comm.explain("all_reduce", nbytes=256).table == "mine"
        comm.all_reduce(x)
        assert torch.equal(x, 4 * torch.arange(64.0))
        with pytest.raises(InvalidArgument, match="give all ranks the same"):
            comm.use_table((), f"rank {comm.rank}")
        comm.all_reduce(x)
        return [before, comm.explain("all_reduce", nbytes=256).table]

    assert tricomm.simulate(body, 2) == [["cpu", "mine"]] * 2


def test_an_invalid_table_is_refused_and_the_group_still_works() -> None:
    def body(comm: tricomm.Communicator) -> float:
        wrong: list[Any] = [None, 3, "table.json", {}, [{"collective": "all_reduce"}]]
        for rows in wrong:
            with pytest.raises(InvalidArgument, match="use_table: a list of TableRow is needed"):
                comm.use_table(rows, "mine")
        nameless: Any = None
        with pytest.raises(InvalidArgument, match="use_table: name=None"):
            comm.use_table((), nameless)
        return float(comm.all_reduce(torch.ones(1)))

    assert tricomm.simulate(body, 2) == [2.0, 2.0]


def test_without_the_agreement_ranks_with_different_tables_run_different_kernels() -> None:
    """Here the ranks use their tables without having compared them."""

    def body(comm: tricomm.Communicator) -> None:
        row = TableRow("all_reduce", 2, None, "two_shot" if comm.rank else "one_shot", "ll")
        comm._planner.site = replace(comm._planner.site, tuned=(row,), tuned_name="mine")
        comm.all_reduce(torch.arange(64.0))

    with pytest.raises(CollectiveMismatch):
        tricomm.simulate(body, 2)


def test_simulation_does_not_depend_on_the_users_tables() -> None:
    user_tables.save(TunedTable(_CPU, (TableRow("all_reduce", 2, None, "two_shot", "ll"),)))
    assert tricomm.simulate(lambda comm: comm.explain("all_reduce", nbytes=8).table, 2) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("device", "table"),
    [("sm_80", "ampere"), ("sm_90", "hopper"), ("sm_100", "blackwell"), ("sm_103", "blackwell"), ("sm_120", "cuda")],
)
def test_an_architecture_has_its_table(device, table):
    facts = SelectionFacts(device, 8, layout.plan(8, 64 << 20), 64)
    assert selection.choose(facts, "all_reduce", 1 << 20).table == table


@pytest.mark.parametrize("lacking", ["", "ll128", "multicast", "ll128 multicast"])
def test_no_shipped_table_takes_a_kernel_again_after_another_one(lacking):
    for table in selection.shipped_tables():
        kernels: dict[TableRow, list[tuple[str, str]]] = {}  # by everything in a row except its sizes and kernel
        reached: dict[TableRow, float] = {}
        for row in table.rows:
            group = replace(row, max_bytes=None, min_bytes=0, algorithm="one_shot", protocol="simple")
            most = float("inf") if row.max_bytes is None else row.max_bytes
            available = row.protocol not in lacking.split() and row.algorithm not in lacking
            if available and most > reached.get(group, 0):
                reached[group] = most
                taken = kernels.setdefault(group, [])
                if taken[-1:] != [(row.algorithm, row.protocol)]:
                    assert (row.algorithm, row.protocol) not in taken, f"{table.name}: {row}"
                    taken.append((row.algorithm, row.protocol))
