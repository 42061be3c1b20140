"""Keeps the reports of campaigns that their budget ended, in the user's cache folder. A later run can continue them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from tricomm import env
from tricomm.errors import InvalidArgument
from tricomm.explorer.memory_model.source_lines import is_users
from tricomm.explorer.report.report import Report, digest
from tricomm.store import files

_MOST_BYTES = 1 << 28
_QUOTED = re.compile(rb"""["'](\w+)["']""")


class Kept:
    """The kept report of a campaign. `identity`: the function of `file`, its arguments and options. The report is void
    after a change of a loaded source (of tricomm, of the package of `file`, or outside of the installed packages), or
    of an environment variable whose name is in quotation marks in such a source. `warn` is called once if a file cannot
    be read or written."""

    def __init__(self, identity: dict[str, Any], file: str | None, warn: Callable[[str], None]) -> None:
        versions = [platform.python_version(), torch.__version__, triton.__version__, np.__version__]
        text = json.dumps([identity, versions, env.beginning("TRICOMM_", "TRITON_")], sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._path = env.user_folder("XDG_CACHE_HOME", ".cache") / "checks" / f"{name}.json"
        self._file, self._warn, self._warned = file, warn, False
        self._variables = env.beginning("")
        self._sources = self._loaded()  # now: the user may change a file while the schedules run

    def report(self) -> Report | None:
        """The kept report; None if there is none."""
        try:
            if not self._path.exists():
                return None
            values = json.loads(files.read(self._path, _MOST_BYTES, shared=False))
            sources = dict(values["sources"])
            changed = any(digest(file) != text for file, text in sources.items())
            changed = changed or values.get("environment") != self._environment(sources)
            return None if changed else Report.load(self._path)
        except (OSError, ValueError, LookupError, TypeError, RecursionError, InvalidArgument) as error:
            self._tell(f"earlier schedules are not used: {self._path}: {error}")
            return None

    def keep(self, report: Report) -> None:
        sources = {**self._loaded(), **self._sources}
        values = report.as_json() | {"sources": sources, "environment": self._environment(sources)}
        content = json.dumps(values).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._path, content)
        except OSError as error:
            self._tell(f"the next run begins anew, because this one cannot be kept: {error}")

    def _loaded(self) -> dict[str, str | None]:
        """The digests of all loaded sources."""
        loaded = {n: f for n, m in list(sys.modules.items()) if isinstance(f := getattr(m, "__file__", None), str)}
        packages = {"tricomm", *(name.partition(".")[0] for name, file in loaded.items() if file == self._file)}
        return {f: digest(f) for n, f in loaded.items() if n.partition(".")[0] in packages or is_users(f)}

    def _environment(self, sources: Iterable[str]) -> str:
        """A digest of the values of the variables that the sources name. Not the values, which may be secret."""
        named: set[bytes] = set()
        for file in sources:
            try:
                named.update(_QUOTED.findall(Path(file).read_bytes()))
            except OSError:
                continue  # a file that cannot be read has no digest
        read = {name: value for name, value in self._variables.items() if os.fsencode(name) in named}
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()

    def _tell(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)
