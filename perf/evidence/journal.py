"""The journal has one JSON line for every case that ends, so that no measurement is lost; results are made from it."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tricomm.perf.evidence.result_schema import SCHEMA
from tricomm.perf.evidence.schedule import Key
from tricomm.perf.evidence.stage import Stage

NAME, ASIDE = "journal.jsonl", "aside.zip"
_KEPT = ("ok", "skipped")  # cases that a later run does not repeat
_NOT_COMPARED = ("date", "commit")  # the hash of the sources identifies the code, with or without a commit
_FIELDS = ("key", "status", "reason", "seconds", "data")


@dataclass
class Journal:
    """The lines of the file in `folder`. The first has the environment. A case has a line when it begins, and one when
    it ends or is cut off because the budget is over. A later run adds a line with the cases that it repeats."""

    folder: Path
    environment: dict[str, Any] = field(default_factory=dict)
    ended: dict[Key, dict[str, Any]] = field(default_factory=dict)
    cut: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Journal:
        """The journal of an earlier run; a half line at its end is ignored."""
        journal = cls(folder)
        text = journal.path.read_text(encoding="utf-8") if journal.path.exists() else ""
        for line in text.splitlines():
            try:
                journal._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return journal

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def _take(self, line: dict[str, Any]) -> None:
        if "environment" in line:
            self.environment = dict(line["environment"])
        elif "again" in line:
            for stage, key in line["again"]:
                del self.ended[stage, key]
        elif "cut" in line:
            self.cut[line["stage"], line["cut"]] = float(line["seconds"])
        elif "begin" not in line:
            self.ended[line["stage"], line["key"]] = {name: line[name] for name in _FIELDS}

    def start(self, environment: dict[str, Any]) -> str:
        """Continue a journal of the same environment, or move another one aside. Returns in words which of the two."""
        before = self.environment
        other = [name for name in {**before, **environment} if name not in _NOT_COMPARED]
        other = [name for name in other if before.get(name) != environment.get(name)]
        if before and not other:
            again = [key for key, case in self.ended.items() if case["status"] not in _KEPT]
            if again:
                self._write({"again": again})
            return f"goes on with {len(self.ended)} cases of an earlier run" + (
                f"; {len(again)} that went wrong are tried again" if again else ""
            )
        note = ""
        if self.path.exists():
            note = f"starts anew: {', '.join(other) or 'the journal'} changed; the journal before is in {ASIDE}"
            with zipfile.ZipFile(self.folder / ASIDE, "a", zipfile.ZIP_DEFLATED) as aside:
                aside.write(self.path, f"{len(aside.namelist()) + 1}.jsonl")
            self.path.unlink()
        self.environment, self.ended, self.cut = environment, {}, {}
        self._write({"environment": environment})
        return note

    def begin(self, stage: str, key: str) -> None:
        self._write({"stage": stage, "begin": key})

    def end(self, stage: str, key: str, status: str, reason: str, seconds: float, data: dict[str, Any]) -> None:
        self._write({"stage": stage, "key": key, "status": status, "reason": reason, "seconds": seconds, "data": data})

    def cut_off(self, stage: str, key: str, seconds: float) -> None:
        """The budget ended before the case; it runs again if there is more time than `seconds`."""
        self._write({"stage": stage, "cut": key, "seconds": seconds})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        self._take(json.loads(text))
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_whole(self.path):
                file.write("\n")
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    def result(self, stage: Stage, trouble: tuple[str, str] | None, left: Mapping[str, str], simulated: bool) -> Any:
        """The stage's result. Its status and reason are `trouble`, or follow from its cases; `left` has the cases that
        did not run, with the reasons."""
        cases = [case for (name, _), case in self.ended.items() if name == stage.name]
        bad = [case for case in cases if case["status"] != "ok"]
        status, reason = trouble or ("ok", "")
        if trouble is None and any(case["status"] != "skipped" for case in bad):
            status = "failed"
        elif trouble is None and (bad or left):
            status = "incomplete"
            if len(bad) == len(cases):
                status = "not run" if left else "skipped"
        if trouble is None and bad:
            first = next((case for case in bad if case["status"] != "skipped"), bad[0])
            reason = f"{len(bad)} of {len(cases)} cases: {first['key']}: {first['reason']}"
        elif trouble is None and left:
            reason = "; ".join(dict.fromkeys(left.values()))
        return {
            "schema": SCHEMA, "stage": stage.name, "title": stage.title, "status": status, "reason": reason,
            "simulated": simulated, "environment": self.environment,
            "seconds": round(sum(case["seconds"] for case in cases), 3), "cases": cases,
            "left": [{"key": key, "reason": why} for key, why in left.items()],
        }  # fmt: skip


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
