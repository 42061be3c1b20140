"""Gets the numbers of `devtools.bars` for another checkout, for a commit, or from a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument

_HERE = Path(__file__).parent


def find(against: Path, graphs: bool = False) -> dict[str, Any]:
    """The numbers of the checkout `against` (by its own code, in a new process), in the file `against`, or, if neither
    exists, of the commit `against`. `graphs`: only the numbers of `graph_bars`.

    Raises `InvalidArgument` if it is none of them.
    """
    if not against.exists():
        return _commit(str(against), graphs)
    if against.is_file():
        text = against.read_text()
    elif graphs and not (against / "devtools" / "graph_bars.py").exists():
        raise InvalidArgument(f"{against} is of before devtools/graph_bars.py; compare with it without --graphs")
    elif (against / "devtools" / "bars.py").exists():
        command = [sys.executable, "-m", "devtools.bars", "--json", *["--graphs"][: int(graphs)]]
        done = subprocess.run(
            command, cwd=against, env={**os.environ, "PYTHONPATH": str(against.resolve())}, text=True, stdout=-1
        )
        if done.returncode:
            raise InvalidArgument(f"{against}: its devtools.bars ended with {done.returncode}; see its message above")
        text = done.stdout
    else:
        raise InvalidArgument(
            f"{against} is neither a file of numbers nor a checkout with devtools/bars.py; write the file there with a "
            "version that has the command: python -m devtools.bars --json"
        )
    try:
        report = json.loads(text)
        if report["schema"] != 1 or not isinstance(report["values"], dict):
            raise KeyError("schema")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{against}: no numbers of `python -m devtools.bars --json` ({error!r})") from error
    return dict(report)


def _commit(revision: str, graphs: bool = False) -> dict[str, Any]:
    """The numbers of a commit, from a temporary worktree. Raises `InvalidArgument` if `revision` is no commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree, git = Path(folder) / "tree", ["git", "-C", str(_HERE), "worktree"]
        made = subprocess.run([*git, "add", "--detach", str(tree), revision], text=True, capture_output=True)
        if made.returncode:
            raise InvalidArgument(f"{revision} is no file, no checkout and no commit: {made.stderr.strip()}")
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return find(tree, graphs)
        finally:
            signal.signal(signal.SIGTERM, before)
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)
