"""Rows of a long run. Each is written to a file at once, so that an interrupted run can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tricomm.errors import InvalidArgument
from tricomm.perf import provenance

Row = dict[str, Any]
option = click.option(
    "--kept",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of rows; after a cut the next run goes on there.",
)


class KeptRows:
    """Rows by name, each a line of JSON, for one commit and one set of versions. Without a path nothing is kept.

    Raises `InvalidArgument` if the file has rows of something else, or if the checkout has uncommitted changes, because
    rows from before and after a change would look the same.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is None:
            return
        commit = provenance.commit()
        origin = {"commit": commit, "versions": provenance.versions()}
        if not commit or commit.endswith("+"):
            raise InvalidArgument(f"{path}: rows are kept of a commit only, and this checkout has changes; commit them")
        if not path.exists() or not path.read_text():
            path.write_text(json.dumps(origin) + "\n")
        first, *lines = path.read_text().splitlines(keepends=True)
        if first != json.dumps(origin) + "\n":
            raise InvalidArgument(
                f"{path} has rows of {first.strip()[:200]}, and this is {json.dumps(origin)}; remove it or name another"
            )
        whole = [line for line in lines if line.endswith("\n")]
        self._rows = dict(json.loads(line) for line in whole)
        path.write_text("".join([first, *whole]))  # without an incomplete line

    def get(self, name: str, make: Callable[[], Row]) -> Row:
        """The kept row, or the row that `make` returns. The latter is then kept, unless it says `not available`."""
        if name not in self._rows:
            row = make()
            if self._path is not None and "not available" not in json.dumps(row):
                with self._path.open("a") as file:
                    file.write(json.dumps([name, row]) + "\n")
            self._rows[name] = row
        return self._rows[name]
