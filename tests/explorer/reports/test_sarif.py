"""SARIF: a code review service shows a finding at its lines."""

import json
import re
from dataclasses import replace
from urllib.parse import urljoin, urlparse

import pytest

import tricomm
from tests.explorer.test_check import two_writers
from tricomm.explorer.report import sarif
from tricomm.explorer.report.findings import KINDS, Finding
from tricomm.explorer.report.report import save

# The properties that an object may have by the schema; required ones are marked.
ALLOWED = {
    "log": "$schema version! runs!",
    "run": "tool! originalUriBaseIds results",
    "driver": "name! semanticVersion rules",
    "rule": "id! shortDescription help",
    "result": "ruleId ruleIndex level message! locations relatedLocations properties",
    "location": "id physicalLocation message",
    "physicalLocation": "artifactLocation region",
    "artifactLocation": "uri uriBaseId",
    "region": "startLine",
}


def fits(value, kind):
    names = {name.rstrip("!") for name in ALLOWED[kind].split()}
    needed = {name.rstrip("!") for name in ALLOWED[kind].split() if name.endswith("!")}
    assert needed <= set(value) <= names, (kind, set(value))


def valid(log):
    """Check that a log has the structure of SARIF 2.1.0; return its results."""
    fits(log, "log")
    (run,) = log["runs"]
    fits(run, "run")
    fits(run["tool"]["driver"], "driver")
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        fits(rule, "rule")
        assert rule["shortDescription"]["text"] and rule["help"]["text"]
    for result in run["results"]:
        fits(result, "result")
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] and result["message"]["text"]
        assert result["level"] in ("none", "note", "warning", "error")
        for location in (*result["locations"], *result["relatedLocations"]):
            fits(location, "location")
            fits(location["physicalLocation"], "physicalLocation")
            fits(location["physicalLocation"]["artifactLocation"], "artifactLocation")
            fits(location["physicalLocation"]["region"], "region")
            assert location["physicalLocation"]["region"]["startLine"] >= 1
            base = location["physicalLocation"]["artifactLocation"].get("uriBaseId")
            assert base is None or run["originalUriBaseIds"][base]["uri"].endswith("/")
    return run["results"]


def lines(locations, log):
    """(file, line) of locations, with their base."""
    result = []
    for location in locations:
        artifact = location["physicalLocation"]["artifactLocation"]
        base = log["runs"][0]["originalUriBaseIds"].get(artifact.get("uriBaseId"), {"uri": ""})["uri"]
        where = urlparse(urljoin(base, artifact["uri"])).path
        result.append((where, location["physicalLocation"]["region"]["startLine"]))
    return result


@pytest.fixture(scope="module")
def report():
    return tricomm.check(two_writers, 2, schedules=1)


def test_a_race_is_shown_at_both_lines(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.save("found.sarif")
    log = json.loads((tmp_path / "found.sarif").read_text())
    (result,) = valid(log)
    finding = report.findings[0]
    assert result["ruleId"] == "race" and finding.text in result["message"]["text"]
    assert finding.advice in result["message"]["text"]
    places = [(file, int(line)) for file, _, line in (w.rpartition(":") for w in finding.where)]
    assert lines(result["relatedLocations"], log) == places
    assert lines(result["locations"], log) == places[-1:]
    for number, (location, rank) in enumerate(zip(result["relatedLocations"], finding.ranks, strict=True)):
        assert location["id"] == number and location["message"]["text"].startswith(f"rank {rank}: ")
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == list(KINDS)


@pytest.mark.parametrize(("below", "relative"), [("", True), ("src/deep", True), ("../elsewhere", False)])
def test_addresses_are_relative_to_the_repository_of_the_current_folder(tmp_path, monkeypatch, below, relative):
    repository, here = tmp_path / "repo", tmp_path / "repo" / below
    (repository / ".git").mkdir(parents=True)
    here.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here)
    file = str(repository / "my kernels" / "ä#.py")
    log = sarif.log([(Finding("race", (0,), (f"{file}:3",), "text", "advice"), None)])
    (result,) = valid(log)
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert ("uriBaseId" in artifact) is relative
    assert re.fullmatch("(file:///.*/)?my%20kernels/%C3%A4%23.py", artifact["uri"])
    if relative:
        assert artifact["uri"] == "my%20kernels/%C3%A4%23.py"


def test_a_finding_without_a_line_is_shown_at_the_file_of_the_function():
    for where in ((), ("?",), ("x.py:",), ("x.py:0",), ("--args:1",), ("<string>:1",)):
        finding = Finding("leftover", (0, 1), where, "text.", "advice")
        ((shown,), (bare,)) = (valid(sarif.log([(finding, file)])) for file in ("/mine.py", None))
        assert lines(shown["locations"], sarif.log([])) == [("/mine.py", 1)] and shown["relatedLocations"] == []
        assert bare["locations"] == [] and bare["message"]["text"] == "text. advice"


def test_all_reports_of_a_command_are_in_one_file(report, tmp_path):
    clean = replace(report, findings=[])
    save([clean, report, report], tmp_path / "all.sarif")
    assert len(valid(json.loads((tmp_path / "all.sarif").read_text()))) == 2
    save([clean], tmp_path / "none.SARIF")
    assert valid(json.loads((tmp_path / "none.SARIF").read_text())) == []
