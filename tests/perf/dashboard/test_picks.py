"""The choices on the page are those of `explain`, or none if the facts are unknown."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tricomm
from tests.perf.dashboard import dashboard_data
from tricomm.core.fused.fused_call import FUSED
from tricomm.perf import box, provenance, units
from tricomm.perf.bench.outputs import Files
from tricomm.perf.bench.request import Settings
from tricomm.perf.bench.session import Results
from tricomm.perf.bench_row import BenchRow
from tricomm.perf.dashboard import collect, picks
from tricomm.perf.history.database import open_history
from tricomm.policy import user_tables
from tricomm.policy.tuning_tables import TableRow, TunedTable

_SCENE = {"device": "a box", "simulated": False, "world_size": 8, "mode": "eager"}
_SCENE |= {"collective": "all_reduce", "dtype": "float32", "op": "sum"}
_NORM = {"collective": FUSED, "op": "fp8@8192", "dtype": "bfloat16"}
_SMALL = tricomm.Options(arena_bytes=1 << 20)
_BOXES: dict[str, dict[str, Any]] = {
    "cpu": {"device": dashboard_data.CPU, "no_multicast": ""},
    "h100": {},
    "switch": {"no_multicast": "", "switch": True, "fallback": "nccl"},
    "nccl": {"fallback": "nccl"},
    "part": {"reachable": False, "fallback": "nccl"},
}


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path / "tables"))


@pytest.mark.parametrize("name", _BOXES)
def test_picks_are_those_of_explain(name: str) -> None:
    text = dashboard_data.facts(**_BOXES[name])
    known = box.loads(text)
    assert known is not None

    def asked(comm: tricomm.Communicator) -> list[tuple[Any, Any]]:
        comm._planner.site, comm._planner.router.facts = known.site(None), known.routes
        said = []
        for collective, dtype, size in product(units.DATA_COLLECTIVES, ("float32", "int8"), (64, 1 << 14, 1 << 24)):
            scene = _SCENE | {"collective": collective, "dtype": dtype, "simulated": known.simulated}
            kind = getattr(torch, dtype)
            elements = units.row_elements(collective, size, kind.itemsize, 8)
            nbytes = units.input_bytes(collective, elements, kind.itemsize, 8)
            said.append((picks.of(scene, text)(size), comm.explain(collective, nbytes, kind)))
        for size, top_k in product((1 << 16, 1 << 22, 1 << 26), (None, 8)):
            choice = comm.explain(FUSED, size, torch.bfloat16, hidden=8192, quantize="fp8", top_k=top_k)
            name = "fp8@8192" if top_k is None else "fp8@8192+top8"
            pick = picks.of(_SCENE | _NORM | {"op": name, "simulated": known.simulated}, text)
            said.append((pick(size), replace(choice, algorithm=choice.counted_as)))
        return said

    first, *_ = tricomm.simulate(asked, 8, options=_SMALL)
    for picked, choice in first:
        assert picked == ("nccl" if choice.route == "nccl" else f"{choice.algorithm}/{choice.protocol}"), choice
    through_switch = any("multicast" in choice.algorithm for _, choice in first)
    assert through_switch is (name == "switch") and len({picked for picked, _ in first}) > 1


def test_unknown_facts_are_not_shown() -> None:
    known = dashboard_data.facts()
    assert picks.of(_SCENE, known)(1024) is not None
    changes = (("sm_90", "sm_x"), ("67108864", "1"), (": 64,", ": -1,"))
    for text in ("", "[", "{}", *(known.replace(*change) for change in changes)):
        assert text != known and picks.of(_SCENE, text)(1024) is None, text
    for change in ({"simulated": True}, {"dtype": "x"}, {"collective": "x"}, {"world_size": 0}, {"world_size": 4}):
        assert picks.of(_SCENE | change, known)(1024) is None
    assert picks.of(_SCENE | _NORM | {"op": "sum"}, known)(1 << 16) is None
    for facts, there in (("", False), (known, True)):  # a history of an older tricomm has no facts
        (scene,) = collect.page_data(dashboard_data.entries(2, box=facts))["scenes"]
        assert bool(scene["picks"]) is there


def test_picks_use_the_facts_of_the_latest_run_and_the_current_tables() -> None:
    old, new = dashboard_data.entries(1, sizes=(1024,), box="")[0], dashboard_data.entries(2, sizes=(1024,))[-1]
    for rows in ([old, new], [new, old]):
        (scene,) = collect.page_data(rows)["scenes"]
        assert set(scene["picks"]) == {"1024"} and scene["picks"]["1024"] != "two_shot/simple"
    known = box.loads(new.run.box)
    assert known is not None
    row = TableRow("all_reduce", 8, 4096, "two_shot", "simple", bits=32, mode="eager", min_bytes=512)
    user_tables.save(TunedTable(known.fingerprint, (row,)))
    (scene,) = collect.page_data([new])["scenes"]
    assert scene["picks"] == {"1024": "two_shot/simple"}


def test_a_benchmark_keeps_the_facts_of_its_box(tmp_path: Path) -> None:
    header, *_ = tricomm.simulate(provenance.header, 2, options=_SMALL)
    known = box.loads(header["box"])
    assert known is not None and known.simulated
    assert (known.fingerprint.world_size, known.arena_bytes) == (2, _SMALL.arena_bytes)
    with open_history(tmp_path / "h.sqlite") as history:  # type: ignore[union-attr]
        with Files(Settings((), (8,), "sum", ("eager",)), Results(), None, None, history) as files:
            files.header(header)
            files.row((BenchRow(dashboard_data.entries(1)[0].measurement, 2, 2, 8),))
            assert [entry.run.box for entry in history.read()] == [header["box"]]
