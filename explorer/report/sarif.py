"""Findings in SARIF 2.1.0, the format in which code review services show them at their lines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tricomm.explorer.report.findings import CACHED, FORMAL, KINDS, Finding

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "SRCROOT"


def log(findings: Iterable[tuple[Finding, str | None]]) -> dict[str, Any]:
    """A SARIF log: one run of the tool, with its findings. Each finding has the file of the checked function.

    File paths are relative to the repository of the current folder, if they are in it.
    """
    root = next((f for f in (Path.cwd(), *Path.cwd().parents) if (f / ".git").exists()), Path.cwd())
    rules = [
        {"id": kind, "shortDescription": {"text": kind.replace("_", " ")}, "help": {"text": meaning}}
        for kind, meaning in KINDS.items()
    ]
    driver = {"name": "tricomm check", "rules": rules}
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {_ROOT: {"uri": f"{root.as_uri().rstrip('/')}/"}},
        "results": [_result(finding, file, root) for finding, file in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, file: str | None, root: Path) -> dict[str, Any]:
    """A finding, at its last line, or at the top of `file` if it has no line. All its lines are related locations, with
    ranks and call chains."""
    accesses = zip_longest(finding.where, finding.ranks[: len(finding.where)], finding.accesses)
    related = [
        {**place, "id": number, "message": {"text": f"rank {rank}: {(access or {}).get('chain') or where}"}}
        for number, (where, rank, access) in enumerate(accesses)
        if (place := _place(where, root)) is not None
    ]
    main = related[-1] if related else _place(f"{file}:1", root) if file else None
    return {
        "ruleId": finding.kind,
        "ruleIndex": list(KINDS).index(finding.kind),
        "level": "warning" if finding.effect in (FORMAL, CACHED) else "error",
        "message": {"text": ". ".join(filter(None, (finding.text.removesuffix("."), finding.advice, finding.effect)))},
        "locations": [{"physicalLocation": main["physicalLocation"]}] if main is not None else [],
        "relatedLocations": related,
        "properties": {"ranks": sorted(set(finding.ranks)), "schedule": finding.schedule, "seed": finding.seed},
    }


def _place(where: str, root: Path) -> dict[str, Any] | None:
    """The location of "file:line"; None if it is unknown."""
    name, _, line = where.rpartition(":")
    if not name or name.startswith(("<", "--")) or not line.isdecimal() or int(line) < 1:
        return None
    file = Path(os.path.abspath(name))
    artifact = {"uri": file.as_uri()}
    if file.is_relative_to(root):
        artifact = {"uri": quote(file.relative_to(root).as_posix()), "uriBaseId": _ROOT}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": int(line)}}}
