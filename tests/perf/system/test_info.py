"""The output of `tricomm info` and `tricomm kernels`; info never fails."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import tricomm
from tricomm.cli import cli
from tricomm.kernels import layout, multimem
from tricomm.kernels.collective_specs import COLLECTIVES
from tricomm.perf import provenance
from tricomm.perf.system import info, info_table
from tricomm.policy import selection, user_tables
from tricomm.policy.selection_facts import SelectionFacts
from tricomm.policy.tuning_tables import Fingerprint, TableRow, TunedTable


def test_json_has_every_section() -> None:
    done = CliRunner().invoke(cli, ["info", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    for section in ("versions", "devices", "links", "peer_access", "paths", "environment", "limits", "selection"):
        assert section in result
    assert result["versions"]["loaded"]["triton"] and result["limits"]["dev_shm"]["bytes"] > 0
    assert {c["collective"] for c in result["selection"]} == set(COLLECTIVES) - {"barrier"}
    assert all(c["reason"] for c in result["selection"])
    assert {c["collective"] for c in result["ranges"]} == set(COLLECTIVES) - {"barrier"}


def test_the_text_fits_a_screen() -> None:
    done = CliRunner().invoke(cli, ["info"])
    assert done.exit_code == 0 and "memlock" in done.output
    assert "all_reduce of 2, 4, 8 ranks: 1 B .. 4 KiB one_shot/ll, .. 1 MiB one_shot/simple, above" in done.output
    assert len(done.output.splitlines()) <= 30
    limits = next(line for line in done.output.splitlines() if line.startswith("limits"))
    assert "arena per rank 64 MiB" in limits and "bytes" not in limits


def test_the_whole_table() -> None:
    done = CliRunner().invoke(cli, ["info", "--table"])
    assert done.exit_code == 0 and "memlock" in done.output and len(done.output.splitlines()) > 60
    assert "why" in done.output and "table 'cpu' row 0" in done.output


@pytest.mark.parametrize("device", ["cpu", "sm_70", "sm_90"])
@pytest.mark.parametrize("tuned", [False, True])
def test_ranges_are_those_of_selection(device: str, tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of each range, in the middle of it, and one byte beyond it."""
    rows = (TableRow("all_reduce", 8, 5000, "two_shot", "simple", min_bytes=2000),) if tuned else ()

    def site(world_size: int) -> SelectionFacts:
        memory = layout.plan(world_size, 64 << 20)
        return SelectionFacts(device, world_size, memory, layout.MAX_BLOCKS, tuned=rows, tuned_name="tuned")

    monkeypatch.setattr(info, "_site", site)
    result = info._ranges()
    for row in result:
        most = row["to"] or 1 << 34
        for nbytes in (row["from"], (row["from"] + most) // 2, most):
            choice = selection.choose(site(row["ranks"]), row["collective"], nbytes)
            assert (choice.algorithm, choice.protocol, choice.row) == (row["algorithm"], row["protocol"], row["row"])
    for one, other in itertools.pairwise(result):
        if other["from"] == 1:
            assert one["to"] is None
        else:
            assert other["from"] == one["to"] + 1
    assert tuned is ({(row["from"], row["to"]) for row in result if row["table"] == "tuned"} == {(2000, 5000)})
    assert len(info_table.ranges(result)) <= 20 + 2 * tuned  # none is cut


@pytest.mark.skipif(multimem.why_not(90) is not None, reason="this Triton is refused multimem")
@pytest.mark.parametrize("refusal", ["", "there is no fabric manager"])
def test_selection_for_gpus_depends_on_nvls(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"is_available": True, "get_device_capability": (9, 0), "device_count": 8, "get_device_name": "a GPU"}
    for name, answer in answers.items():
        monkeypatch.setattr(info.torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(info.discovery, "read", lambda: SimpleNamespace(topology=None))
    monkeypatch.setattr(info, "no_multicast_expected", lambda gpus: refusal)
    through_switch = selection.choose(info._site(8), "all_reduce", 16 << 20).algorithm == "multicast"
    assert info._site(8).no_multicast == refusal and through_switch is (refusal == "")


def test_a_long_table_is_truncated_with_a_note() -> None:
    row = {"ranks": 2, "algorithm": "one_shot", "protocol": "ll", "table": "mine", "row": 0, "from": 1}
    rows = [{**row, "collective": f"c{i}", "to": 4096 + i} for i in range(30)]
    lines = info_table.ranges(rows)
    assert len(lines) == 21 and lines[-1] == "  and 10 more: --table"
    assert lines[1] == "  c1 of 2 ranks: 1 B .. 4097 B one_shot/ll (table mine)"


@pytest.mark.parametrize("probe", [n for n in vars(info) if n.startswith("_") and callable(getattr(info, n))])
def test_no_probe_can_make_it_fail(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("this probe is broken")

    monkeypatch.setattr(info, probe, broken)
    result = info.collect()
    json.dumps(result)
    if probe not in ("_limit", "_device_links"):
        assert "not available: OSError: this probe is broken" in json.dumps(result)


def test_an_error_without_a_message_is_named_by_its_class() -> None:
    def broken() -> None:
        raise KeyError

    assert provenance.guarded(broken) == "not available: KeyError"


def test_a_package_that_is_missing_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise provenance.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(provenance.metadata, "version", missing)
    assert set(provenance.installed().values()) == {"not installed"}


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TOKEN", "very-secret")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    done = CliRunner().invoke(cli, ["info", "--json"])
    assert "very-secret" not in done.output
    shown = json.loads(done.output)["environment"]
    assert (shown["TRICOMM_TOKEN"], shown["NCCL_P2P_DISABLE"]) == ("(set)", "1")


def test_every_documented_variable_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
    rows = [
        line for line in page.read_text().partition("## Environment variables")[2].splitlines() if line[:3] == "| `"
    ]
    names = {name for row in rows for name in re.findall(r"`([A-Z_0-9]{4,})", row.split("|")[1])}
    assert len(names) > 25
    for name in names:
        monkeypatch.setenv(name, "0")
    assert names <= set(info.collect()["environment"])


def test_kernels_as_json() -> None:
    done = CliRunner().invoke(cli, ["kernels", "--arch", "sm_80,sm_90", "--kernel", "barrier", "--json"])
    records = json.loads(done.stdout)["variants"]
    assert [r["variant"]["arch"] for r in records] == ["sm_80", "sm_90"]
    assert all(r["violations"] == [] and r["resources"]["registers"] > 0 for r in records)


@pytest.mark.parametrize(("arguments", "said"), [(["--arch", "sm_1"], "sm_80"), (["--kernel", "x"], "barrier")])
def test_kernels_usage_errors(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["kernels", *arguments])
    assert done.exit_code == 2 and said in done.output


def test_the_users_table_is_named_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    row = TableRow("all_reduce", 4, 2048, "two_shot", "simple")
    user_tables.save(TunedTable(Fingerprint("cpu", "", 4), (row,)))
    result = info.collect()
    decided = [c for c in result["selection"] if "tuned" in c["reason"]]
    assert [(c["ranks"], c["collective"], c["nbytes"]) for c in decided] == [(4, "all_reduce", 1024)]
    assert "row 0" in decided[0]["reason"] and result["paths"]["tuning tables"] == str(tmp_path)
    assert result["paths"]["package"] == str(Path(tricomm.__file__).parent)
