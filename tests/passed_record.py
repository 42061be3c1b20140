"""A file of the cases that a long campaign has passed, from which an interrupted campaign resumes.

`python -m tests.passed_record FOLDER...` prints a digest of the Python files in these folders, for .ci/run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import triton

import tricomm


class PassedRecord:
    """Lines of JSON in `file`, one a passed case. A line is valid until the package or `cases`, the campaign's files,
    change."""

    def __init__(self, file: Path, *cases: str) -> None:
        self._file, self._sources = file, _digest(cases)

    def has(self, **key: Any) -> bool:
        """True if an earlier line has this key."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        wanted = {**key, "sources": self._sources}
        return any({name: known.get(name) for name in wanted} == wanted for known in map(json.loads, lines))

    def add(self, key: dict[str, Any], **facts: Any) -> None:
        """Append that the case `key` has passed, with `facts` about it."""
        facts |= {"triton": triton.__version__, "when": datetime.now(UTC).isoformat(timespec="seconds")}
        with self._file.open("a") as file:
            file.write(json.dumps({**facts, **key, "sources": self._sources}) + "\n")


def _digest(cases: tuple[str, ...]) -> str:
    package = Path(tricomm.__file__).resolve().parent
    folders = (package, package / "kernels", package / "store")  # in a checkout these two are links
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    names = sorted(str(file.relative_to(package.parent)) for file in files)
    return _of([package.parent / name for name in names] + [Path(case) for case in cases])


def _of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


if __name__ == "__main__":
    print(_of(file for folder in sys.argv[1:] for file in sorted(Path(folder).rglob("*.py"))))
