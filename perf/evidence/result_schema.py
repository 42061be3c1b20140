"""The form of a stage's result file, and checks of files from other machines."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tricomm.errors import InvalidArgument

SCHEMA = "tricomm-evidence/2"
# Of cases and stages. A stage is incomplete if all cases that ran are ok, and others could not run or were left.
STATES = ("ok", "failed", "skipped", "crashed", "timeout", "incomplete", "not run")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": str, "stage": str, "title": str, "status": str, "reason": str, "simulated": bool, "environment": dict,
    "seconds": (int, float), "cases": list, "left": list,
}  # fmt: skip
_CASE_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": str, "status": str, "reason": str, "seconds": (int, float), "data": dict,
}  # fmt: skip
_LEFT_FIELDS: dict[str, type | tuple[type, ...]] = {"key": str, "reason": str}
_ENVIRONMENT = ("date", "device", "versions")
_ZIP = b"PK"  # how an archive begins, whatever its name
_NEEDED = "an evidence.zip of `python -m tricomm.perf.evidence` is needed, or the JSON of one of its stages"
# Upper limits of numbers, by the suffix of their names. No machine of today exceeds them.
_MOST = {"_us": 1e9, "_gbps": 20_000.0, "_s": 1e6, "ratio": 1e6}


def read_all(path: Path) -> list[dict[str, Any]]:
    """The results of all stages in an archive, or the one in a file. Raises `InvalidArgument` with all problems."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_ZIP))
        if not begin:
            raise ValueError(f"the file is empty; {_NEEDED}")
        results = _archived(path) if begin == _ZIP else {"": _parsed(path.read_bytes(), "neither an archive nor JSON")}
        wrong = [f"{name}: {text}" if name else text for name, result in results.items() for text in problems(result)]
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{path}: JSON that is nested deeper than any result; {_NEEDED}") from None
    if wrong or not results:
        raise InvalidArgument(f"{path}: " + ("; ".join(wrong) or f"no result is in this archive; {_NEEDED}"))
    return list(results.values())


def _archived(path: Path) -> dict[str, Any]:
    """The results by file name; raises `ValueError` for an archive that is not whole."""
    name = "its directory"  # at the end of the archive
    try:
        results = {}
        with zipfile.ZipFile(path) as archive:
            for name in [each for each in archive.namelist() if each.endswith(".json")]:
                results[name] = _parsed(archive.read(name), f"{name} is no JSON")
        return results
    except RecursionError:  # which is a RuntimeError: the archive is whole
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(
            f"this archive is cut off or broken: {name} cannot be read ({error}); copy it again, or run the kit again, "
            "which writes a whole one"
        ) from None


def _parsed(text: bytes, otherwise: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{otherwise} ({error}); {_NEEDED}") from None


def problems(result: Any) -> list[str]:
    """The problems of a result, in its form and its numbers, in words."""
    if not isinstance(result, dict):
        return [f"an object is needed, found {type(result).__name__}"]
    wrong = _typed("", result, _FIELDS)
    if wrong:
        return wrong
    if result["schema"] != SCHEMA:
        return [f"schema {result['schema']!r} is not known; this tricomm reads {SCHEMA}"]
    wrong += [f"environment lacks {name!r}" for name in _ENVIRONMENT if name not in result["environment"]]
    if result["status"] not in STATES:
        wrong.append(f"status {result['status']!r} is none of {', '.join(STATES)}")
    keys = set()
    for number, case in enumerate(result["cases"]):
        where = f"case {number}"
        bad = _typed(where, case, _CASE_FIELDS) if isinstance(case, dict) else [f"{where}: an object is needed"]
        wrong += bad
        if bad:
            continue
        if case["status"] not in STATES:
            wrong.append(f"{where}: status {case['status']!r} is none of {', '.join(STATES)}")
        if case["key"] in keys:
            wrong.append(f"{where}: {case['key']!r} is there twice")
        keys.add(case["key"])
        wrong += [f"case {case['key']!r}: {text}" for text in _implausible(case["data"])]
    for number, left in enumerate(result["left"]):
        where = f"left {number}"
        wrong += _typed(where, left, _LEFT_FIELDS) if isinstance(left, dict) else [f"{where}: an object is needed"]
    states = {case["status"] for case in result["cases"] if isinstance(case, dict) and "status" in case}
    if result["status"] == "ok" and states - {"ok"}:
        wrong.append(f"status is ok, and there are cases that are {', '.join(sorted(states - {'ok'}))}")
    if result["status"] == "ok" and result["left"]:
        wrong.append(f"status is ok, and {len(result['left'])} cases were left")
    return wrong


def _typed(where: str, record: dict[str, Any], fields: dict[str, type | tuple[type, ...]]) -> list[str]:
    prefix = f"{where}: " if where else ""
    wrong = []
    for name, kind in fields.items():
        value = record.get(name)
        if name not in record or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wrong.append(f"{prefix}{name!r} is missing or of another type ({type(value).__name__})")
    return wrong


def _implausible(data: Any, path: str = "") -> list[str]:
    if isinstance(data, dict):
        return [
            text for name, value in data.items() for text in _implausible(value, f"{path}.{name}" if path else name)
        ]
    if isinstance(data, list):
        return [text for n, value in enumerate(data) for text in _implausible(value, f"{path}[{n}]")]
    if isinstance(data, bool) or not isinstance(data, int | float):
        return []
    if not math.isfinite(data):
        return [f"{path} is {data}"]
    for ending, most in _MOST.items():
        if path.endswith(ending) and not 0 <= data <= most:
            return [f"{path} is {data}, expected 0 to {most:g}"]
    return []
