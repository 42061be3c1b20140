"""`tricomm info` and `tricomm kernels`: what they show, and that info never fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tricomm import tuned
from tricomm.cli import cli
from tricomm.kernels.collectives import COLLECTIVES
from tricomm.perf import facts, info
from tricomm.table import Fingerprint, Row, Tuned


def test_json_has_every_section() -> None:
    done = CliRunner().invoke(cli, ["info", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    for section in ("versions", "devices", "links", "peer_access", "paths", "environment", "limits", "selection"):
        assert section in found
    assert found["versions"]["loaded"]["triton"] and found["limits"]["dev_shm"]["bytes"] > 0
    assert {c["collective"] for c in found["selection"]} == set(COLLECTIVES) - {"barrier"}
    assert all(c["reason"] for c in found["selection"])


def test_for_people() -> None:
    done = CliRunner().invoke(cli, ["info"])
    assert done.exit_code == 0 and "selection" in done.output and "memlock" in done.output


@pytest.mark.parametrize("probe", [n for n in vars(info) if n.startswith("_") and callable(getattr(info, n))])
def test_no_probe_can_make_it_fail(probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("this probe is broken")

    monkeypatch.setattr(info, probe, broken)
    found = info.collect()
    json.dumps(found)
    if probe not in ("_limit", "_device_links"):
        assert "not available: OSError: this probe is broken" in json.dumps(found)


def test_an_error_without_words_still_has_a_name() -> None:
    def broken() -> None:
        raise KeyError

    assert facts.guarded(broken) == "not available: KeyError"


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TOKEN", "very-secret")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    done = CliRunner().invoke(cli, ["info", "--json"])
    assert "very-secret" not in done.output
    assert json.loads(done.output)["environment"] == {"TRICOMM_TOKEN": "(set)", "NCCL_P2P_DISABLE": "1"}


def test_kernels_prints_a_line_per_variant() -> None:
    done = CliRunner().invoke(cli, ["kernels", "--arch", "sm_90", "--kernel", "barrier"])
    assert done.exit_code == 0, done.output
    assert "1 variants, 0 break a bar" in done.output


def test_kernels_as_json() -> None:
    done = CliRunner().invoke(cli, ["kernels", "--arch", "sm_80,sm_90", "--kernel", "barrier", "--json"])
    records = json.loads(done.output)["variants"]
    assert [r["variant"]["arch"] for r in records] == ["sm_80", "sm_90"]
    assert all(r["violations"] == [] and r["resources"]["registers"] > 0 for r in records)


@pytest.mark.parametrize(("arguments", "said"), [(["--arch", "sm_1"], "sm_80"), (["--kernel", "x"], "barrier")])
def test_kernels_usage_errors(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["kernels", *arguments])
    assert done.exit_code == 2 and said in done.output


def test_the_users_table_is_named_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICOMM_TUNING_DIR", str(tmp_path))
    row = Row("all_reduce", 4, 2048, "two_shot", "simple")
    tuned.save(Tuned(Fingerprint("cpu", "", 4), (row,)))
    found = info.collect()
    decided = [c for c in found["selection"] if "tuned" in c["reason"]]
    assert [(c["ranks"], c["collective"], c["nbytes"]) for c in decided] == [(4, "all_reduce", 1024)]
    assert "row 0" in decided[0]["reason"] and found["paths"]["tuning tables"] == str(tmp_path)
