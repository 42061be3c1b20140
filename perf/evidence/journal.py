"""A stage's cases as they end, one JSON line each, so that nothing measured is lost; and the result made of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tricomm.perf.evidence.schema import SCHEMA
from tricomm.perf.evidence.stage import Settings, Stage

_KEPT = ("ok", "skipped")  # what a later run need not do again


@dataclass
class Journal:
    """The lines of one stage's file. The first names the environment; a case has a line when it begins and one when it
    has ended, so a case without the second one is where its process was lost. Another run says what it tries again."""

    path: Path
    environment: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: str | None = None

    @classmethod
    def of(cls, stage: Stage, settings: Settings) -> Journal:
        """What an earlier run has left; a half line at its end is passed by."""
        found = cls(settings.out / f"{stage.name}.jsonl")
        for line in found.path.read_text(encoding="utf-8").splitlines() if found.path.exists() else ():
            try:
                found._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return found

    def _take(self, line: dict[str, Any]) -> None:
        if "environment" in line:
            self.environment = dict(line["environment"])
        elif "again" in line:
            self.ended = {key: case for key, case in self.ended.items() if key not in line["again"]}
            self.begun = None
        elif "begin" in line:
            self.begun = str(line["begin"])
        else:
            self.ended[str(line["key"])] = {name: line[name] for name in ("key", "status", "reason", "seconds", "data")}
            self.begun = None

    def start(self, environment: dict[str, Any]) -> None:
        """Go on with what was measured in the same environment; put what was not aside, under another name."""
        if self.environment and _same(self.environment, environment):
            again = [key for key, case in self.ended.items() if case["status"] not in _KEPT]
            if again or self.begun is not None:
                self._write({"again": again})
            return
        if self.path.exists():
            number = next(n for n in range(1, 10_000) if not self.path.with_suffix(f".{n}.jsonl").exists())
            self.path.rename(self.path.with_suffix(f".{number}.jsonl"))
        self.environment, self.ended, self.begun = environment, {}, None
        self._write({"environment": environment})

    def begin(self, key: str) -> None:
        self._write({"begin": key})

    def end(self, key: str, status: str, reason: str, seconds: float, data: dict[str, Any]) -> None:
        self._write({"key": key, "status": status, "reason": reason, "seconds": seconds, "data": data})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        self._take(json.loads(text))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_whole(self.path):
                file.write("\n")
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    def result(self, stage: Stage, status: str, reason: str, simulated: bool) -> dict[str, Any]:
        """The stage's result; `status` is the stage's own trouble, "ok" where it had none: then its cases decide."""
        cases = list(self.ended.values())
        bad = [case for case in cases if case["status"] != "ok"]
        if status == "ok" and bad:
            status = "failed"
            if all(case["status"] == "skipped" for case in bad):
                status = "skipped" if bad == cases else "incomplete"
            reason = f"{len(bad)} of {len(cases)} cases: {bad[0]['key']}: {bad[0]['reason']}"
        return {
            "schema": SCHEMA, "stage": stage.name, "title": stage.title, "status": status, "reason": reason,
            "simulated": simulated, "environment": self.environment,
            "seconds": round(sum(case["seconds"] for case in cases), 3), "cases": cases,
        }  # fmt: skip


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write a result in one piece; returns where."""
    path = folder / f"{result['stage']}.json"
    partial = path.with_suffix(".json.part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return {k: v for k, v in one.items() if k != "date"} == {k: v for k, v in other.items() if k != "date"}


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
